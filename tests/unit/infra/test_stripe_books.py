"""The books of the Stripe stand-in: what is refused, what counts, and that a replay ends up the same."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.stripe_standin.books import Books, Fact
from infra.stripe_standin.refusals import Refusal
from infra.stripe_standin.rules import event_draft
from infra.stripe_standin.summaries import parse_range, summarise

NOW_S = 1_800_000_000.0 - 1_800_000_000.0 % 86_400 + 12 * 3_600
DAY_S = 86_400


class Desk:
    """Books with one customer and one meter, and every fact made true so far."""

    def __init__(self, *, formula: str = "sum", window: str | None = None) -> None:
        numbers = itertools.count(1)
        self.books = Books(lambda prefix: f"{prefix}_{next(numbers)}")
        self.facts: list[Fact] = []
        self.customer = self.apply(self.books.create_customer({}, now_s=NOW_S))["customer"]["id"]
        params = {"event_name": "tokens", "display_name": "Tokens", "default_aggregation": {"formula": formula}}
        if window is not None:
            params["event_time_window"] = window
        self.meter = self.apply(self.books.create_meter(params, now_s=NOW_S))["meter"]["id"]

    def apply(self, fact: Fact) -> Fact:
        self.facts.append(json.loads(json.dumps(fact)))
        self.books.apply(fact)
        return fact

    def send(self, value: object, identifier: str | None = None, **more: Any) -> Fact:
        now_s = more.get("now_s", NOW_S)
        payload = {"stripe_customer_id": more.get("customer", self.customer), "value": str(value)}
        params: dict[str, Any] = {"event_name": more.get("event_name", "tokens"), "payload": payload}
        if identifier is not None:
            params["identifier"] = identifier
        if "timestamp_s" in more:
            params["timestamp"] = str(more["timestamp_s"])
        draft = event_draft(params, now_s=now_s, v2=False)
        return self.apply(self.books.record_event(draft, now_s=now_s, lag_s=more.get("lag_s", 0.0)))

    def cancel(self, identifier: str, *, event_name: str = "tokens", now_s: float = NOW_S) -> None:
        params = {"event_name": event_name, "type": "cancel", "cancel": {"identifier": identifier}}
        self.apply(self.books.cancel_event(params, now_s=now_s, lag_s=0.0))

    def sums(self, grouping: str | None = "hour", *, days: int = 1) -> dict[int, float]:
        start_s = int(NOW_S) - int(NOW_S) % DAY_S - (days - 1) * DAY_S
        params = {"customer": self.customer, "start_time": str(start_s), "end_time": str(start_s + (days + 1) * DAY_S)}
        if grouping is not None:
            params["value_grouping_window"] = grouping
        events = self.books.counted(self.meter, self.customer)
        found = summarise(self.books.meter(self.meter), events, parse_range(params))
        return {one["start_time"]: one["aggregated_value"] for one in found}

    def total(self) -> float:
        return sum(self.sums(None, days=40).values())


def test_an_identifier_is_refused_for_a_day_and_then_forgotten() -> None:
    desk = Desk()
    desk.send(3, "once")
    with pytest.raises(Refusal, match="already exists with identifier once") as refusal:
        desk.send(3, "once", now_s=NOW_S + DAY_S - 1)
    assert (refusal.value.status, refusal.value.code, refusal.value.should_retry) == (400, None, False)
    assert desk.total() == 3
    desk.send(4, "once", now_s=NOW_S + DAY_S)
    assert desk.total() == 7
    with pytest.raises(Refusal, match="already exists"):
        desk.send(4, "once", now_s=NOW_S + DAY_S + 1)


def test_an_event_without_identifier_gets_its_own() -> None:
    desk = Desk()
    assert desk.send(1)["event"]["identifier"] != desk.send(1)["event"]["identifier"]
    assert desk.total() == 2


@pytest.mark.parametrize(
    ("formula", "expected"),
    [("sum", {10: 7.0, 11: -1.0}), ("count", {10: 2.0, 11: 1.0}), ("last", {10: 2.0, 11: -1.0})],
)
def test_hours_are_utc_and_follow_the_formula(formula: str, expected: dict[int, float]) -> None:
    desk = Desk(formula=formula)
    midnight_s = int(NOW_S) - int(NOW_S) % DAY_S
    desk.send(2, timestamp_s=midnight_s + 11 * 3_600 - 1)
    desk.send(5, timestamp_s=midnight_s + 10 * 3_600)
    desk.send(-1, timestamp_s=midnight_s + 11 * 3_600)
    assert {(start_s - midnight_s) // 3_600: value for start_s, value in desk.sums().items()} == expected


def test_a_pre_aggregated_meter_keeps_the_last_received_of_each_hour() -> None:
    desk = Desk(window="hour")
    hour_s = int(NOW_S) - 3_600
    desk.send(10, "first", timestamp_s=hour_s + 1_800, now_s=NOW_S)
    desk.send(12, "second", timestamp_s=hour_s + 60, now_s=NOW_S + 1)
    desk.send(5, "other hour", timestamp_s=hour_s - 60, now_s=NOW_S + 2)
    assert desk.total() == 17
    desk.cancel("second", now_s=NOW_S + 3)
    assert desk.total() == 15


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"value": "1.5"}, "meter_event_invalid_value"),
        ({"value": "1e3"}, "meter_event_invalid_value"),
        ({"value": ""}, "parameter_missing"),
        ({"value": "1" * 16}, "meter_event_value_too_many_digits"),
        ({"timestamp_s": int(NOW_S) - 35 * DAY_S - 1}, "timestamp_too_far_in_past"),
        ({"timestamp_s": int(NOW_S) + 301}, "timestamp_in_future"),
        ({"timestamp_s": "noon"}, "parameter_invalid_integer"),
        ({"customer": ""}, "meter_event_no_customer_defined"),
        ({"event_name": "unheard"}, None),
        ({"event_name": ""}, "parameter_missing"),
        ({"identifier": "x" * 101}, None),
    ],
)
def test_what_an_event_must_be(more: dict[str, Any], code: str | None) -> None:
    desk = Desk()
    facts_before = len(desk.facts)
    with pytest.raises(Refusal) as refusal:
        desk.send(**{"value": 1, **more})
    assert (refusal.value.status, refusal.value.code) == (400, code)
    assert refusal.value.param is not None
    assert len(desk.facts) == facts_before


@pytest.mark.parametrize(
    "more",
    [
        {"value": "9" * 15},
        {"value": "-" + "9" * 15},
        {"timestamp_s": int(NOW_S) - 35 * DAY_S},
        {"timestamp_s": int(NOW_S) + 300},
        {"identifier": "x" * 100},
    ],
)
def test_the_limits_themselves_are_allowed(more: dict[str, Any]) -> None:
    desk = Desk()
    desk.send(**{"value": 1, **more})
    assert desk.books.outcomes() == ["counted"]


@pytest.mark.parametrize(
    ("timestamp", "timestamp_s"),
    [
        ("2027-01-15T08:00:00Z", 1_800_000_000),
        ("2027-01-15T08:00:00.9Z", 1_800_000_000),
        ("2027-01-15T10:00:00.000+02:00", 1_800_000_000),
        ("2027-01-15T08:00:00", None),
        ("1800000000", None),
        (1_800_000_000, None),
    ],
)
def test_v2_times_are_rfc_3339_with_a_zone(timestamp: object, timestamp_s: int | None) -> None:
    params = {"event_name": "tokens", "payload": {"stripe_customer_id": "c", "value": "1"}, "timestamp": timestamp}
    if timestamp_s is None:
        with pytest.raises(Refusal, match="timestamp"):
            event_draft(params, now_s=NOW_S, v2=True)
    else:
        assert event_draft(params, now_s=NOW_S, v2=True).timestamp_s == timestamp_s


def test_an_unknown_or_deleted_customer_is_accepted_and_found_out_later() -> None:
    desk = Desk()
    desk.send(1, customer="cus_nobody", lag_s=30)
    assert desk.books.outcomes() == ["pending"]
    desk.books.advance(NOW_S + 30)
    assert desk.books.outcomes() == ["meter_event_customer_not_found"]
    desk.apply(desk.books.delete_customer(desk.customer, now_s=NOW_S + 31))
    desk.send(1, now_s=NOW_S + 31)
    assert [error.code for error in desk.books.errors.values()] == ["meter_event_customer_not_found"] * 2


def test_a_meter_shut_before_processing_loses_the_event_and_refuses_the_next() -> None:
    desk = Desk()
    desk.send(1, lag_s=30)
    desk.apply(desk.books.switch_meter(desk.meter, active=False, now_s=NOW_S + 1))
    desk.books.advance(NOW_S + 30)
    assert desk.books.outcomes() == ["archived_meter"]
    with pytest.raises(Refusal, match="No active meter found"):
        desk.send(1, now_s=NOW_S + 31)


def test_events_count_only_after_the_lag() -> None:
    desk = Desk()
    desk.send(5, lag_s=60)
    desk.books.advance(NOW_S + 59.9)
    assert desk.total() == 0
    desk.books.advance(NOW_S + 60)
    assert desk.total() == 5


def test_cancelling_takes_an_event_back_once_and_within_a_day() -> None:
    desk = Desk()
    desk.send(5, "wrong")
    desk.send(6, "right")
    desk.cancel("wrong")
    assert desk.total() == 6
    with pytest.raises(Refusal, match="already cancelled"):
        desk.cancel("wrong")
    with pytest.raises(Refusal, match="last 24 hours"):
        desk.cancel("right", now_s=NOW_S + DAY_S)
    with pytest.raises(Refusal, match="No such meter event"):
        desk.cancel("never sent")
    with pytest.raises(Refusal, match="No such meter event"):
        desk.cancel("right", event_name="other")


def test_an_event_name_belongs_to_one_active_meter() -> None:
    desk = Desk()
    params = {"event_name": "tokens", "display_name": "Again", "default_aggregation": {"formula": "sum"}}
    with pytest.raises(Refusal, match="already exists"):
        desk.books.create_meter(params, now_s=NOW_S)
    desk.apply(desk.books.switch_meter(desk.meter, active=False, now_s=NOW_S))
    desk.apply(desk.books.create_meter(params, now_s=NOW_S))
    with pytest.raises(Refusal, match="already exists"):
        desk.books.switch_meter(desk.meter, active=True, now_s=NOW_S)


def test_a_replay_processes_what_was_due_before_a_later_fact() -> None:
    desk = Desk()
    desk.send(5, customer="cus_3", lag_s=10)
    desk.books.advance(NOW_S + 20)
    assert desk.apply(desk.books.create_customer({}, now_s=NOW_S + 20))["customer"]["id"] == "cus_4"
    late = desk.facts[-1]
    late["customer"]["id"] = "cus_3"
    replayed = Books(str)
    for fact in desk.facts:
        replayed.apply(fact)
    assert replayed.outcomes() == desk.books.outcomes() == ["meter_event_customer_not_found"]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(-50, 50), st.integers(0, 8), st.integers(-35 * 24, 0)),
        st.tuples(st.just("cancel"), st.integers(0, 8)),
        st.tuples(st.just("wait"), st.integers(0, 30 * 3_600)),
    ),
    max_size=40,
)


@given(steps=steps, lag_s=st.sampled_from([0.0, 45.0, 7_200.0]))
def test_sums_are_the_accepted_and_not_cancelled_and_a_replay_agrees(
    steps: list[tuple[Any, ...]], lag_s: float
) -> None:
    desk, now_s = Desk(), NOW_S
    standing: dict[int, tuple[int, int]] = {}
    newest: dict[str, tuple[int, float]] = {}
    for kind, *rest in steps:
        if kind == "wait":
            now_s += rest[0]
            desk.books.advance(now_s)
            continue
        identifier = f"e{rest[1] if kind == 'send' else rest[0]}"
        place, received_s = newest.get(identifier, (-1, -1e18))
        fresh = now_s - received_s < DAY_S
        if kind == "send":
            hour_s = int(now_s) + rest[2] * 3_600
            if fresh:
                with pytest.raises(Refusal, match="already exists"):
                    desk.send(rest[0], identifier, now_s=now_s, timestamp_s=hour_s, lag_s=lag_s)
                continue
            standing[len(desk.books.events)] = (hour_s - hour_s % 3_600, rest[0])
            newest[identifier] = (len(desk.books.events), now_s)
            desk.send(rest[0], identifier, now_s=now_s, timestamp_s=hour_s, lag_s=lag_s)
        elif fresh and place in standing:
            desk.cancel(identifier, now_s=now_s)
            del standing[place]
        else:
            with pytest.raises(Refusal):
                desk.cancel(identifier, now_s=now_s)
    end_s = now_s + lag_s
    expected: defaultdict[int, float] = defaultdict(float)
    for hour_s, value in standing.values():
        expected[hour_s] += value
    replayed = Books(lambda prefix: f"{prefix}_unused")
    for fact in desk.facts:
        replayed.apply(fact)
    for books in (desk.books, replayed):
        books.advance(end_s)
        params = {
            "customer": desk.customer, "start_time": str(int(NOW_S) - 100 * DAY_S - 12 * 3_600),
            "end_time": str(int(NOW_S) + 100 * DAY_S), "value_grouping_window": "hour",
        }  # fmt: skip
        found = summarise(books.meter(desk.meter), books.counted(desk.meter, desk.customer), parse_range(params))
        assert {one["start_time"]: one["aggregated_value"] for one in found} == expected
    assert replayed.outcomes() == desk.books.outcomes()
    assert (replayed.customers, replayed.meters) == (desk.books.customers, desk.books.meters)
