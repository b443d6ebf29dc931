"""Topics that are deleted and made anew under the relay: what waits is on the new one once, what was told is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from schemas.topics import PRICES
from streams.outbox.relay import Relay
from tests.conditions import eventually
from tests.integration.relay_world import RelayWorld, price
from tests.integration.test_relay_strangers import open_transaction
from tests.processes import Process


@pytest.fixture
def world(env: dict[str, str], spawn: Callable[..., Process]) -> RelayWorld:
    return RelayWorld(env, spawn)


@asynccontextmanager
async def no_removal(world: RelayWorld, relay: Relay) -> AsyncIterator[None]:
    """Until the end of the block what a relay has published is not removed, as if it had died before; then it has."""
    async with world.tables() as c:
        await c.execute(
            "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not now'; END $$;"
            "CREATE TRIGGER refuse BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
        yield
        await eventually(lambda: relay.standing.state == "away", what="a failed removal")
        await c.execute("DROP TRIGGER refuse ON outbox")


async def test_a_topic_made_anew_under_a_live_relay_that_then_fails_has_what_waits_once(
    world: RelayWorld, caplog: pytest.LogCaptureFixture
) -> None:
    await world.told()
    earlier, waiting, later = [[price(str(n)) for n in range(count)] for count in (5, 12, 3)]
    async with world.relaying() as relay:
        await world.write(earlier)
        await world.emptied()
        assert await world.noted() == len(earlier)
        await world.remake(PRICES)
        async with no_removal(world, relay):
            await world.write(waiting)
        await world.emptied()
        assert await world.published() == [f.event_id for f in waiting]
        assert "the topic inference.prices.v1 is another one than before" in caplog.text
        caplog.clear()
        # The position is now of the new topic, and is used.
        async with no_removal(world, relay):
            await world.write(later)
        await world.emptied()
    assert await world.published() == [f.event_id for f in (*waiting, *later)]
    assert "another one than before" not in caplog.text


async def test_a_topic_made_anew_while_it_is_held_is_held_no_longer(world: RelayWorld) -> None:
    await world.told()
    fact = price("a")
    await world.write([fact])
    async with open_transaction(world) as stranger, world.relaying() as relay:
        await eventually(lambda: list(relay.standing.figures()["blocked"]) == [PRICES.name], what="a held topic")
        await world.remake(PRICES)
        await world.emptied()
        assert relay.standing.figures()["blocked"] == {}
        assert await world.published() == [fact.event_id]
        await stranger.stop()
