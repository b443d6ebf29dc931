from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from streams.billing.intents import (
    HourKey,
    Intent,
    Report,
    State,
    Step,
    Verdict,
    event_time,
    identifier,
    judge,
    last_sealed_hour,
    next_step,
    plan,
)

NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
NOW = NOON + timedelta(hours=3)
KEY = HourKey(customer_id="acme", meter="items", hour=NOON)


def told(intent: Intent, state: State) -> Report:
    return Report(
        key=intent.key,
        rev=intent.rev,
        total_units=intent.total_units,
        delta_units=intent.delta_units,
        state=state,
    )


def planned(total: int, *reports: Report, **options: object) -> list[Intent]:
    return plan({KEY: total}, reports, environment="test", now=NOW, **options)  # type: ignore[arg-type]


def test_late_usage_is_the_next_rev_and_only_the_difference() -> None:
    (first,) = planned(10)
    (second,) = planned(13, told(first, State.CONFIRMED))
    assert (first.rev, first.delta_units) == (1, 10)
    assert (second.rev, second.delta_units, second.total_units) == (2, 3, 13)
    assert first.identifier != second.identifier


def test_an_hour_that_shrinks_is_taken_back() -> None:
    (first,) = planned(10)
    (second,) = planned(4, told(first, State.DELIVERED))
    assert second.delta_units == -6


@pytest.mark.parametrize("state", [State.PLANNED, State.SENDING])
def test_an_hour_in_doubt_waits(state: State) -> None:
    (first,) = planned(10)
    assert planned(13, told(first, state)) == []


def test_what_was_lost_is_said_again_under_another_name() -> None:
    (first,) = planned(10)
    (second,) = planned(10, told(first, State.LOST))
    assert (second.rev, second.delta_units) == (2, 10)


def test_what_was_refused_is_not_said_again_until_something_changed() -> None:
    (first,) = planned(10)
    refused = told(first, State.REJECTED)
    assert planned(10, refused) == []
    assert [i.delta_units for i in planned(11, refused)] == [11]
    assert [i.delta_units for i in planned(10, refused, retry_rejected=True)] == [10]


def test_what_is_too_old_for_an_event_is_carried_and_never_sent() -> None:
    now = NOON + timedelta(days=36)
    (intent,) = plan({KEY: 10}, [], environment="test", now=now)
    assert intent.state is State.CARRIED
    assert plan({KEY: 10}, [told(intent, State.CARRIED)], environment="test", now=now) == []


def test_nothing_is_said_of_an_hour_without_use() -> None:
    assert planned(0) == []


def test_an_identifier_depends_on_everything_that_makes_an_intent_another_one() -> None:
    later = HourKey(customer_id="acme", meter="items", hour=NOON + timedelta(hours=1))
    # Joined without care, "a"+"bc" and "ab"+"c" would be one and the same.
    pairs = [HourKey(customer_id="a", meter="bc", hour=NOON), HourKey(customer_id="ab", meter="c", hour=NOON)]
    names = {
        *(identifier("test", key, 1) for key in (KEY, later, *pairs)),
        identifier("live", KEY, 1),
        identifier("test", KEY, 2),
    }
    assert len(names) == 6
    # Fixed for ever: after an upgrade an open intent must be resent under the name it had before.
    assert identifier("test", KEY, 1) == "ilr_7e2b309b3b8d4432afe175290320790267adacb9"


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (NOON + timedelta(hours=5), NOON + timedelta(minutes=30)),
        (NOON + timedelta(minutes=10), NOON + timedelta(minutes=10)),
        (NOON + timedelta(minutes=45), NOON + timedelta(minutes=30)),
        (NOON - timedelta(seconds=1), NOON),
    ],
)
def test_an_event_lies_in_the_middle_of_its_hour_or_now_never_elsewhere(now: datetime, expected: datetime) -> None:
    assert event_time(NOON, now) == expected


def test_an_hour_is_sealed_a_while_after_its_end() -> None:
    at = NOON + timedelta(minutes=70)
    assert last_sealed_hour(at, seal_after_s=600, include_open_hours=False) == NOON
    earlier = at - timedelta(seconds=1)
    assert last_sealed_hour(earlier, seal_after_s=600, include_open_hours=False) == NOON - timedelta(hours=1)
    assert last_sealed_hour(at, seal_after_s=600, include_open_hours=True) == NOON + timedelta(hours=1)


@pytest.mark.parametrize(
    ("age_h", "step"),
    [(None, Step.SEND), (0, Step.SEND), (19.9, Step.SEND), (20, Step.WAIT), (20.9, Step.WAIT), (21, Step.LOOK)],
)
def test_an_identifier_is_not_used_again_near_the_end_of_its_day(age_h: float | None, step: Step) -> None:
    first_sent_at = None if age_h is None else NOW - timedelta(hours=age_h)
    assert next_step(first_sent_at, NOW) is step


@pytest.mark.parametrize(
    ("stripe_units", "verdict"),
    [(100.0, Verdict.LOST), (107.0, Verdict.ARRIVED), (114.0, Verdict.UNCLEAR), (0.0, Verdict.UNCLEAR)],
)
def test_only_two_sums_are_clear(stripe_units: float, verdict: Verdict) -> None:
    assert judge(stripe_units, prior_units=100, delta_units=7) is verdict
