"""Whatever an hour's total does, the deltas said of it add up to the last one, each under a name of its own."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from streams.billing.intents import OPEN, HourKey, Report, State, event_time, identifier, plan

NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
NOW = NOON + timedelta(days=2)
KEYS = st.builds(
    HourKey,
    customer_id=st.text(max_size=5),
    meter=st.text(max_size=5),
    hour=st.integers(0, 40).map(lambda h: NOON + timedelta(hours=h)),
)
TOTALS = st.dictionaries(KEYS, st.integers(0, 10**12), max_size=4)
ENDS = st.sampled_from([State.DELIVERED, State.CONFIRMED, State.LOST, State.REJECTED, State.SENDING])


def reported(reports: list[Report], totals: dict[HourKey, int], end: State) -> list[Report]:
    intents = plan(totals, reports, environment="test", now=NOW)
    return [
        Report(key=i.key, rev=i.rev, total_units=i.total_units, delta_units=i.delta_units, state=end) for i in intents
    ]


@given(st.lists(st.tuples(TOTALS, ENDS), max_size=8), TOTALS)
def test_deltas_add_up_to_the_last_total_however_earlier_ones_ended(
    history: list[tuple[dict[HourKey, int], State]], last: dict[HourKey, int]
) -> None:
    reports: list[Report] = []
    for totals, end in history:
        # What was still being sent has arrived by the next pass.
        reports = [
            Report(key=r.key, rev=r.rev, total_units=r.total_units, delta_units=r.delta_units, state=State.DELIVERED)
            if r.state is State.SENDING
            else r
            for r in reports
        ]
        reports += reported(reports, totals, end)
    reports = [r for r in reports if r.state not in OPEN]
    intents = plan(last, reports, environment="test", now=NOW, retry_rejected=True)
    reports += [
        Report(key=i.key, rev=i.rev, total_units=i.total_units, delta_units=i.delta_units, state=State.DELIVERED)
        for i in intents
    ]
    for key, total in last.items():
        counted = [r.delta_units for r in reports if r.key == key and r.state not in (State.LOST, State.REJECTED)]
        assert sum(counted) == total
    names = [(r.key, r.rev) for r in reports]
    assert len(names) == len(set(names))
    assert plan(last, reports, environment="test", now=NOW, retry_rejected=True) == []


@given(TOTALS, TOTALS)
def test_planning_again_while_intents_are_open_adds_nothing(
    first: dict[HourKey, int], second: dict[HourKey, int]
) -> None:
    reports = reported([], first, State.PLANNED)
    for intent in plan({**first, **second}, reports, environment="test", now=NOW):
        assert intent.key not in {report.key for report in reports}


@given(st.lists(st.tuples(KEYS, st.integers(1, 100)), unique=True, max_size=20))
def test_identifiers_are_unique_stable_and_short(places: list[tuple[HourKey, int]]) -> None:
    names = [identifier("test", key, rev) for key, rev in places]
    assert len(set(names)) == len(places)
    assert names == [identifier("test", key, rev) for key, rev in places]
    assert all(len(name) <= 100 for name in names)


@given(st.integers(-7200, 10**7))
def test_an_event_never_leaves_its_hour_nor_lies_ahead_of_time(offset_s: int) -> None:
    now = NOON + timedelta(seconds=offset_s)
    at = event_time(NOON, now)
    assert NOON <= at < NOON + timedelta(hours=1)
    assert at <= max(now, NOON)
