"""Batches that the broker takes and aiokafka cannot read, on every kind of topic: readers name them and go on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.kafka_batches import UNPACKED_MAX_BYTES
from infra.provision import provision
from infra.schema_feed import learn_once
from infra.settings import KafkaSettings, operator_settings
from schemas.codec import encode
from schemas.facts import Record
from schemas.topics import SCHEMAS, USAGE, Topic, requests_topic
from streams.replay.verify import verify
from tests.factories import usage
from tests.integration.ledger_world import LedgerWorld
from tests.integration.test_dead_letters import kept
from tests.integration.worker_desk import admitted, constant_bundle, open_desk, start_worker, store_bundle, value_of
from tests.processes import Process
from tests.raw_batches import LZ4, PACK, ZSTD, put_raw, raw_batch, raw_record

Spawn = Callable[..., Process]

PARTITION = 3
NOT_TEXT = [(b"\xff\xfe", b"x")]
MIB = 1024 * 1024
LARGE = 60  # fewer than end a ledger
PLACES = 8 + LARGE


async def put(kafka: KafkaSettings, topic: Topic, good: list[Record], *, partition: int = PARTITION) -> str:
    """Good records with bad batches between them, at the offsets from 0 to PLACES - 1; returns the topic's name."""
    name = topic.in_namespace(kafka.namespace).name
    a, b, c, d, e = map(encode, good)
    two = raw_record(0, bytes(UNPACKED_MAX_BYTES)) + raw_record(1, b"")
    large = PACK[ZSTD](raw_record(0, b"x" * (7 * MIB)))
    log = [
        raw_batch(raw_record(0, a), 1),
        raw_batch(raw_record(0, b, headers=NOT_TEXT), 1, codec=LZ4),
        # What a reader that believes it would jump to: offsets that only the others' records could have.
        raw_batch(raw_record(0, c) + raw_record(2**31 - 1, d), 2),
        raw_batch(b"", 2, codec=ZSTD, packed=PACK[ZSTD](two)),
        raw_batch(b"", 1, codec=LZ4, packed=PACK[LZ4](raw_record(0, a)) + b"more"),
        *[raw_batch(b"", 1, codec=ZSTD, packed=large)] * LARGE,
        raw_batch(raw_record(0, e), 1),
    ]
    offsets = [await put_raw(kafka.bootstrap, name, batch, partition=partition) for batch in log]
    assert offsets == [0, 1, 2, 4, 6, *range(7, 7 + LARGE), PLACES - 1]
    return name


def most_memory(process: Process) -> int:
    """What the process has held at most so far, in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (found,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(found) * 1024


async def test_the_ledger_counts_what_can_be_read_and_sets_the_rest_aside(
    env: dict[str, str], spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streams.replay.verify.SETTLE_S", 0.0)  # results that there are not need not be awaited
    world = LedgerWorld(env, spawn)
    topic = await put(world.settings.kafka, USAGE, [usage(quantities={"requests": 1}) for _ in range(5)])
    worker = world.worker()
    await world.caught_up()
    assert await world.sums() == {"requests": 5}
    assert await world.positions() == {PARTITION: PLACES}
    await world.acknowledged()
    # All of it unpacked at once would be half a gigabyte, before anything is made of it.
    assert most_memory(worker) < 450 * MIB
    async with world.tables() as c:
        letters = await kept(c)
    assert [x.offset for x in letters] == list(range(4, PLACES - 1))
    bomb, _, junk, large, *_ = letters
    assert "at offsets 4 to 5 (2 records in" in bomb.reason
    assert f"it holds more than {UNPACKED_MAX_BYTES} bytes unpacked" in bomb.reason
    assert "its lz4 contents are broken" in junk.reason
    assert (bomb.value, bomb.value_size_bytes, bomb.value_sha256) == (None, None, None)
    assert large.value_size_bytes == 7 * MIB

    report = await verify(world.settings)
    assert report.undecodable == {topic: LARGE + 3}
    out = tmp_path / "usage.jsonl"
    exporting = spawn(["inferlog", "export", "usage", "--output", str(out), "--skip-undecodable", "--json"], env)
    assert exporting.wait(60) == 0
    assert len(out.read_text().splitlines()) == 5
    assert "cannot be read from the log: of the batch at offsets 4 to 5" in exporting.tail(60)


async def test_the_worker_serves_what_can_be_read_and_sets_the_rest_aside(
    env: dict[str, str], spawn: Spawn, tmp_path: Path
) -> None:
    version = store_bundle(env, constant_bundle(tmp_path / "bundle", 1.0))
    good = [admitted(version, within_s=300) for _ in range(5)]
    async with open_desk(env) as desk:
        await put(desk.settings, requests_topic(), list(good))
        worker = start_worker(spawn, env)
        assert [value_of(r) for r in await desk.results_of(good)] == [1.0] * 5
        await desk.everything_committed(PLACES)
        letters = {x.offset: x.reason for x in (await desk.read()).dead_letters}
    assert sorted(letters) == list(range(4, PLACES - 1))  # batches that were fetched apart are told in any order
    assert "unpacked" in letters[4]
    assert "lz4" in letters[6]
    assert most_memory(worker) < 1000 * MIB  # torch alone has most of it


async def test_schemas_are_published_and_learnt_past_them(env: dict[str, str]) -> None:
    operator = operator_settings(env)
    kafka = operator.kafka
    topic = SCHEMAS.in_namespace(kafka.namespace).name
    before = await learn_once(kafka)
    for batch in (
        raw_batch(raw_record(0, b"junk", headers=NOT_TEXT), 1),
        raw_batch(raw_record(0, bytes(UNPACKED_MAX_BYTES)), 1, codec=ZSTD),
        raw_batch(b"", 1, codec=LZ4, packed=PACK[LZ4](raw_record(0, b"v")) + b"more"),
    ):
        await put_raw(kafka.bootstrap, topic, batch)
    assert await learn_once(kafka) == {**before, "unreadable": 3}
    await provision(operator)
