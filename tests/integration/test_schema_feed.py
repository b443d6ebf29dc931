"""Records of a release that does not exist yet, read by today's processes as they are: they learn its schemas from the
log. Where the mechanism is taken out, the same records are dead letters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from infra.kafka import open_consumer, open_producer
from infra.redis import open_redis
from infra.settings import KafkaSettings, operator_settings
from schemas import codec
from schemas.codec import encode
from schemas.facts import SchemaPublished
from schemas.keys import RedisKeys, worker_group
from schemas.records import InferenceFinished, InferenceRequested, Outcome, UsageRecorded
from schemas.topics import RESULTS, SCHEMAS, USAGE, requests_topic
from streams.log import open_log
from tests.factories import finished, usage
from tests.integration.api_desk import DIGITS, Caller, calling, customer, echo, register, start_gateway
from tests.integration.ledger_world import LedgerWorld, Spawn, health, usages
from tests.integration.worker_desk import (
    admitted,
    constant_bundle,
    open_desk,
    start_worker,
    store_bundle,
)
from tests.newer_writer import NewerWriter

USAGE_WRITER = NewerWriter(usage(), schema_id=4711)
REQUEST_WRITER = NewerWriter(admitted("ab" * 32), schema_id=4712)
RESULT_WRITER = NewerWriter(finished(), schema_id=4713, symbols={"Outcome": "POSTPONED"})
RECORDS = 300
# A process that reads the schemas only when something asks for them, however long it has had.
KNOWS_NOTHING_UNASKED = """
from infra.schema_feed import SchemaFeed
run = SchemaFeed.run
async def when_asked(self):
    await self._wanted.wait()
    await run(self)
SchemaFeed.run = when_asked
"""


async def publish(settings: KafkaSettings, *writers: NewerWriter) -> None:
    """What the newer release's `provision` does before its writers start."""
    topic = SCHEMAS.in_namespace(settings.namespace).name
    async with open_producer(settings) as producer:
        for writer in writers:
            record: SchemaPublished = writer.published
            await producer.send(topic, encode(record), key=str(record.schema_id).encode(), timeout_s=10)


def written(writer: NewerWriter, count: int = RECORDS) -> list[bytes]:
    """Usage of that many requests, as a newer writer records it."""
    return [writer.write(encode(r)) for r in usages(count)]


async def test_a_ledger_counts_what_writers_newer_than_itself_record(
    env: dict[str, str], spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = LedgerWorld(env, spawn)
    ledger = world.worker(settings={"INFERLOG_LEDGER_BATCH": "50"})
    await world.produce(usages(RECORDS))
    await world.caught_up()
    # It has read the schemas there are. Now schema and records come in one go, as at the start of a new writer.
    await publish(world.settings.kafka, USAGE_WRITER)
    await world.produce(written(USAGE_WRITER))
    await world.caught_up()
    assert await world.sums() == {"requests": 2 * RECORDS, "items": 8 * RECORDS}
    assert health(ledger)["dead_letters"] == 0
    assert health(ledger)["schemas"] == {"learnt": 1, "conflicts": 0, "trouble": None}

    # Ids that nobody has published hold nothing up, however many they are.
    nowhere = NewerWriter(usage(), schema_id=9999)
    await world.produce([r for pair in zip(usages(RECORDS), written(nowhere), strict=True) for r in pair])
    await world.caught_up()
    assert await world.sums() == {"requests": 3 * RECORDS, "items": 12 * RECORDS}
    assert await world.value("SELECT count(*) FROM dead_letters") == RECORDS

    # Whoever reads the log afterwards learns the same way; what this process learns is forgotten after the test.
    monkeypatch.setattr(codec._codec, "_by_id", dict(codec._codec._by_id))
    undecodable = 0
    async with open_log(world.settings.kafka) as reader:
        async for record in reader.read(world.topic, await reader.freeze(world.topic, USAGE.partitions)):
            try:
                codec.decode_at(record, UsageRecorded)
            except codec.UnknownSchema:
                undecodable += 1
    assert undecodable == RECORDS


async def test_a_ledger_that_learns_nothing_sets_them_aside(env: dict[str, str], spawn: Spawn) -> None:
    world = LedgerWorld(env, spawn)
    ledger = world.worker("tests.integration.ledger_variants:learns_nothing")
    await publish(world.settings.kafka, USAGE_WRITER)
    await world.produce([*usages(RECORDS), *written(USAGE_WRITER, 10)])
    await world.caught_up()
    assert await world.sums() == {"requests": RECORDS, "items": 4 * RECORDS}
    assert health(ledger)["dead_letters"] == 10


@asynccontextmanager
async def newer_worker(
    env: Mapping[str, str], write: Callable[[InferenceFinished], bytes]
) -> AsyncIterator[dict[UUID, bytes]]:
    """Answers every request with what `write` makes of its result; yields the answers."""
    settings = operator_settings(env)
    keys, answers = RedisKeys(namespace=settings.kafka.namespace), {}

    async def work() -> None:
        group = worker_group(settings.kafka.namespace, "default")
        async with open_consumer(settings.kafka, group=group) as consumer, open_redis(settings.redis) as redis:
            consumer.subscribe([requests_topic().in_namespace(settings.kafka.namespace).name])
            async for record in consumer:
                request = codec.decode(record.value, InferenceRequested)
                answers[request.request_id] = write(echo(request))
                await redis.set(keys.result(request.request_id), answers[request.request_id], ex=60)
                await redis.publish(keys.results_channel(request.reply_to), request.request_id.bytes)

    task = asyncio.ensure_future(work())
    try:
        yield answers
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=10)


async def test_a_gateway_answers_from_results_of_workers_newer_than_itself(env: dict[str, str], spawn: Any) -> None:
    await register(env, "digits", DIGITS)
    acme = customer(env, "Acme")
    gateway = start_gateway(spawn, env)
    settings = operator_settings(env).kafka
    changes: dict[str, Any] = {}

    def write(result: InferenceFinished) -> bytes:
        return RESULT_WRITER.write(encode(result), **changes)

    async with newer_worker(env, write), calling(gateway, acme["key"]) as caller:
        # Nobody has published the schema: an error that says so, long before the deadline, and not a hang.
        unreadable = await caller.infer()
        assert unreadable.status == 500, unreadable.text
        assert "cannot be read" in unreadable.text
        assert unreadable.headers["x-should-retry"] == "false"
        await publish(settings, RESULT_WRITER)
        answered = await caller.infer()
        assert answered.status == 200, answered.text
        await _unknown_outcome_is_told_and_not_repeated(caller, changes)


async def _unknown_outcome_is_told_and_not_repeated(caller: Caller, changes: dict[str, Any]) -> None:
    changes["outcome"] = "POSTPONED"
    unknown = await caller.infer()
    assert unknown.status == 500, unknown.text
    assert "only a newer release knows" in unknown.text
    assert unknown.headers["x-should-retry"] == "false"


async def test_a_worker_serves_newer_gateways_and_lets_results_of_newer_workers_stand(
    env: dict[str, str], spawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This test reads the log itself; what it learns for that is forgotten afterwards.
    monkeypatch.setattr(codec._codec, "_by_id", dict(codec._codec._by_id))
    codec.learn(RESULT_WRITER.published)
    version = store_bundle(env, constant_bundle(tmp_path / "model", 7.0))
    settings = operator_settings(env).kafka
    succeeded, postponed, fresh = admitted(version), admitted(version), admitted(version)
    async with open_desk(env) as desk:
        # A newer worker has recorded two ends, and died before it sent their usage and committed.
        await publish(settings, RESULT_WRITER, REQUEST_WRITER)
        await desk.submit([succeeded, postponed])
        results = RESULTS.in_namespace(settings.namespace).name
        for request, changes in ((succeeded, {}), (postponed, {"outcome": "POSTPONED"})):
            ended = finished(request, quantities={"requests": 1, "items": 1})
            value = RESULT_WRITER.write(encode(ended), **changes)
            await desk.producer.send(results, value, key=request.request_id.bytes, timeout_s=10)
        worker = start_worker(spawn, env, changed=KNOWS_NOTHING_UNASKED)
        await desk.producer.send(
            desk.topic, REQUEST_WRITER.write(encode(fresh)), key=fresh.request_id.bytes, timeout_s=10
        )
        (answer,) = await desk.results_of([fresh])
        assert answer.outcome is Outcome.SUCCEEDED
        await desk.everything_committed(3)
        seen = await desk.read()
        assert not seen.dead_letters
        assert [len(seen.results[r.request_id]) for r in (succeeded, postponed, fresh)] == [1, 1, 1]
        # Whether an end that only a newer release knows is billed, is that release's to say.
        assert [len(seen.usage[r.request_id]) for r in (succeeded, postponed, fresh)] == [1, 0, 1]
        assert worker.returncode is None
