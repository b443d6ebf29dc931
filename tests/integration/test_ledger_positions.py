"""Whatever happens to positions, on the broker, in Postgres or to the topic: no record is read past."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request

import pytest
from aiokafka.admin import RecordsToDelete

from infra.kafka import TopicPartition
from infra.kafka_admin import open_admin
from schemas.topics import USAGE
from tests.conditions import eventually, wait_until
from tests.integration.ledger_world import LedgerWorld, Spawn, health, usages
from tests.processes import Process

REQUESTS = 3200


def assigned(worker: Process) -> list[int]:
    """The partitions that a worker reads, as it says itself, ready or not."""
    try:
        answer = urllib.request.urlopen(f"{worker.url}/readyz", timeout=5)  # type: ignore[attr-defined]
    except urllib.error.HTTPError as refused:
        answer = refused
    with answer:
        partitions: list[int] = json.load(answer)["partitions"]
        return partitions


def ended(log: str) -> str:
    return "\n".join(log.splitlines()[-30:])


async def test_a_ledger_that_ends_by_an_error_with_a_batch_in_hand_loses_nothing(
    either: dict[str, str], spawn: Spawn
) -> None:
    """Never-committed partitions, so that the group has no offset to fall back to, and another ledger beside it."""
    world = LedgerWorld(either, spawn)
    failing = world.worker("tests.integration.ledger_variants:fails")
    beside = world.worker()
    wait_until(lambda: assigned(failing) and assigned(beside), what="partitions for both", timeout_s=60)
    await world.produce(usages(REQUESTS, customers=40))
    assert failing.wait(60) != 0
    assert "an error that nobody foresaw" in failing.log.read_text()
    await world.caught_up()
    assert await world.sums() == {"requests": REQUESTS, "items": 4 * REQUESTS}
    assert health(beside)["dead_letters"] == 0


@pytest.mark.parametrize("first", ["agent", "loop"])
async def test_both_ways_of_reading_share_one_group(env: dict[str, str], spawn: Spawn, first: str) -> None:
    world = LedgerWorld(env, spawn)
    workers = [
        world.worker(settings={"INFERLOG_LEDGER_MODE": mode}) for mode in sorted(("agent", "loop"), key=first.__ne__)
    ]
    wait_until(lambda: all(assigned(w) for w in workers), what="partitions for both", timeout_s=60)
    await world.produce(usages(REQUESTS, customers=40))
    await world.caught_up()
    assert await world.sums() == {"requests": REQUESTS, "items": 4 * REQUESTS}
    assert all(health(w)["records"] for w in workers)


async def test_a_database_that_goes_back_under_a_running_ledger_ends_it(either: dict[str, str], spawn: Spawn) -> None:
    world = LedgerWorld(either, spawn)
    worker = world.worker()
    await world.produce(usages(50))
    await world.caught_up()
    async with world.tables() as c:
        await c.execute("TRUNCATE usage_hourly, processed_requests, consumer_offsets")
    await world.produce(usages(50))
    assert worker.wait(60) != 0
    log = worker.log.read_text()
    assert "past the ledger's next offset" in log, ended(log)
    assert await world.sums() == {}
    refused = world.worker(ready=False)
    assert refused.wait(30) != 0
    assert "INFERLOG_LEDGER_REWIND=1" in refused.log.read_text()
    world.worker(settings={"INFERLOG_LEDGER_REWIND": "1"})
    await world.caught_up()
    assert await world.sums() == {"requests": 100, "items": 400}


async def test_records_that_are_gone_before_they_were_counted_are_named_and_nothing_starts_unless_told(
    either: dict[str, str], spawn: Spawn
) -> None:
    world = LedgerWorld(either, spawn)
    worker = world.worker()
    await world.produce(usages(20), partition=2)
    await world.caught_up()
    await world.acknowledged()
    worker.terminate()
    worker.wait(20)
    await world.produce(usages(20), partition=2)
    async with open_admin(world.settings.kafka) as admin:
        await admin._client.delete_records({TopicPartition(world.topic, 2): RecordsToDelete(before_offset=30)})
    refused = world.worker(ready=False)
    assert refused.wait(30) != 0
    assert "no longer on the topic (partition 2: 20 to 29)" in refused.log.read_text()
    world.worker(settings={"INFERLOG_LEDGER_SKIP_GONE": "1"})
    await world.caught_up()
    assert await world.sums() == {"requests": 30, "items": 120}


async def test_a_topic_that_was_made_anew_is_read_from_its_beginning(either: dict[str, str], spawn: Spawn) -> None:
    world = LedgerWorld(either, spawn)
    worker = world.worker()
    await world.produce(usages(50))
    await world.caught_up()
    worker.terminate()
    worker.wait(20)
    async with open_admin(world.settings.kafka) as admin:
        await admin._client.delete_topics([world.topic])
        await eventually(lambda: gone(admin, world.topic), what="the topic deleted")
        await admin.create_topics([USAGE.in_namespace(world.settings.kafka.namespace)])
    await world.produce(usages(8))
    world.worker()
    await world.caught_up()
    assert await world.sums() == {"requests": 58, "items": 232}


@pytest.mark.parametrize("mode", ["agent", "loop"])
async def test_a_topic_that_was_made_anew_behind_a_frozen_ledgers_back_is_read_from_its_beginning(
    env: dict[str, str], spawn: Spawn, mode: str
) -> None:
    """It goes on by offset in the new topic, past its first records; a new start finds that the topic is another."""
    settings = {"INFERLOG_LEDGER_MODE": mode, "INFERLOG_LEDGER_SESSION_S": "20"}
    world = LedgerWorld(env, spawn)
    worker = world.worker(settings=settings)
    await world.produce(usages(20), partition=2)
    await world.caught_up()
    await world.acknowledged()
    os.kill(worker.pid, signal.SIGSTOP)
    async with open_admin(world.settings.kafka) as admin:
        await admin._client.delete_topics([world.topic])
        await eventually(lambda: gone(admin, world.topic), what="the topic deleted")
        await admin.create_topics([USAGE.in_namespace(world.settings.kafka.namespace)])
    await world.produce(usages(100), partition=2)
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.wait(60) != 0
    assert "was deleted and made anew" in worker.log.read_text()
    world.worker(settings=settings)

    async def counted() -> bool:
        return await world.sums() == {"requests": 120, "items": 480}

    await eventually(counted, what="all of both topics", timeout_s=60)


async def gone(admin: object, topic: str) -> bool:
    return topic not in await admin._client.list_topics()  # type: ignore[attr-defined]
