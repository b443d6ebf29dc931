"""`inferlog verify` on real topics and tables: an honest log holds, each lie is found, a gap is called a gap."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from infra.actor import Author
from infra.kafka import TopicPartition, open_consumer, open_producer
from schemas.codec import encode
from schemas.keys import worker_group
from schemas.records import BucketCharge, InferenceRequested, Outcome, UsageRecorded
from schemas.topics import DEFAULT_POOL, RESULTS, USAGE, requests_topic
from streams.billing.adjustments import adjust
from streams.billing.intents import HourKey
from streams.log import open_log
from streams.replay.verify import NotCaughtUp, Report, verify, wait_for_ledger
from tests.conditions import eventually
from tests.factories import NOON, finished, requested, usage
from tests.integration.billing_world import count_beyond_the_calendar
from tests.integration.ledger_world import LedgerWorld, Spawn

COUNT = 40


class Log:
    """One installation's three topics."""

    def __init__(self, world: LedgerWorld) -> None:
        self.world = world
        ns = world.settings.kafka.namespace
        self.requests = requests_topic().in_namespace(ns).name
        self.results = RESULTS.in_namespace(ns).name
        self.usage = USAGE.in_namespace(ns).name

    async def write(self, topic: str, records: Sequence[Any], *, partition: int | None = None) -> None:
        async with open_producer(self.world.settings.kafka) as producer:
            for r in records:
                value = r if isinstance(r, bytes) else encode(r)
                key = b"?" if isinstance(r, bytes) else r.request_id.bytes
                await producer.send(topic, value, key=key, partition=partition, timeout_s=10)

    async def let_go(self, offset: int) -> None:
        """The workers commit this offset of request partition 0."""
        group = worker_group(self.world.settings.kafka.namespace, DEFAULT_POOL)
        async with open_consumer(self.world.settings.kafka, group=group) as consumer:
            place = TopicPartition(self.requests, 0)
            consumer.assign([place])
            await consumer.commit({place: offset})

    async def place(self, record: UsageRecorded) -> tuple[str, int, int]:
        """Topic, partition and offset of a usage record."""
        async with open_log(self.world.settings.kafka) as reader:
            async for entry in reader.read(self.usage, await reader.freeze(self.usage, USAGE.partitions)):
                if entry.value is not None and record.request_id.bytes == entry.key:
                    return entry.topic, entry.partition, entry.offset
        raise LookupError(record.request_id)

    async def verify(self, **options: Any) -> Report:
        return await verify(self.world.settings, **options)


def spaced(count: int, *, every_us: int = 1000, burst: int = 2, since: datetime = NOON) -> list[InferenceRequested]:
    """Requests of one key exactly at its rate."""
    made = []
    for n in range(count):
        at = since + timedelta(microseconds=n * every_us)
        bucket = BucketCharge(bucket="key:k1", interval_us=every_us, burst=burst, cost=1, remaining=0)
        made.append(requested(occurred_at=at, limiter_time=at, limiter_buckets=(bucket,)))
    return made


@pytest.fixture
async def honest(env: dict[str, str], spawn: Spawn) -> tuple[Log, list[InferenceRequested]]:
    """COUNT requests, all but two ended, with repetitions as they come; the ledger has caught up and was stopped."""
    world = LedgerWorld(env, spawn)
    log = Log(world)
    requests = spaced(COUNT)
    results = [finished(r) for r in requests[:-3]]
    results.append(finished(requests[-3], outcome=Outcome.EXPIRED, quantities={}, outputs=()))
    usages = [usage(r) for r in requests[:-3]]
    await log.write(log.requests, requests, partition=0)
    await log.write(log.results, [*results, *results[:5]])
    await log.write(log.usage, [*usages, *usages[:7], b"not a record"])
    worker = world.worker()
    await world.caught_up()
    worker.terminate()
    worker.wait(20)
    return log, requests


def findings(report: Report) -> dict[str, list[str]]:
    return {v.name: [f.what for f in v.findings] for v in report.verdicts if v.findings}


Honest = tuple[Log, list[InferenceRequested]]


async def test_an_honest_log_holds(honest: Honest) -> None:
    log, _ = honest
    report = await log.verify()
    assert report.exit_code == 0, findings(report)
    figures = {v.name: v.figures for v in report.verdicts}
    assert figures["I1"]["requests"] == COUNT - 3
    assert figures["I1"]["duplicates"] == 7
    assert figures["I1"]["undecodable"] == 1
    assert figures["I2"]["least_spare_us"] == 1000
    assert figures["I3"]["succeeded"] == COUNT - 3
    assert (figures["I4"]["accepted"], figures["I4"]["open"], figures["I4"]["expired"]) == (COUNT, 2, 1)
    assert report.undecodable == {log.usage: 1}
    assert (await log.verify(since=NOON + timedelta(hours=1))).exit_code == 0


async def test_a_correction_of_the_bill_leaves_usage_and_its_proof_alone(honest: Honest) -> None:
    log, requests = honest
    key = HourKey(customer_id=requests[0].customer_id, meter="items", hour=NOON)
    async with log.world.tables() as c:
        long_ago = NOON - timedelta(days=1)
        await c.execute("INSERT INTO customers VALUES ($1, 'Acme', 1, 1, NULL, $2)", key.customer_id, long_ago)
        done = await adjust(c, key, -5, by=Author(actor="ada", reason="a test"), now=NOON)
    assert done.billable_units == COUNT - 3 - 5
    report = await log.verify()
    assert report.exit_code == 0, findings(report)
    process = log.world.spawn(["inferlog", "usage", "--json", "--meter", "items"], log.world.env, name="usage")
    assert process.wait(60) == 0
    assert json.loads(process.log.read_text().splitlines()[-1])["totals"] == {"items": COUNT - 3}


async def test_planted_lies_are_each_found(honest: Honest) -> None:
    log, requests = honest
    async with log.world.tables() as c:
        await c.execute("UPDATE usage_hourly SET quantity = quantity + 1 WHERE meter = 'items'")
        await c.execute("DELETE FROM processed_requests WHERE request_id = $1", requests[0].request_id)
        await count_beyond_the_calendar(c)
    late = replace(requests[0], request_id=requested().request_id)  # one admission too many in the same microsecond
    again = replace(requests[0], request_id=requested().request_id)
    unbilled = requested(occurred_at=NOON + timedelta(minutes=5))
    batch = uuid4()
    await log.write(log.requests, [late, again, unbilled], partition=0)
    await log.write(
        log.results, [finished(late, version="cd" * 32, batch_id=batch), finished(unbilled, batch_id=batch)]
    )
    await log.write(log.usage, [usage(late), usage(unbilled, quantities={"items": 2**62})])
    async with log.world.tables() as c:  # as if its sum had not fitted
        place = await log.place(usage(unbilled))
        await c.execute("INSERT INTO dead_letters VALUES ($1, $2, $3, NULL, NULL, 'out of range')", *place)
        await c.execute(
            "INSERT INTO consumer_offsets VALUES ($1, $2, $3, $4) ON CONFLICT (consumer_group, topic, partition) "
            "DO UPDATE SET next_offset = excluded.next_offset",
            *(log.world.group, *place[:2], place[2] + 1),
        )
    await log.let_go(COUNT)
    report = await log.verify()
    assert report.exit_code == 1
    found = findings(report)
    assert set(found["I1"]) == {
        "request on the topic was never billed",
        "ledger and topic differ",
        "set aside and never billed",
        "ledger row of an hour that no calendar has",
    }
    assert found["I2"] == ["bucket over its rate"]
    assert found["I3"] == ["one batch ran several versions", "served by another version"]
    lost, aside = next(v.findings for v in report.verdicts if v.name == "I4")
    assert lost.what == "lost: the workers went past it and left no result"
    assert (aside.what, aside.examples) == ("succeeded, and its usage was set aside", (str(unbilled.request_id),))
    assert set(lost.examples) == {str(r.request_id) for r in requests[-2:]}  # `again` lies past what was let go of


async def test_a_pair_on_its_way_is_waited_for(honest: Honest) -> None:
    log, _ = honest
    r = requested(occurred_at=NOON + timedelta(minutes=5))
    await log.write(log.requests, [r], partition=0)
    await log.write(log.results, [finished(r)])
    arrived = False

    def progress(topic: str, done: int, _total: int) -> None:
        nonlocal arrived
        if topic == log.requests and not arrived:  # the ends of all three topics are frozen by now
            arrived = True
            from tests.conftest import run_apart

            run_apart(log.write(log.usage, [usage(r)]))

    report = await log.verify(progress=progress)
    assert arrived
    assert report.exit_code == 0, findings(report)


async def test_admissions_without_evidence_are_a_gap_and_not_a_proof(honest: Honest) -> None:
    log, _ = honest
    await log.write(log.requests, [requested(limiter_buckets=())], partition=0)
    report = await log.verify()
    assert report.exit_code == 2
    i2 = next(v for v in report.verdicts if v.name == "I2")
    assert i2.holds is None
    assert f"1 of {COUNT + 1} admissions name no limiter bucket" in i2.notes[0]


async def test_a_system_at_work_holds(env: dict[str, str], spawn: Spawn) -> None:
    """Requests, results, usage and commits go on being written while it is judged, in every order that may be."""
    world = LedgerWorld(env, spawn)
    log = Log(world)
    world.worker(settings={"INFERLOG_LEDGER_BATCH": "17"})
    stop = asyncio.Event()

    async def traffic() -> None:
        wave = 0
        while not stop.is_set():
            requests = spaced(10, since=NOON + timedelta(seconds=wave))
            await log.write(log.requests, requests, partition=0)
            results, usages = [finished(r) for r in requests], [usage(r) for r in requests]
            halves = [log.write(log.results, results), log.write(log.usage, usages)]
            for half in halves[:: 1 if wave % 2 else -1]:
                await half
            wave += 1
            await log.let_go(10 * wave)

    working = asyncio.create_task(traffic())
    accepted = []
    try:
        for n in range(3):
            await eventually(world.positions, what="some usage is counted")
            if n == 2:
                await wait_for_ledger(world.settings, timeout_s=60)
            report = await log.verify()
            assert report.exit_code == 0, findings(report)
            accepted.append(report.verdicts[3].figures["accepted"])
        assert not working.done()
    finally:
        stop.set()
        await working
    assert accepted == sorted(set(accepted))


async def test_a_trimmed_topic_is_a_gap_and_not_a_proof(honest: Honest) -> None:
    log, _ = honest
    await trim(log, log.results)
    report = await log.verify()
    assert report.exit_code == 2
    i4 = next(v for v in report.verdicts if v.name == "I4")
    assert i4.holds is None
    assert "--since" in i4.notes[0]


async def trim(log: Log, topic: str) -> None:
    """Remove the first record of each partition that has one, as retention would."""
    from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

    async with open_consumer(log.world.settings.kafka, group=None) as consumer:
        places = [TopicPartition(topic, p) for p in range(8)]
        ends = await consumer.end_offsets(places)
    admin = AIOKafkaAdminClient(bootstrap_servers=log.world.settings.kafka.bootstrap)
    await admin.start()
    try:
        await admin.delete_records({p: RecordsToDelete(before_offset=1) for p, end in ends.items() if end > 0})
    finally:
        await admin.close()


async def test_waiting_for_a_ledger_that_does_not_run_ends_with_how_far_it_is(
    env: dict[str, str], spawn: Spawn
) -> None:
    world = LedgerWorld(env, spawn)
    await world.produce([usage()], partition=4)
    with pytest.raises(NotCaughtUp, match="partition 4 at 0 of 1"):
        await wait_for_ledger(world.settings, timeout_s=0.5)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"INFERLOG_KAFKA_BOOTSTRAP": "127.0.0.1:1"}, "127.0.0.1:1"),
        ({"INFERLOG_POSTGRES_DSN": "postgresql://x:y@127.0.0.1:1/x"}, "Postgres does not answer"),
        ({"INFERLOG_NAMESPACE": "nowhere"}, "inferlog provision"),
    ],
)
async def test_a_server_that_is_away_is_no_verdict(
    env: dict[str, str], spawn: Spawn, wrong: dict[str, str], reason: str
) -> None:
    process = spawn(["inferlog", "verify", "--json"], {**env, **wrong}, name="verify")
    assert process.wait(60) == 2
    assert reason in process.log.read_text()


async def test_the_command_prints_figures_and_its_exit_status_says_the_outcome(honest: Honest) -> None:
    log, _ = honest
    world = log.world
    process = world.spawn(["inferlog", "verify", "--wait", "--json"], world.env, name="verify")
    assert process.wait(60) == 0
    said = json.loads(process.log.read_text().splitlines()[-1])
    assert said["holds"] is True
    assert said["proofs"]["I4"]["figures"]["accepted"] == COUNT
    async with world.tables() as c:
        await c.execute("DELETE FROM usage_hourly")
    process = world.spawn(["inferlog", "verify"], world.env, name="verify")
    assert process.wait(60) == 1
    text = process.log.read_text()
    assert "I1  Each request is billed once: VIOLATED" in text
    assert "A promise is VIOLATED." in text


async def test_usage_shows_the_ledger_and_how_complete_it_is(honest: Honest) -> None:
    log, _ = honest
    world = log.world
    await world.produce([usage()], partition=0)  # nobody counts it: the ledger is stopped
    process = world.spawn(["inferlog", "usage", "--json", "--meter", "items"], world.env, name="usage")
    assert process.wait(60) == 0
    said = json.loads(process.log.read_text().splitlines()[-1])
    assert said["totals"] == {"items": COUNT - 3}
    assert said["waiting_records"] == 1
    process = world.spawn(["inferlog", "usage", "--interval", "day"], world.env, name="usage")
    assert process.wait(60) == 0
    text = process.log.read_text()
    assert "1 usage records are waiting to be counted" in text
    assert "2026-03-01 " in text
    assert "complete up to" in text
