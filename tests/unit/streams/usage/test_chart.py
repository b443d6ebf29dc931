"""Bars in proportion, never wider than the terminal, and whatever is above zero can be seen."""

from __future__ import annotations

import io
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from infra.periods import UTC, cut_days, end_of, zone_named
from streams.usage.chart import MOST_BARS, ChartWriter, TooManyBars, bar, gap_lines
from streams.usage.completeness import remarks
from streams.usage.lines import Completeness, UsageLine, Wanted

NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)


def line(quantity: int, *, day: int = 0, customer: str = "acme", meter: str = "items") -> UsageLine:
    start = NOON + timedelta(days=day)
    return UsageLine(
        start=start,
        end=start + timedelta(days=1),
        customer_id="cust_1",
        customer=customer,
        model="",
        version="",
        price_id="",
        meter=meter,
        quantity=quantity,
    )


def drawn(lines: list[UsageLine], *, width: int = 60, encoding: str = "utf-8", by: tuple[str, ...] = ()) -> list[str]:
    out = io.BytesIO()
    writer = ChartWriter(
        out, encoding, interval="day", zone=UTC, by=by, width=width, plain=False, whole_until=NOON + timedelta(days=1)
    )
    writer.add(lines)
    writer.end(
        {meter: sum(x.quantity for x in lines if x.meter == meter) for meter in {x.meter for x in lines}}, {}, []
    )
    return out.getvalue().decode(encoding).splitlines()


@given(st.integers(0, 2**70), st.integers(1, 2**70), st.integers(1, 300), st.booleans())
def test_a_bar_is_in_proportion_and_seen(quantity: int, most: int, width: int, plain: bool) -> None:
    most = max(quantity, most)
    found = bar(quantity, most, width, plain=plain)
    assert len(found) <= width
    assert bool(found) == (quantity > 0)
    assert not plain or found.isascii()
    if quantity == most:
        assert len(found) == width
    assert abs(len(found) - quantity * width / most) <= 1


@given(
    st.lists(st.tuples(st.integers(0, 10**12), st.text(max_size=90)), min_size=1, max_size=9),
    st.integers(60, 200),
    st.sampled_from(["utf-8", "ascii", "latin-1"]),
)
def test_lines_fit_the_terminal_and_its_characters(rows: list[tuple[int, str]], width: int, encoding: str) -> None:
    lines = [line(quantity, day=day, customer=name) for day, (quantity, name) in enumerate(rows)]
    found = drawn(lines, width=width, encoding=encoding, by=("customer",))
    assert len(found) == len(rows) + 2 + (len(rows) > 1)  # the meter's head, an empty line, and what the mark means
    if encoding == "utf-8":
        assert all(cell_len(text) <= width for text in found)


def test_what_may_still_grow_is_marked() -> None:
    text = "\n".join(drawn([line(5), line(9, day=1)]))
    assert "2026-03-01  " in text
    assert "2026-03-02* " in text
    assert "* may still grow" in text
    assert "*" not in "\n".join(drawn([line(5)]))


def test_each_meter_has_a_scale_of_its_own() -> None:
    found = drawn([line(2), line(2_000_000, meter="tokens")])
    assert len([text for text in found if text.count("█") > 30]) == 2


def test_too_many_bars_are_refused_before_they_fill_memory() -> None:
    with pytest.raises(TooManyBars, match="longer --interval"):
        drawn([line(1, day=day) for day in range(MOST_BARS + 1)])


def said(**changes: object) -> str:
    fields: dict[str, object] = {"until": NOON, "seen_at": NOON, "as_of": NOON, "positions": {}}
    return "\n".join(remarks(Completeness(**{**fields, **changes}), UTC, waiting=0))  # type: ignore[arg-type]


def test_people_are_told_how_old_the_ledgers_word_is() -> None:
    assert (
        said(as_of=NOON + timedelta(seconds=3))
        == "complete up to 2026-03-01T12:00:00Z, by the ledger's word of 3 s ago"
    )
    assert "by the ledger's word of 5 h ago\nthe ledger says nothing since" in said(as_of=NOON + timedelta(hours=5))
    assert "unknown" in said(until=None)
    assert "by the ledger's word of 0 s ago" in said(as_of=NOON - timedelta(hours=5))  # clocks differ


@pytest.mark.parametrize(
    ("interval", "zone", "last"),
    [
        ("day", "UTC", "2026-03-03"),
        ("day", "Pacific/Auckland", "2026-03-04"),
        ("day", "America/Los_Angeles", "2026-03-03"),
        ("hour", "UTC", "2026-03-03T12"),
        ("month", "UTC", "2026-03-01"),
    ],
)
def test_no_bar_is_of_a_period_that_has_not_begun(interval: str, zone: str, last: str) -> None:
    """Days with usage are known by UTC, and a zone's next day may share the last hours of one."""
    known = zone_named(zone)
    days = [datetime(2026, 3, day, tzinfo=timezone.utc) for day in (1, 3)]
    wanted = Wanted(since=None, until=None, interval=interval, zone=known, by=())
    starts = cut_days(days, interval, known, since=None, until=None)
    now = days[-1].replace(hour=12)
    gaps = gap_lines(starts, lambda start: end_of(start, interval, known), wanted, now=now)
    assert gaps[-1].start is not None
    assert gaps[-1].start <= now
    assert gaps[-1].start.astimezone(known).isoformat().startswith(last)
    early = gap_lines(starts, lambda start: end_of(start, interval, known), wanted, now=days[0].replace(hour=3))
    assert all(gap.start is not None and gap.start.day in (1, 28) for gap in early)
