"""What Stripe is told is usage plus corrections; usage itself stays what was counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path

import pytest

from infra.actor import Author
from infra.postgres import connect
from streams.billing.adjustments import Adjusted, AdjustmentRefused, adjust
from streams.billing.intents import HourKey
from tests.integration.billing_world import World, count_beyond_the_calendar, open_world
from tests.processes import Process

BY = Author(actor="ada", reason="a test")


@pytest.fixture
async def world(env: dict[str, str], spawn: Callable[..., Process], tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(env, spawn, tmp_path) as made:
        await made.add_customer("acme")
        await made.use("acme", 50)
        yield made


async def correct(
    world: World, units: int, *, hours_ago: int = 2, meter: str = "items", carried: bool = False
) -> Adjusted:
    connection = await connect(world.settings.postgres)
    try:
        key = HourKey(customer_id="acme", meter=meter, hour=world.hour(hours_ago))
        return await adjust(connection, key, units, by=BY, now=world.now, carried=carried)
    finally:
        await connection.close()


async def test_a_correction_reaches_stripe_as_a_delta_and_leaves_usage_alone(world: World) -> None:
    await world.run()
    assert (await correct(world, -20)).billable_units == 30
    assert [(d.our_units, d.stripe_units) for c in await world.differing() for d in c.differing] == [(30, 50)]
    report = await world.run()
    assert (report.is_settled, report.counts["confirmed"]) == (True, 1)
    assert await world.states() == [("confirmed", 1, 50), ("confirmed", 2, -20)]
    assert world.at_stripe() == {("acme", "items"): 30}
    assert await world.ledger() == {("acme", "items"): 50}
    assert await world.differing() == []

    await correct(world, 5)
    await world.use("acme", 7)
    await world.run()
    assert world.at_stripe() == {("acme", "items"): 42}
    await correct(world, -42)
    await world.run()
    assert world.at_stripe() == {("acme", "items"): 0}
    assert (await world.run()).counts["planned"] == 0
    assert await world.differing() == []


async def test_an_hour_and_a_meter_that_only_a_correction_knows_are_reported(world: World) -> None:
    await correct(world, 6, hours_ago=5)
    await correct(world, 9, meter="tokens")
    assert (await world.run()).counts["confirmed"] == 3
    assert world.at_stripe() == {("acme", "items"): 56, ("acme", "tokens"): 9}
    assert await world.differing() == []


async def test_a_correction_of_an_open_hour_waits_for_its_seal(world: World) -> None:
    await world.run()
    await correct(world, 4, hours_ago=0)
    report = await world.run()
    assert (report.counts["planned"], report.open_sums) == (0, 1)
    world.pass_time(timedelta(minutes=71))
    assert (await world.run()).counts["confirmed"] == 1
    assert world.at_stripe() == {("acme", "items"): 54}


async def test_a_correction_of_an_hour_too_old_for_stripe_is_carried(world: World) -> None:
    with pytest.raises(AdjustmentRefused, match="--carried says that you do that"):
        await correct(world, 3, hours_ago=36 * 24)
    done = await correct(world, 3, hours_ago=36 * 24, carried=True)
    assert done.is_carried
    assert not (await correct(world, 1)).is_carried
    report = await world.run()
    assert (report.counts["carried"], report.counts["confirmed"]) == (1, 1)
    assert any("3 items of customer acme" in alert and "invoice item" in alert for alert in report.alerts)
    assert ("carried", 1, 3) in await world.states()
    assert (await world.run()).counts["carried"] == 0
    assert await world.differing() == [], "Stripe lacks nothing but what it takes no event for"


async def test_an_hour_that_was_carried_and_is_at_stripe_too_differs(world: World) -> None:
    """Its units are billed twice."""
    world.pass_time(-timedelta(days=36))
    await world.use("acme", 3)
    world.pass_time(timedelta(days=36))
    await world.run()
    assert ("carried", 1, 3) in await world.states()
    assert await world.differing() == []
    world.pass_time(-timedelta(days=36))
    await world.post_foreign_event("acme", 3, at=world.hour(2))
    world.pass_time(timedelta(days=36))
    assert [(d.our_units, d.stripe_units, d.carried_units) for c in await world.differing() for d in c.differing] == [
        (3, 3, 3)
    ]


async def test_an_hour_that_no_calendar_has_is_named_and_keeps_no_other_from_its_bill(world: World) -> None:
    connection = await connect(world.settings.postgres)
    try:
        await count_beyond_the_calendar(connection)
    finally:
        await connection.close()
    report = await world.run()
    assert report.counts["confirmed"] == 1
    assert world.at_stripe() == {("acme", "items"): 50}
    hours = ("-infinity", "2000-01-01 00:00:00+00 BC", "20000-01-01 00:00:00+00", "infinity")
    beginnings = [f"7 items of customer acme are in hour '{hour}', which no calendar has" for hour in hours]
    assert [sentence[: len(b)] for sentence, b in zip(report.alerts, beginnings, strict=True)] == beginnings
    assert not report.is_settled
    found = await world.compared()
    assert (found.outside, found.open_sums, await world.differing()) == (report.alerts, 0, [])
