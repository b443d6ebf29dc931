"""Broken records on both streams, on real servers: each becomes a letter with its evidence, and the stream goes on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from infra.postgres import Connection
from infra.settings import KafkaSettings
from schemas.codec import decode_at, encode
from schemas.evidence import KEY_MAX_BYTES, VALUE_MAX_BYTES
from schemas.facts import Record
from schemas.ids import dead_letter_id
from schemas.records import DeadLetter
from schemas.topics import DEAD_LETTERS, USAGE, Topic, requests_topic
from streams.log import open_log
from streams.replay.verify import verify
from tests.conditions import eventually
from tests.factories import finished, usage
from tests.integration.ledger_world import LedgerWorld, health
from tests.integration.worker_desk import admitted, constant_bundle, open_desk, start_worker, store_bundle, value_of
from tests.processes import Process, free_port

Spawn = Callable[..., Process]

PARTITION = 3
HUGE_BYTES = 20_000_000
KEY = b"k"
GOOD = "good"


def log_of(first: Record, second: Record) -> list[tuple[str, bytes | None, bytes | None]]:
    """What is wrong, key and value of each record, in order: good ones first and last, everything else between."""
    framed = encode(first)
    return [
        (GOOD, KEY, framed),
        ("another framing", KEY, b'{"json": true}'),
        ("an unknown schema", KEY, b"\x00\x00\x00\x27\x0f" + framed[5:]),
        ("bytes after the body", KEY, framed + b"!!"),
        ("a broken body", None, framed[:-3]),
        ("20 MB after the body", KEY, framed + bytes(HUGE_BYTES - len(framed))),
        ("no value", KEY, None),
        ("an empty value", b"", b""),
        ("another record", KEY, encode(finished())),
        ("a large key", b"k" * (KEY_MAX_BYTES + 1), b"x" * VALUE_MAX_BYTES),
        (GOOD, KEY, encode(second)),
    ]


async def put(kafka: KafkaSettings, topic: Topic, log: list[tuple[str, bytes | None, bytes | None]]) -> str:
    """Put these on a partition of the topic, after raising its limit as an operator may; returns the topic's name."""
    name = topic.in_namespace(kafka.namespace).name
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        configs = {**topic.config(), "max.message.bytes": str(2 * HUGE_BYTES)}
        (answer,) = await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, name, configs)])
        assert [code for code, *_ in answer.resources] == [0]
    finally:
        await admin.close()
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, max_request_size=2 * HUGE_BYTES)
    await producer.start()
    try:
        for offset, (_, key, value) in enumerate(log):
            at = await producer.send_and_wait(name, value, key=key, partition=PARTITION)
            assert at.offset == offset
    finally:
        await producer.stop()
    return name


def check_evidence(letters: list[DeadLetter], topic: str, log: list[tuple[str, bytes | None, bytes | None]]) -> None:
    """There is one letter for each bad record, in this order, and it says what the record was."""
    bad = [(offset, *record) for offset, record in enumerate(log) if record[0] != GOOD]
    assert [x.offset for x in letters] == [offset for offset, *_ in bad]
    for letter, (offset, what, key, value) in zip(letters, bad, strict=True):
        assert (letter.topic, letter.partition) == (topic, PARTITION), what
        assert letter.event_id == dead_letter_id(topic, PARTITION, offset), what
        assert letter.value_size_bytes == (None if value is None else len(value)), what
        if value is not None and len(value) > VALUE_MAX_BYTES:
            assert (letter.value, letter.value_sha256) == (None, hashlib.sha256(value).hexdigest()), what
        else:
            assert (letter.value, letter.value_sha256) == (value, None), what
        if key is not None and len(key) > KEY_MAX_BYTES:
            assert letter.key is None, what
            assert hashlib.sha256(key).hexdigest() in letter.reason
        else:
            assert letter.key == key, what
        assert letter.reason, what


async def kept(c: Connection) -> list[DeadLetter]:
    """The table's rows."""
    rows = await c.fetch('SELECT * FROM dead_letters ORDER BY topic, partition, "offset"')
    return [
        DeadLetter(
            event_id=dead_letter_id(r["topic"], r["partition"], r["offset"]),
            occurred_at=r["seen_at"],
            attempts=1,
            **{n: r[n] for n in r.keys() if n not in ("seen_at", "kind", "state")},  # noqa: SIM118 (a row is no dict)
        )
        for r in rows
    ]


async def told(kafka: KafkaSettings) -> list[DeadLetter]:
    """The dead-letter topic, in order."""
    topic = DEAD_LETTERS.in_namespace(kafka.namespace).name
    async with open_log(kafka) as reader:
        spans = await reader.freeze(topic, DEAD_LETTERS.partitions)
        return [decode_at(entry, DeadLetter) async for entry in reader.read(topic, spans)]


async def test_on_the_usage_stream_each_is_kept_and_told_once_whenever_the_ledger_dies(
    env: dict[str, str], spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streams.replay.verify.SETTLE_S", 0.0)  # results that there are not need not be awaited
    world = LedgerWorld(env, spawn)
    log = log_of(*(usage(quantities={"requests": 1, "items": 4}) for _ in range(2)))
    topic = await put(world.settings.kafka, USAGE, log)

    # Long enough that a batch is closed by its size, and not by a pause between two fetches.
    small = {"INFERLOG_LEDGER_BATCH": "4", "INFERLOG_LEDGER_WAIT_S": "3"}
    async with world.blocked_batch():
        killed = world.worker(settings=small)
        await world.wait_blocked()
        killed.kill()
    async with world.tables() as c:
        assert await kept(c) == [], "dying before COMMIT leaves nothing"
        assert await c.fetchval("SELECT count(*) FROM outbox") == 0

    died = world.worker("tests.integration.ledger_variants:dies_after_commit", settings=small, ready=False)
    assert died.wait(60) != 0
    async with world.tables() as c:
        before = await kept(c)
    assert [x.offset for x in before] == [1, 2, 3]
    assert await world.committed() == {}

    worker = world.worker(settings=small)  # reads everything again
    await world.caught_up()
    await world.acknowledged()
    assert health(worker)["dead_letters"] == len(log) - 2
    async with world.tables() as c:
        letters = await kept(c)
        check_evidence(letters, topic, log)
        assert letters[:3] == before

        async def published() -> bool:
            return await c.fetchval("SELECT count(*) FROM outbox") == 0

        await eventually(published, what="the outbox to be empty")
    assert await told(world.settings.kafka) == letters, "once each, in the order of the log, the same on both sides"
    assert await world.sums() == {"requests": 2, "items": 8}
    assert await world.positions() == {PARTITION: len(log)}

    report = await verify(world.settings)
    assert report.verdicts[0].holds is True, report.verdicts[0]
    assert report.undecodable == {topic: len(log) - 2}


DIES_AFTER_THE_FIRST_LETTER = """
import os
from gpu_worker.dead_letters import DeadLetters
put = DeadLetters.put
async def put_and_die(self, record, reason):
    await put(self, record, reason)
    os._exit(9)
DeadLetters.put = put_and_die
"""


async def test_on_the_request_stream_each_is_told_and_only_a_death_repeats_one(
    env: dict[str, str], spawn: Spawn, tmp_path: Path
) -> None:
    version = store_bundle(env, constant_bundle(tmp_path / "bundle", 1.0))
    good = [admitted(version, within_s=300) for _ in range(2)]
    log = log_of(*good)
    async with open_desk(env) as desk:
        topic = await put(desk.settings, requests_topic(), log)
        command = ["python", "-c", f"{DIES_AFTER_THE_FIRST_LETTER}\nfrom gpu_worker.app import main\nmain()"]
        died = spawn(command, {**env, "INFERLOG_WORKER_PORT": str(free_port())}, name="worker")
        assert died.wait(60) == 9
        told_first = (await desk.read()).dead_letters[0].event_id
        assert await desk.committed() <= 1, "nothing is let go before its letter is acknowledged"

        worker = start_worker(spawn, env)
        assert [value_of(r) for r in await desk.results_of(good)] == [1.0, 1.0]
        await desk.everything_committed(len(log))
        letters = (await desk.read()).dead_letters
        times = Counter(x.event_id for x in letters)
        by_id = {x.event_id: x for x in letters}
        check_evidence(sorted(by_id.values(), key=lambda x: x.offset), topic, log)
        assert times[told_first] == 2
        assert set(times.values()) <= {1, 2}

        worker.terminate()
        worker.wait()
        start_worker(spawn, env)
        after = admitted(version)
        await desk.submit([after], partition=PARTITION)
        await desk.results_of([after])
        assert Counter(x.event_id for x in (await desk.read()).dead_letters) == times, "nothing is set aside again"
