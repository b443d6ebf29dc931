"""The relay on servers that go away and come back while changes are made: everything arrives, once and in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from infra.local.stack import Stack
from schemas.topics import PRICES, ROUTES
from streams.outbox.relay import Relay
from tests.conditions import eventually
from tests.integration.relay_world import RelayWorld, price
from tests.processes import Process


@pytest.fixture
def world(env: dict[str, str], spawn: Callable[..., Process]) -> RelayWorld:
    return RelayWorld(env, spawn)


async def test_servers_that_go_away_under_the_writers(
    world: RelayWorld, stack: Stack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streams.outbox.relay.PUBLISH_S", 2.0)
    caplog.set_level(logging.INFO, "streams")
    await world.told()
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")  # noqa: T201
    async with world.relaying() as relay:
        await world.write([price("first")])
        await world.emptied()
        for part in ("kafka", "postgres"):
            writing = asyncio.create_task(world.write_many(150, writers=4, seed=seed))
            if part == "postgres":
                await writing
            await asyncio.to_thread(stack.stop_part, part, kill=part == "kafka")
            try:
                await writing
                if part == "kafka":
                    await world.write([price("waits")])
                await eventually(lambda: relay.standing.state == "away", timeout_s=60)
            finally:
                await asyncio.to_thread(stack.start_part, part)
            await eventually(lambda: relay.standing.state == "active", timeout_s=60)
        written = await world.write_many(20, writers=2, seed=seed + 1)
        await world.emptied()
        for topic in (PRICES, ROUTES):
            found = [i for i in await world.published(topic) if i in set(written[topic.name])]
            assert found == written[topic.name], f"{topic.name}, seed {seed}"
            assert len(set(await world.published(topic))) == len(await world.published(topic))
    said = [r.getMessage().partition(":")[0] for r in caplog.records if r.name == "streams.outbox.standing"]
    assert said == [
        "the relay publishes the outbox",
        *["the outbox is held", "the relay publishes the outbox again"] * 2,
    ]


async def test_a_relay_ends_at_once_while_the_broker_does_not_answer(
    world: RelayWorld, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.told()
    begun = asyncio.Event()
    send = AIOKafkaProducer.send

    async def signalling(self: AIOKafkaProducer, *args: Any, **options: Any) -> Any:
        future = await send(self, *args, **options)
        begun.set()
        return future

    monkeypatch.setattr(AIOKafkaProducer, "send", signalling)
    facts = [price("a"), price("b")]
    task = asyncio.create_task(Relay(world.settings.kafka, world.settings.postgres).run())
    await eventually(world.active_session)
    await world.write([facts[0]])
    await world.emptied()
    begun.clear()
    await asyncio.to_thread(stack.pause_part, "kafka")
    try:
        await world.write([facts[1]])
        await begun.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        assert task.done()
        left = [t for t in asyncio.all_tasks() if "aiokafka" in repr(t.get_coro())]
        await eventually(lambda: all(t.done() for t in left), timeout_s=10, what=f"no task is left of {left}")
    finally:
        await asyncio.to_thread(stack.resume_part, "kafka")
    async with world.relaying():
        await world.emptied()
    assert await world.published() == [f.event_id for f in facts]
