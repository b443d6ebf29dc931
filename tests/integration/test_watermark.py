"""What the ledger writes of how complete it is, on the real log: it moves with what was read, and with nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

from aiokafka import AIOKafkaProducer

from infra.kafka import TopicPartition, open_consumer, open_producer
from schemas.codec import encode
from schemas.keys import worker_group
from schemas.topics import requests_topic
from streams.usage.progress import ADMISSION, LONGEST_LIFE
from streams.usage.watermark import Look, Watermark
from tests.conditions import eventually
from tests.factories import requested, usage
from tests.integration.ledger_world import LedgerWorld, usages

NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
EVERY = set(range(8))


class Clock:
    """A clock that is set by hand."""

    now = NOON

    def __call__(self) -> datetime:
        return self.now


@asynccontextmanager
async def looking(world: LedgerWorld, clock: Clock, assigned: set[int] = EVERY) -> AsyncIterator[Look]:
    settings = world.settings
    async with Watermark(settings.kafka, settings.postgres, assigned=lambda: assigned, now=clock).open() as look:
        yield look


async def marks(world: LedgerWorld) -> dict[int, datetime | None]:
    async with world.tables() as c:
        rows = await c.fetch("SELECT partition, complete_until FROM usage_watermarks ORDER BY partition")
    return {r["partition"]: r["complete_until"] for r in rows}


async def count(world: LedgerWorld, partition: int, next_offset: int) -> None:
    """As the ledger moves its position."""
    async with world.tables() as c:
        await c.execute(
            "INSERT INTO consumer_offsets VALUES ($1, $2, $3, $4) ON CONFLICT (consumer_group, topic, partition) "
            "DO UPDATE SET next_offset = excluded.next_offset",
            world.group, world.topic, partition, next_offset,
        )  # fmt: skip


async def work_off(world: LedgerWorld, place: TopicPartition, next_offset: int) -> None:
    """As the workers of the default pool commit."""
    group = worker_group(world.settings.kafka.namespace, "default")
    async with open_consumer(world.settings.kafka, group=group) as consumer:
        consumer.assign([place])
        await consumer.commit({place: next_offset})


async def test_it_passes_a_moment_once_requests_are_worked_off_and_their_usage_is_counted(env: Any, spawn: Any) -> None:
    world, clock = LedgerWorld(env, spawn), Clock()
    place = TopicPartition(requests_topic().in_namespace(world.settings.kafka.namespace).name, 2)
    async with looking(world, clock) as look, open_producer(world.settings.kafka) as producer:
        await look.once()
        assert await marks(world) == dict.fromkeys(range(8), NOON - ADMISSION)  # nothing was ever asked for

        # 1. A request is on the log and no worker has committed it: its usage may still come, to any partition.
        future = await producer.enqueue(place.topic, encode(requested()), partition=place.partition, timeout_s=30)
        await producer.acknowledged([future], timeout_s=30)
        clock.now = asked = NOON + timedelta(seconds=60)
        await look.once()
        assert await marks(world) == dict.fromkeys(range(8), NOON - ADMISSION)

        # 2. It is committed, so its usage is on the log; one partition is not counted up to there.
        await world.produce([usage()], partition=5)
        await work_off(world, place, 1)
        clock.now += timedelta(seconds=2)
        await look.once()
        behind = {5: NOON - ADMISSION}
        assert await marks(world) == {**dict.fromkeys(range(8), clock.now - ADMISSION), **behind}
        assert clock.now > asked

        # 3. What was counted is counted: the partition is complete as of the moment it was looked at.
        seen = clock.now
        await world.produce([usage()], partition=5)
        await count(world, 5, 1)
        clock.now += timedelta(seconds=2)
        await look.once()
        assert (await marks(world))[5] == seen - ADMISSION

        # 4. No worker ever commits again: requests end by their deadlines at the latest.
        future = await producer.enqueue(place.topic, encode(requested()), partition=place.partition, timeout_s=30)
        await producer.acknowledged([future], timeout_s=30)
        await count(world, 5, 2)
        clock.now += 3 * LONGEST_LIFE
        await look.once()
        assert await marks(world) == dict.fromkeys(range(8), clock.now - LONGEST_LIFE - ADMISSION)

        # 5. A restored database, or a clock that was put back, takes nothing back.
        last = await marks(world)
        await count(world, 5, 1)
        clock.now = NOON
        await look.once()
        assert await marks(world) == last
    async with looking(world, clock) as another:  # nor does a ledger that begins with such a clock
        await another.once()
    assert await marks(world) == last


async def test_each_ledger_writes_of_its_own_partitions_and_marks_of_transactions_hold_nothing_up(
    env: Any, spawn: Any
) -> None:
    world, clock = LedgerWorld(env, spawn), Clock()
    producer = AIOKafkaProducer(bootstrap_servers=world.settings.kafka.bootstrap, transactional_id=f"{world.group}-x")
    await producer.start()
    try:
        async with looking(world, clock, {1, 3}) as look:
            await look.once()
            assert await marks(world) == {1: NOON - ADMISSION, 3: NOON - ADMISSION}
            # A stranger's open transaction hides what comes after it.
            await producer.begin_transaction()
            await producer.send_and_wait(world.topic, b"never", partition=3)
            await world.produce([usage()], partition=3)
            for _ in range(3):
                clock.now += timedelta(seconds=2)
                await look.once()
            assert await marks(world) == {1: clock.now - ADMISSION, 3: NOON - ADMISSION}
            await producer.abort_transaction()
            # The ledger has read what can be read; behind it lies the mark of the end alone.
            await count(world, 3, 2)
            for _ in range(3):
                clock.now += timedelta(seconds=2)
                await look.once()
            assert await marks(world) == dict.fromkeys((1, 3), clock.now - ADMISSION)
            # Another log under the name, shorter than what was counted, says nothing of it.
            await count(world, 1, 1000)
            for _ in range(2):
                clock.now += timedelta(seconds=2)
                await look.once()
            before = await marks(world)
            clock.now += timedelta(seconds=2)
            await look.once()
            assert (await marks(world))[1] == before[1]
            assert (await marks(world))[3] == clock.now - ADMISSION
    finally:
        await producer.stop()


async def test_a_running_ledger_keeps_it_and_without_one_it_stands_still(env: Any, spawn: Any) -> None:
    world = LedgerWorld(env, spawn)
    ledger = world.worker()
    await world.produce(usages(40))
    begun = datetime.now(timezone.utc)

    async def passed() -> bool:
        found = await marks(world)
        return len(found) == 8 and all(at is not None and at > begun - ADMISSION for at in found.values())

    await eventually(passed, what="every partition complete up to the start of this test")
    assert await world.sums() == {"requests": 40, "items": 160}
    ledger.end()
    last = await marks(world)
    await world.produce([usage()], partition=0)
    assert await marks(world) == last
