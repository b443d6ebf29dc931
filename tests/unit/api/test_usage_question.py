"""What may be asked of `GET /v1/usage`: ranges on a zone's clocks, and refusals that name the parameter."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import MultiDict

from api.errors import ApiError
from api.usage_question import FILTERS, LIMIT, Place, question
from infra.periods import HOUR, shown

NOW = datetime(2026, 3, 1, 12, 34, 56, tzinfo=timezone.utc)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


def test_the_default_question_is_the_last_day_up_to_this_hour() -> None:
    asked = question({}, now=NOW)
    assert asked.until.isoformat() == "2026-03-01T13:00:00+00:00"
    assert asked.since.isoformat() == "2026-02-28T13:00:00+00:00"
    assert (asked.interval, asked.zone.key, asked.by, asked.limit, asked.format) == (
        "hour",
        "UTC",
        ("model",),
        LIMIT,
        "json",
    )
    assert len(asked.starts) == 24


@pytest.mark.parametrize(
    ("interval", "since", "periods"),
    [
        ("day", "2026-01-31T00:30:00+05:30", 30),
        ("month", "2025-04-01T00:30:00+05:30", 12),
        ("total", "2026-01-31T00:30:00+05:30", 1),
    ],
)
def test_longer_periods_are_whole_ones_of_the_zone_today_among_them(interval: str, since: str, periods: int) -> None:
    asked = question({"interval": interval, "zone": "Asia/Kolkata"}, now=NOW)
    assert shown(asked.since, asked.zone) == since
    assert len(asked.starts) == periods
    december = question({"interval": "month"}, now=datetime(2026, 12, 31, 23, 30, tzinfo=timezone.utc))
    assert shown(december.since, december.zone) == "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("text", "zone", "utc"),
    [
        ("2026-01-31", "UTC", "2026-01-31T00:00:00+00:00"),
        ("2026-01-31T10:00:00Z", "UTC", "2026-01-31T10:00:00+00:00"),
        ("2026-01-31T10:00:00+02:00", "UTC", "2026-01-31T08:00:00+00:00"),
        ("2026-01-31T10:00:00 02:00", "UTC", "2026-01-31T08:00:00+00:00"),
        ("2026-01-31 10:00", "Europe/Berlin", "2026-01-31T09:00:00+00:00"),
        # Hours count from the one that begins then or later.
        ("2026-01-31T10:00:00.500-05:30", "UTC", "2026-01-31T16:00:00+00:00"),
        ("2026-01-31", "Asia/Kolkata", "2026-01-30T19:00:00+00:00"),
        ("2026-01-31T00:00", "Asia/Kolkata", "2026-01-30T19:00:00+00:00"),
    ],
)
def test_times_mean_the_zones_clocks_unless_they_say_more(text: str, zone: str, utc: str) -> None:
    assert question({"from": text, "to": "2026-02-01", "zone": zone}, now=NOW).since.isoformat() == utc


def test_months_and_days_are_those_of_the_zone() -> None:
    month = question({"month": "2026-10", "zone": "Europe/Berlin"}, now=NOW)
    assert len(month.starts) == 31 * 24 + 1  # the clocks go back once
    day = question({"day": "2026-10-25", "zone": "Europe/Berlin", "interval": "day"}, now=NOW)
    assert (day.until - day.since, day.starts) == (25 * HOUR, (day.since,))
    assert day.end_of(0) == day.until


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ({"from": "yesterday"}, "from"),
        ({"from": ""}, "from"),
        ({"to": "9999-12-31T23:59:59-23:00"}, "to"),
        ({"to": "0001-01-01"}, "to"),
        ({"to": "0001-01-01T00:00+23:00"}, "to"),
        ({"from": "2026-02-02", "to": "2026-02-01"}, "from"),
        ({"from": "2026-02-02T10:01Z", "to": "2026-02-02T10:59Z"}, "from"),
        ({"from": "2025-01-01", "to": "2026-02-01"}, "from"),
        ({"from": "2020-01-01", "to": "2026-02-01", "interval": "month"}, "from"),
        ({"month": "2026-1"}, "month"),
        ({"month": "2026-01", "day": "2026-01-01"}, "month"),
        ({"day": "2026-01-01", "to": "2026-01-01"}, "day"),
        ({"day": "2026-02-30"}, "day"),
        ({"interval": "week"}, "interval"),
        ({"group": "day"}, "group"),
        ({"zone": "Mars/Phobos"}, "zone"),
        ({"zone": "../UTC"}, "zone"),
        ({"by": "model,customer"}, "by"),
        ({"limit": "0"}, "limit"),
        ({"limit": "5001"}, "limit"),
        ({"limit": "٣"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"format": "xml"}, "format"),
        ({"after": "?"}, "after"),
        ({"after": "W10"}, "after"),
        ({"after": Place(start=NOW, values=("", "", "", "")).token()}, "after"),
        ({"model": "a\0b"}, "model"),
        ({"version": "\ud800"}, "version"),
        ({"form": "2026-02-02"}, "form"),
        (MultiDict([("by", "model"), ("by", "version")]), "by"),
    ],
)
def test_a_bad_parameter_is_named(query: dict[str, str], parameter: str) -> None:
    with pytest.raises(ApiError) as refused:
        question(query, now=NOW)
    assert refused.value.status == 400
    assert refused.value.param == parameter
    assert refused.value.message.startswith(f"{parameter}:")


def test_an_unknown_zone_is_told_with_those_near_it() -> None:
    with pytest.raises(ApiError, match=r"zone: .*Europe/Berlin"):
        question({"zone": "Europe/Berln"}, now=NOW)


def test_the_meter_is_always_told_apart() -> None:
    assert question({"by": ""}, now=NOW).by == ()
    assert question({"by": "meter"}, now=NOW).by == ()
    assert question({"by": "price_id, version,model"}, now=NOW).by == ("model", "version", "price_id")


@given(
    st.sampled_from(["hour", "day", "month", "total"]),
    st.sampled_from(["UTC", "Asia/Kathmandu", "America/Havana", "Etc/GMT+12"]),
    st.lists(st.sampled_from(["model", "version", "price_id"]), unique=True),
    st.dictionaries(
        st.sampled_from(FILTERS), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
    ),
    st.integers(0, 40),
    st.tuples(texts, texts, texts, texts),
)
def test_the_next_page_is_of_the_same_question(
    interval: str, zone: str, by: list[str], filters: dict[str, str], period: int, values: tuple[str, str, str, str]
) -> None:
    query = {"interval": interval, "zone": zone, "by": ",".join(by), "limit": "7", "format": "csv", **filters}
    asked = question(query, now=NOW)
    place = Place(start=asked.starts[period % len(asked.starts)], values=values)
    following = question(dict(parse_qsl(asked.page_after(place), keep_blank_values=True)), now=NOW + timedelta(hours=5))
    assert following.after == place
    assert following.first_period() == period % len(asked.starts)
    for name in ("since", "until", "starts", "interval", "zone", "by", "filters", "limit", "format"):
        assert getattr(following, name) == getattr(asked, name), name
