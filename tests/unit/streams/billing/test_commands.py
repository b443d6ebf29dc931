"""What the billing commands say to a person."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import datetime, timezone

from streams.billing.commands import _comparison_lines, _summary
from streams.billing.intents import HourKey
from streams.billing.outcome import PassReport
from streams.billing.reconcile import Compared, Comparison, Difference


def done(*, open_sums: int = 0, **counts: int) -> PassReport:
    return PassReport(counts=Counter(counts), alerts=[], differences=[], open_sums=open_sums)


def test_what_is_left_for_later_is_said_and_leaves_nothing_unsettled() -> None:
    assert _summary(done()) == "nothing to report"
    assert _summary(done(planned=2, waiting=0)) == "2 planned"
    later = "(reported after they end; --include-open-hours reports them now)"
    assert _summary(done(open_sums=7)) == f"nothing reported; 7 sums are in hours still open {later}"
    assert _summary(done(open_sums=1, planned=2)) == f"2 planned; 1 sum is in hours still open {later}"
    assert done(open_sums=7).is_settled


def test_a_comparison_shows_names_hours_that_differ_and_what_it_left_out() -> None:
    hour = HourKey(customer_id="cust_1", meter="items", hour=datetime(2026, 3, 1, 12, tzinfo=timezone.utc))
    pair = Comparison(
        customer_id="cust_1",
        customer="acme",
        meter="items",
        ledger_units=10,
        stripe_units=7,
        differing=[Difference(key=hour, our_units=10, stripe_units=7)],
    )
    first, differing, *rest = _comparison_lines(Compared(pairs=[pair], open_sums=2))
    assert first.split() == ["acme", "cust_1", "items", "ledger", "10", "stripe", "7", "differs"]
    assert differing.split() == ["2026-03-01T12:00Z", "ledger", "10", "stripe", "7"]
    assert rest == ["1 compared, 1 differ", "not compared: 2 sums in hours still open, which are reported later"]
    assert _comparison_lines(Compared(pairs=[], open_sums=0)) == ["0 compared, 0 differ"]

    carried = Difference(key=hour, our_units=10, stripe_units=7, carried_units=3)
    first, line, last = _comparison_lines(Compared(pairs=[replace(pair, differing=[], carried=[carried])], open_sums=0))
    assert first.endswith("equal but for what was carried")
    assert "carried 3: too old for an event, billed by an invoice item" in line
    assert last == "1 compared, 0 differ"
