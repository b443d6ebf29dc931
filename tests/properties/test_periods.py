"""Periods cut from UTC hours: every hour lies in exactly one, and days and months begin where zoneinfo says."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.periods import (
    FIRST,
    HOUR,
    INTERVALS,
    UnknownZone,
    cut,
    cut_days,
    day_in,
    end_of,
    first_hour,
    moment_in,
    month_in,
    next_hour,
    shown,
    start_of,
    zone_named,
    zone_names,
)

NAMES = sorted(zone_names())
# Half and quarter hours, shifts of half an hour, shifts at midnight, a day that was skipped, both ends of the day.
CROOKED = [
    "Asia/Kolkata", "Asia/Kathmandu", "Australia/Lord_Howe", "Pacific/Chatham", "America/St_Johns", "Asia/Beirut",
    "America/Havana", "Africa/Cairo", "America/Santiago", "Pacific/Apia", "Pacific/Kiritimati", "Pacific/Niue",
    "Africa/Casablanca", "Antarctica/Troll", "Asia/Pyongyang", "America/Caracas", "Europe/Berlin", "UTC",
]  # fmt: skip
zones = st.sampled_from(CROOKED) | st.sampled_from(NAMES)
hours = st.integers(40 * 24, 35 * 366 * 24).map(lambda n: FIRST + n * HOUR)


def local_day(hour: datetime, zone: ZoneInfo) -> date:
    return hour.astimezone(zone).date()


def offset(moment: datetime, zone: ZoneInfo) -> timedelta | None:
    return moment.astimezone(zone).utcoffset()


@given(zones.map(zone_named), hours, st.integers(1, 100 * 24))
def test_every_hour_is_in_one_period_which_is_its_local_day_or_month(zone: ZoneInfo, since: datetime, n: int) -> None:
    until = since + n * HOUR
    every = [since + i * HOUR for i in range(n)]
    found = {interval: cut(since, until, interval, zone) for interval in INTERVALS}
    assert found["hour"] == every
    assert found["total"] == [since]
    for starts in found.values():
        assert starts[0] == since
        assert starts == sorted(set(starts))
        assert starts[-1] < until
    for interval, label in (("day", "%Y-%m-%d"), ("month", "%Y-%m")):
        starts = found[interval]
        by_edges = [bisect_right(starts, hour) for hour in every]  # as width_bucket counts
        assert by_edges[0] == 1
        assert by_edges[-1] == len(starts)
        of_day = {f"{hour.astimezone(zone):{label}}": index for hour, index in zip(every, by_edges, strict=True)}
        assert by_edges == [of_day[f"{hour.astimezone(zone):{label}}"] for hour in every]
        assert len(of_day) == len(starts)


@given(
    zones.map(zone_named),
    hours,
    st.lists(st.tuples(st.integers(0, 60 * 24 - 1), st.integers(0, 2**63)), max_size=30),
)
def test_sums_of_hours_days_and_months_are_equal(zone: ZoneInfo, since: datetime, rows: list[tuple[int, int]]) -> None:
    until = since + 60 * 24 * HOUR
    total = sum(quantity for _, quantity in rows)
    days = {(since + at * HOUR).replace(hour=0) for at, _ in rows}
    for interval in INTERVALS:
        dense = cut(since, until, interval, zone)
        sparse = dense if interval == "total" else cut_days(days, interval, zone, since=since, until=until)
        for starts in (dense, sparse):
            sums = [0] * (len(starts) + 1)
            for at, quantity in rows:
                sums[bisect_right(starts, since + at * HOUR)] += quantity
            assert sums[0] == 0  # before the first period
            assert sum(sums) == total
        # Where only days that hold anything are cut, a row is in the same period.
        for at, _ in rows:
            hour = since + at * HOUR
            assert sparse[bisect_right(sparse, hour) - 1] == dense[bisect_right(dense, hour) - 1]


@given(zones.map(zone_named), hours, st.sampled_from(["hour", "day", "month"]))
def test_periods_follow_each_other_without_a_gap(zone: ZoneInfo, hour: datetime, interval: str) -> None:
    start, end = start_of(hour, interval, zone), end_of(hour, interval, zone)
    assert start <= hour < end
    assert start_of(end, interval, zone) == end
    assert start_of(end - HOUR, interval, zone) == start
    assert end_of(start, interval, zone) == end


@pytest.mark.parametrize("region", sorted({name.partition("/")[0] for name in NAMES if "/" in name} | {""}))
def test_days_begin_where_the_clocks_say_in_every_zone(region: str) -> None:
    """Around each shift of the clocks from 2020 to 2035, and at one plain day beside it."""
    for name in NAMES:
        if name.rpartition("/")[0].partition("/")[0] == region:
            check_days(zone_named(name))


def check_days(zone: ZoneInfo) -> None:
    week = 7 * 24 * HOUR
    weeks = [datetime(2020, 1, 1, tzinfo=timezone.utc) + n * week for n in range(16 * 53)]
    shifted = [begin for begin in weeks if offset(begin, zone) != offset(begin + week, zone)]
    days = [begin + n * 24 * HOUR for begin in shifted for n in range(7)]
    for shift in [weeks[10], *(day for day in days if offset(day, zone) != offset(day + 24 * HOUR, zone))]:
        around = [shift + i * HOUR for i in range(-36, 60)]
        starts = cut(around[0], around[-1] + HOUR, "day", zone)
        # Dates never go back from one full UTC hour to the next, so a day's hours are one stretch.
        dates = [local_day(hour, zone) for hour in around]
        assert dates == sorted(dates)
        assert starts[1:] == [b for a, b in pairwise(around) if local_day(a, zone) != local_day(b, zone)]
        for start in starts[1:]:
            day = local_day(start, zone)
            midnight = datetime.combine(day, time(), zone).astimezone(timezone.utc)
            assert midnight <= start < midnight + 2 * HOUR
            assert day_in(day.isoformat(), zone)[0] == start


@pytest.mark.parametrize(
    ("zone", "day", "hours", "begin"),  # of years whose clocks no longer change
    [
        ("Europe/Berlin", "2026-03-29", 23, "2026-03-29T00:00:00+01:00"),
        ("Europe/Berlin", "2026-10-25", 25, "2026-10-25T00:00:00+02:00"),
        # 24.5 hours of the clocks, which begin at :00 and end at :30 of UTC.
        ("Australia/Lord_Howe", "2026-04-05", 25, "2026-04-05T00:00:00+11:00"),
        ("Australia/Lord_Howe", "2026-10-04", 23, "2026-10-04T00:30:00+10:30"),
        ("Asia/Kolkata", "2026-03-01", 24, "2026-03-01T00:30:00+05:30"),
        ("Asia/Kathmandu", "2026-03-01", 24, "2026-03-01T00:45:00+05:45"),
        ("Asia/Beirut", "2019-03-31", 23, "2019-03-31T01:00:00+03:00"),
        ("America/Havana", "2019-11-03", 25, "2019-11-03T00:00:00-04:00"),
        ("Pacific/Apia", "2011-12-30", 0, "2011-12-31T00:00:00+14:00"),
        ("UTC", "2026-03-01", 24, "2026-03-01T00:00:00Z"),
    ],
)
def test_days_of_23_and_25_hours_and_of_none(zone: str, day: str, hours: int, begin: str) -> None:
    since, until = day_in(day, zone_named(zone))
    assert (until - since) / HOUR == hours
    assert shown(since, zone_named(zone)) == begin


@given(zones.map(zone_named), hours)
def test_what_is_shown_means_the_same_moment_when_it_is_given_back(zone: ZoneInfo, hour: datetime) -> None:
    assert moment_in(shown(hour, zone), zone) == hour
    assert next_hour(hour) == hour
    assert next_hour(hour + timedelta(microseconds=1)) == hour + HOUR
    day = hour.astimezone(zone).date()
    assert moment_in(day.isoformat(), zone) == first_hour(day, zone)
    assert month_in(f"{day:%Y-%m}", zone) == (start_of(hour, "month", zone), end_of(hour, "month", zone))


def test_a_time_that_the_clocks_show_twice_is_the_first() -> None:
    berlin = zone_named("Europe/Berlin")
    assert shown(moment_in("2026-10-25T02:30", berlin), berlin) == "2026-10-25T02:30:00+02:00"
    assert shown(moment_in("2026-03-29T02:30", berlin), berlin) == "2026-03-29T03:30:00+02:00"


def refusal(parse: Callable[..., object], *arguments: object) -> str | None:
    """What it is refused with; None when it is taken."""
    try:
        parse(*arguments)
    except ValueError as error:
        return str(error)
    return None


@given(st.text(max_size=80))
def test_any_text_is_a_zone_or_refused_with_words(text: str) -> None:
    words = refusal(zone_named, text)
    assert words is None or "expected a zone of the IANA database" in words


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("Europe/Berln", "Europe/Berlin"),
        ("europe/berlin", "Europe/Berlin"),
        ("berlin", "Europe/Berlin"),
        ("New York", "America/New_York"),
        ("Calcutta", "Asia/Calcutta"),
    ],
)
def test_a_zone_that_is_not_there_is_told_with_those_near_it(wrong: str, near: str) -> None:
    with pytest.raises(UnknownZone, match=near):
        zone_named(wrong)


@pytest.mark.parametrize("wrong", ["", "../etc/passwd", "/etc/passwd", "Europe/", "right/UTC", "Factory", "a" * 9999])
def test_a_name_is_never_a_path(wrong: str) -> None:
    with pytest.raises(UnknownZone):
        zone_named(wrong)


@given(st.text(max_size=40) | st.from_regex(r"[0-9]{4}-[0-9]{2}(-[0-9]{2}(T[0-9]{2}:[0-9]{2}(Z|[+-][0-9]{2}:00)?)?)?"))
def test_any_text_is_a_time_or_refused_with_words(text: str) -> None:
    for parse in (moment_in, day_in, month_in):
        words = refusal(parse, text, zone_named("America/St_Johns"))
        assert words is None or "expected a" in words
