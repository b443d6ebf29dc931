"""The relay beside what others do to topics, outbox and keys: nothing is lost, told twice or told wrongly."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiokafka import AIOKafkaProducer

from infra.kafka import open_producer
from infra.outbox import add_facts
from schemas.codec import encode
from schemas.headers import EVENT_ID
from schemas.topics import PRICES, ROUTES
from streams.outbox.standing import RETRY_S, Standing
from tests.conditions import eventually
from tests.fakes import Clock
from tests.integration.relay_world import STAMP, RelayWorld, frozen, price, route
from tests.processes import Process

# Writes a fact and stops itself before the COMMIT; told to go on, it tries to commit.
FREEZES_BEFORE_COMMIT = """
import asyncio, os, signal
from tests.integration.relay_world import RelayWorld, STAMP, price
from infra.outbox import add_facts
from infra.postgres import is_outage
from schemas.topics import PRICES
async def main():
    async with RelayWorld(dict(os.environ), None).tables() as c:
        transaction = c.transaction()
        await transaction.start()
        await add_facts(c, PRICES, [("k", price("frozen"))], stamp=STAMP)
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            await transaction.commit()
        except Exception as error:
            print("refused", is_outage(error), repr(error), flush=True)
asyncio.run(main())
"""


@pytest.fixture
def world(env: dict[str, str], spawn: Callable[..., Process]) -> RelayWorld:
    return RelayWorld(env, spawn)


@asynccontextmanager
async def open_transaction(world: RelayWorld) -> AsyncIterator[AIOKafkaProducer]:
    """A stranger's transaction with a record on the topic of prices."""
    stranger = AIOKafkaProducer(
        bootstrap_servers=world.settings.kafka.bootstrap,
        transactional_id=f"{world.settings.kafka.namespace}-stranger",
        transaction_timeout_ms=60_000,
    )
    await stranger.start()
    try:
        await stranger.begin_transaction()
        topic = PRICES.in_namespace(world.settings.kafka.namespace).name
        await stranger.send_and_wait(topic, b"no record", partition=0)
        yield stranger
    finally:
        await stranger.stop()


async def test_a_relay_killed_behind_the_open_transaction_of_another_writer(
    world: RelayWorld, caplog: pytest.LogCaptureFixture
) -> None:
    await world.told()
    facts, later, free = [price("a"), price("b")], price("later"), route("m")
    first = world.variant("freezes_before_removing")
    await eventually(lambda: "the relay publishes the outbox" in first.log.read_text(), what="an active relay")
    async with open_transaction(world) as stranger:
        await world.write(facts)
        await frozen(first)
        first.kill()
        await world.write([later])
        await world.write([free], topic=ROUTES)
        async with world.relaying() as relay:
            await eventually(lambda: world.published(ROUTES), what="facts for other topics, which go on")
            assert list(relay.standing.figures()["blocked"]) == [PRICES.name]
            assert "a transaction of another writer is open there since offset 0" in caplog.text
            async with world.tables() as c:
                assert await c.fetchval("SELECT count(*) FROM outbox") == 3
            await stranger.abort_transaction()
            await world.emptied()
            await eventually(lambda: relay.standing.figures()["blocked"] == {})
    assert await world.published() == [*(f.event_id for f in facts), later.event_id]


async def test_a_forged_id_removes_no_waiting_fact(world: RelayWorld) -> None:
    await world.told()
    waiting, mine, other = route("m"), price("a"), price("b")
    await world.write([waiting], topic=ROUTES)
    await world.write([mine, other])
    name = PRICES.in_namespace(world.settings.kafka.namespace).name
    async with open_producer(world.settings.kafka) as stranger:
        for fact, key, value in ((waiting, b"k", encode(waiting)), (mine, b"k", b"!"), (other, b"x", encode(other))):
            headers = [(EVENT_ID, str(fact.event_id).encode())]
            await stranger.send(name, value, key=key, partition=0, headers=headers, timeout_s=30)
    world.relay()
    await world.emptied()
    assert await world.published(ROUTES) == [waiting.event_id]
    assert (await world.published())[-2:] == [mine.event_id, other.event_id]


async def test_a_writer_frozen_before_its_commit_stops_the_others_for_seconds(
    world: RelayWorld, spawn: Callable[..., Process]
) -> None:
    writer = spawn([sys.executable, "-c", FREEZES_BEFORE_COMMIT], world.env, name="writer")
    await frozen(writer)
    fact = price("b")
    async with world.tables() as c, c.transaction():
        # What the ledger gives a statement is enough.
        await asyncio.wait_for(add_facts(c, PRICES, [("k", fact)], stamp=STAMP), 10)
    os.kill(writer.pid, signal.SIGCONT)
    assert writer.wait(20) == 0, writer.tail()
    assert "refused True" in writer.log.read_text()
    async with world.tables() as c:
        assert [r["event_id"] for r in await c.fetch("SELECT event_id FROM outbox")] == [fact.event_id]


async def test_a_block_ends_with_its_last_fact(world: RelayWorld) -> None:
    clock = Clock()
    await world.told()
    huge = route("m", reason="x" * 9_000_000)
    await world.write([huge], topic=ROUTES)
    async with world.relaying(Standing(clock=clock)) as relay:
        await eventually(lambda: relay.standing.figures()["blocked"], what="a blocked topic")
        async with world.tables() as c:
            await c.execute("DELETE FROM outbox WHERE event_id = $1", huge.event_id)
        clock.now_s += RETRY_S
        await eventually(lambda: relay.standing.figures()["blocked"] == {}, what="no blocked topic")
