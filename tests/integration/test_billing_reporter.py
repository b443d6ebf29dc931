"""What Stripe counts is what the ledger says: whatever is lost, repeated, late, refused, slow or away.

Each test that leans on a mechanism stands beside one in which the mechanism is taken away and the sums go wrong.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from infra.postgres import connect
from streams.billing import sender
from streams.billing.intents import HOUR, Step
from streams.billing.reports import Reports
from streams.billing.stripe_gateway import CustomerGone, MeterEvent, Retryable, StripeUnusable
from tests.integration.billing_world import NOON, SENDS, World, open_world
from tests.processes import Process


@pytest.fixture
async def world(env: dict[str, str], spawn: Callable[..., Process], tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(env, spawn, tmp_path) as made:
        yield made


@pytest.fixture
async def three_customers(world: World) -> World:
    for n, name in enumerate(("acme", "brook", "cedar"), start=1):
        await world.add_customer(name)
        for hours_ago in (2, 3, 30):
            await world.use(name, 10 * n, hours_ago=hours_ago)
            await world.use(name, n, hours_ago=hours_ago, version="b" * 64)
            await world.use(name, 1, meter="requests", hours_ago=hours_ago)
    return world


async def assert_equal_sums(world: World) -> None:
    assert world.at_stripe() == await world.ledger()
    assert await world.differing() == []


async def test_hours_are_summed_over_versions_sent_confirmed_and_never_sent_again(three_customers: World) -> None:
    world = three_customers
    first = await world.run()
    assert first.is_settled
    assert first.counts["delivered"] == first.counts["confirmed"] == 18
    await assert_equal_sums(world)
    events = world.events()
    assert {e["timestamp_s"] % 3600 for e in events} == {1800}
    assert sorted({e["value"] for e in events if "_items" in e["event_name"]}) == [11, 22, 33]

    calls = world.state()["calls"]
    second = await world.run()
    assert second.is_settled
    assert world.state()["calls"] == calls, "with nothing to say, Stripe is not even asked"


async def test_late_usage_is_added_and_usage_taken_back_is_subtracted(three_customers: World) -> None:
    world = three_customers
    await world.run()
    await world.use("acme", 5, hours_ago=30)
    await world.use("brook", -7, hours_ago=2)
    second = await world.run()
    assert second.counts["planned"] == second.counts["confirmed"] == 2
    assert [s for s in await world.states() if s[1] == 2] == [("confirmed", 2, 5), ("confirmed", 2, -7)]
    await assert_equal_sums(world)


async def test_an_hour_waits_for_its_seal_unless_open_hours_are_asked_for(world: World) -> None:
    await world.add_customer("acme")
    world.pass_time(timedelta(minutes=5))
    await world.use("acme", 3, hours_ago=1)
    await world.use("acme", 4, hours_ago=0)
    assert (await world.run()).counts["planned"] == 0
    assert await world.differing() == [], "hours that are neither sealed nor reported are not compared"
    await world.run(include_open_hours=True)
    assert world.at_stripe() == {("acme", "items"): 7}
    current = max(e["timestamp_s"] for e in world.events())
    assert current == int((NOON + timedelta(minutes=5)).timestamp()), "never ahead of time, always in its hour"
    await world.use("acme", 2, hours_ago=0)
    world.pass_time(timedelta(minutes=66))
    await world.run()
    await assert_equal_sums(world)


# -- dying ----------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """Not an Exception, so that nothing on the way can take it for a failure to handle."""


class Wire:
    """Ends the process just before its n-th call to the table or to Stripe; between two calls nothing happens."""

    def __init__(self, crash_at: int) -> None:
        self.steps = 0
        self._crash_at = crash_at

    def step(self) -> None:
        self.steps += 1
        if self.steps == self._crash_at:
            raise Crash(f"step {self.steps}")

    def around(self, target: Any) -> Any:
        return _Tripwire(self, target)


class _Tripwire:
    def __init__(self, wire: Wire, target: Any) -> None:
        self._wire = wire
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._wire.step()
            return await method(*args, **kwargs)

        return call


async def test_dying_between_any_two_calls_neither_loses_nor_doubles_anything(world: World) -> None:
    for crash_at in count(1):
        customers = [f"{name}-{crash_at}" for name in ("acme", "brook")]
        for customer in customers:
            await world.add_customer(customer)
            await world.use(customer, 7, meter=f"items{crash_at}")
            await world.use(customer, 8, meter=f"items{crash_at}", hours_ago=3)
        wire = Wire(crash_at)
        try:
            # One at a time, so that the n-th call is the same one in every run.
            await world.run(wrap_reports=wire.around, wrap_gateway=wire.around, concurrency=1)
        except Crash:
            pass
        else:
            break
        await world.run()
        assert world.at_stripe() == await world.ledger(), f"after dying at step {crash_at}"
    assert crash_at > 30, "the walk went through a whole pass"
    assert await world.differing() == []
    made = [c["metadata"]["inferlog_customer_id"] for c in world.state()["customers"]]
    assert len(made) == len(set(made)), "no customer was made twice"
    assert {s[0] for s in await world.states()} == {"confirmed"}


async def test_a_customer_made_at_stripe_and_not_noted_here_is_found_days_later(world: World) -> None:
    await world.add_customer("acme")
    await world.use("acme", 7)

    class DiesBeforeNoting(_Tripwire):
        def __getattr__(self, name: str) -> Any:
            if name == "set_stripe_customer":
                raise Crash(name)
            return getattr(self._target, name)

    with pytest.raises(Crash):
        await world.run(wrap_reports=lambda reports: DiesBeforeNoting(Wire(0), reports))
    # Longer than Stripe keeps the idempotency key: only looking for the metadata can help.
    world.pass_time(timedelta(days=3))
    await world.run()
    assert len(world.state()["customers"]) == 1
    await assert_equal_sums(world)


# -- a bad line -----------------------------------------------------------------------------------------------------


async def test_lost_answers_and_lost_requests_are_made_good_by_the_same_identifier(three_customers: World) -> None:
    world = three_customers
    world.fault("drop_answer", count=6, **SENDS)
    world.fault("drop_request", count=5, **SENDS)
    report = await world.run()
    assert report.is_settled
    assert report.counts["duplicate"] == 6
    assert report.counts["retried"] == 11
    await assert_equal_sums(world)


class RandomIdentifiers:
    """The mechanism taken away: a new identifier for every try."""

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gateway, name)

    async def send(self, event: MeterEvent) -> Any:
        return await self._gateway.send(replace(event, identifier=uuid4().hex))


async def test_without_stable_identifiers_lost_answers_are_billed_twice_and_compare_tells(
    three_customers: World,
) -> None:
    world = three_customers
    world.fault("drop_answer", count=7, **SENDS)
    await world.run(wrap_gateway=RandomIdentifiers)
    assert sum(world.at_stripe().values()) > sum((await world.ledger()).values())
    assert await world.differing() != []


async def test_failures_that_stripe_stores_do_not_block_a_customer_for_a_day(world: World) -> None:
    await world.add_customer("acme")
    await world.add_customer("brook")
    await world.use("acme", 7)
    await world.use("brook", 8)
    creates = {"path": "/v1/customers", "method": "POST", "count": 1}
    world.fault("status", status=500, applied=True, **creates)
    world.fault("status", status=500, applied=False, **creates)
    assert (await world.run()).is_settled
    assert len(world.state()["customers"]) == 2
    await assert_equal_sums(world)


async def test_a_storm_of_429s_delays_and_drops_nothing(three_customers: World) -> None:
    world = three_customers
    world.fault("status", status=429, count=6, path="/v1/")
    world.fault("status", status=429, count=40, **SENDS)
    report = await world.run(patience_s=3600.0)
    assert report.counts["retried"] == 40
    assert report.counts["rejected"] == 0
    assert report.is_settled
    await assert_equal_sums(world)


async def test_one_customer_put_off_does_not_hold_up_the_others(three_customers: World) -> None:
    world = three_customers
    await world.run()
    await world.use("acme", 1)
    await world.use("brook", 1)

    class BusyForAcme(RandomIdentifiers):
        async def send(self, event: MeterEvent) -> Any:
            ours = {c["id"]: c["metadata"]["inferlog_customer_id"] for c in world.state()["customers"]}
            if ours[event.stripe_customer_id] == "acme":
                return Retryable(reason="429: lock_timeout")
            return await self._gateway.send(event)

    report = await world.run(wrap_gateway=BusyForAcme)
    assert (report.counts["delivered"], report.counts["waiting"]) == (1, 1)
    assert not report.is_settled
    await world.run()
    await assert_equal_sums(world)


async def test_stripe_never_sees_two_calls_at_once_for_one_customer_and_meter(three_customers: World) -> None:
    world = three_customers
    world.control("settings", {"latency_s": 0.02})
    await world.run(concurrency=8)
    refused = [call for call in world.state()["calls"] if call.endswith("429")]
    assert refused == []
    await assert_equal_sums(world)


# -- a long outage --------------------------------------------------------------------------------------------------


async def _doubtful_for(world: World, duration: timedelta, *, kind: str = "drop_answer", intents: int = 6) -> None:
    """The first hour of each of six customer-meters was sent, and nobody knows whether it arrived."""
    world.fault(kind, count=intents, **SENDS)
    world.fault("status", status=503, count=1000, **SENDS)
    report = await world.run()
    assert report.counts["delivered"] == report.counts["duplicate"] == 0
    world.heal()
    world.pass_time(duration)


@pytest.mark.parametrize(("kind", "lost"), [("drop_request", 6), ("drop_answer", 0)])
async def test_after_thirty_hours_of_doubt_the_sums_decide(three_customers: World, kind: str, lost: int) -> None:
    world = three_customers
    await _doubtful_for(world, timedelta(hours=30), kind=kind)
    doubtful_hour = 60
    await world.use("acme", 1, hours_ago=doubtful_hour)
    report = await world.run()
    assert report.is_settled
    assert report.counts["lost"] == lost
    await assert_equal_sums(world)


async def test_without_looking_first_a_long_outage_is_billed_twice(
    three_customers: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = three_customers
    monkeypatch.setattr(sender, "next_step", lambda first_sent_at, now: Step.SEND)
    await _doubtful_for(world, timedelta(hours=30))
    await world.run()
    assert world.at_stripe() != await world.ledger()
    assert await world.differing() != []


async def test_between_twenty_and_twenty_one_hours_nothing_is_sent_and_nothing_is_guessed(
    three_customers: World,
) -> None:
    world = three_customers
    await _doubtful_for(world, timedelta(hours=20, minutes=30))
    before = world.state()["calls"]["POST /v1/billing/meter_events drop_answer"]
    report = await world.run()
    assert (report.counts["waiting"], report.counts["delivered"]) == (6, 12), "only what was never sent is sent"
    assert len(world.events()) == before + 12
    world.pass_time(timedelta(hours=1))
    assert (await world.run()).is_settled
    await assert_equal_sums(world)


async def test_a_sum_that_fits_neither_story_is_left_to_a_person(world: World) -> None:
    await world.add_customer("acme")
    await world.use("acme", 7)
    await _doubtful_for(world, timedelta(0))
    await world.post_foreign_event("acme", 1000, at=world.hour(2) + HOUR / 2)
    world.pass_time(timedelta(hours=30))
    for _ in range(2):
        report = await world.run()
        assert not report.is_settled
        assert "unclear" in report.alerts[0]
    assert await world.states() == [("sending", 1, 7)]


async def test_usage_older_than_stripe_takes_is_carried_and_never_given_another_date(three_customers: World) -> None:
    world = three_customers
    world.fault("outage")
    await world.run()
    world.heal()
    world.pass_time(timedelta(days=36))
    await world.use("acme", 5, hours_ago=2)
    report = await world.run()
    assert report.counts["carried"] == len(report.alerts) == 18
    assert [e["value"] for e in world.events()] == [5]
    again = await world.run()
    assert again.counts["planned"] == 0


async def test_a_refusal_for_age_of_what_may_have_arrived_before_is_settled_by_the_sums(world: World) -> None:
    await world.add_customer("acme")
    await world.use("acme", 7, hours_ago=35 * 24 - 10)
    await _doubtful_for(world, timedelta(hours=15), kind="drop_answer", intents=1)
    report = await world.run()
    assert (report.counts["carried"], report.counts["waiting"]) == (0, 1)
    world.pass_time(timedelta(hours=7))
    assert (await world.run()).is_settled
    await assert_equal_sums(world)


# -- what cannot be sent --------------------------------------------------------------------------------------------


async def test_a_refused_value_holds_up_nobody_and_is_said_again_only_when_asked_or_changed(
    three_customers: World,
) -> None:
    world = three_customers
    await world.use("brook", 10**16, hours_ago=4)
    report = await world.run()
    assert (report.counts["rejected"], report.counts["delivered"]) == (1, 18)
    assert "digits" in report.alerts[0]
    again = await world.run()
    assert (again.counts["planned"], again.is_settled) == (0, False)
    assert "--retry-rejected" in again.alerts[0]
    assert (await world.run(retry_rejected=True)).counts["rejected"] == 1
    await world.use("brook", 9 - 10**16, hours_ago=4)
    await world.run()
    await assert_equal_sums(world)


async def test_a_customer_deleted_at_stripe_is_put_aside_and_the_others_go_on(three_customers: World) -> None:
    world = three_customers
    await world.run()
    (gone,) = [c["id"] for c in world.state()["customers"] if c["metadata"]["inferlog_customer_id"] == "brook"]
    world.call_stripe("DELETE", f"/v1/customers/{gone}")
    for customer in ("acme", "brook", "cedar"):
        await world.use(customer, 1, hours_ago=2)
    await world.run()
    world.pass_time(timedelta(hours=2))
    report = await world.run()
    assert any("brook" in alert and "quarantine" in alert for alert in report.alerts)
    assert {d.key.customer_id for d in report.differences} == {"brook"}
    for customer in ("acme", "brook", "cedar"):
        await world.use(customer, 1, hours_ago=3)
    assert (await world.run()).counts["delivered"] == 2
    assert {c.customer_id for c in await world.differing()} == {"brook"}


async def test_a_customer_that_stripe_refuses_at_once_is_put_aside_at_once(three_customers: World) -> None:
    world = three_customers

    class KnowsNoBrook(RandomIdentifiers):
        async def send(self, event: MeterEvent) -> Any:
            ours = {c["id"]: c["metadata"]["inferlog_customer_id"] for c in world.state()["customers"]}
            if ours[event.stripe_customer_id] == "brook":
                return CustomerGone(reason="no such customer")
            return await self._gateway.send(event)

    report = await world.run(wrap_gateway=KnowsNoBrook)
    assert (report.counts["delivered"], report.counts["rejected"], report.counts["waiting"]) == (12, 0, 0)
    assert any("brook" in alert for alert in report.alerts)


async def test_an_unregistered_customer_is_named_and_the_others_go_on(three_customers: World) -> None:
    world = three_customers
    await world.use("stranger", 5)
    report = await world.run()
    assert report.counts["confirmed"] == 18
    assert "stranger" in report.alerts[0]
    await world.add_customer("stranger")
    await world.run()
    await assert_equal_sums(world)


async def test_a_meter_that_does_not_sum_stops_everything_before_anything_is_sent(three_customers: World) -> None:
    world = three_customers
    form = "event_name=inferlog_test_items&display_name=x&default_aggregation[formula]=sum&event_time_window=hour"
    world.call_stripe("POST", "/v1/billing/meters", form)
    with pytest.raises(StripeUnusable, match="inferlog_test_items"):
        await world.run()
    assert world.events() == []


async def test_a_deactivated_meter_waits_for_a_person_and_loses_nothing(three_customers: World) -> None:
    world = three_customers
    await world.run()
    (meter,) = [m["id"] for m in world.state()["meters"] if m["event_name"] == "inferlog_test_items"]
    world.call_stripe("POST", f"/v1/billing/meters/{meter}/deactivate", "")
    await world.use("acme", 5)
    with pytest.raises(StripeUnusable, match="deactivated"):
        await world.run()
    world.call_stripe("POST", f"/v1/billing/meters/{meter}/reactivate", "")
    assert (await world.run()).is_settled
    await assert_equal_sums(world)


# -- proof ----------------------------------------------------------------------------------------------------------


async def test_nothing_is_confirmed_before_stripe_counts_it(three_customers: World) -> None:
    world = three_customers
    world.control("settings", {"lag_s": 300})
    report = await world.run()
    assert (report.counts["confirmed"], report.counts["unconfirmed"]) == (0, 18)
    world.pass_time(timedelta(minutes=6))
    assert (await world.run()).counts["confirmed"] == 18


async def test_an_event_that_stripe_accepted_and_never_counted_is_a_difference(three_customers: World) -> None:
    world = three_customers

    class Swallows(RandomIdentifiers):
        async def send(self, event: MeterEvent) -> Any:
            return await self._gateway.send(replace(event, stripe_customer_id="cus_of_nobody"))

    await world.run(wrap_gateway=Swallows)
    world.pass_time(timedelta(hours=2))
    report = await world.run()
    assert not report.is_settled
    assert len(report.differences) == 18


async def test_only_one_sender_per_database_and_the_lock_dies_with_its_connection(world: World) -> None:
    first, second = await connect(world.settings.postgres), await connect(world.settings.postgres)
    try:
        assert await Reports(first).take_sender_lock()
        assert not await Reports(second).take_sender_lock()
        await first.close()
        assert await Reports(second).take_sender_lock()
    finally:
        first.terminate()
        second.terminate()
