"""The ledger on real servers when one is away, a record is bad, or nothing moves: it holds, sets aside, or says why."""

from __future__ import annotations

import pytest
from aiokafka import AIOKafkaProducer

from infra.local.stack import Stack
from schemas.codec import encode
from schemas.records import UsageRecorded
from streams.log import open_log
from streams.replay.verify import verify
from streams.watchdog import Stalled, Watchdog
from tests.conditions import eventually
from tests.factories import encode_unchecked, usage
from tests.integration.ledger_world import LedgerWorld, Spawn, health, usages


async def test_postgres_away_holds_and_resumes_without_loss(either: dict[str, str], spawn: Spawn, stack: Stack) -> None:
    world = LedgerWorld(either, spawn)
    worker = world.worker()
    await world.produce(usages(100))
    await world.caught_up()
    stack.stop_part("postgres")
    try:
        await world.produce(usages(200))
        await eventually(lambda: health(worker)["holding"], what="the worker holds its batch and says so")
    finally:
        stack.start_part("postgres")
    await world.caught_up()
    assert await world.sums() == {"requests": 300, "items": 1200}
    await eventually(lambda: health(worker)["holding"] is None)
    assert worker.returncode is None


async def test_postgres_away_for_too_long_ends_the_worker_with_nothing_acknowledged(
    either: dict[str, str], spawn: Spawn, stack: Stack
) -> None:
    world = LedgerWorld(either, spawn)
    worker = world.worker(settings={"INFERLOG_LEDGER_GIVE_UP_S": "2"})
    stack.stop_part("postgres")
    try:
        await world.produce(usages(50))
        assert worker.wait(60) != 0
        assert "Postgres was away for" in worker.log.read_text()
        assert await world.committed() == {}
    finally:
        stack.start_part("postgres")
    world.worker()
    await world.caught_up()
    assert await world.sums() == {"requests": 50, "items": 200}


async def test_bad_records_become_dead_letters_and_the_stream_goes_on(either: dict[str, str], spawn: Spawn) -> None:
    world = LedgerWorld(either, spawn)
    good = usages(60, customers=1)
    huge = [usage(customer_id="cus_0", quantities={"requests": 1, "items": 2**62}) for _ in range(3)]
    records: list[UsageRecorded | bytes] = [
        *good[:20],
        b"not a record",
        *good[20:40],
        *huge,
        encode_unchecked(usage(quantities={"items": -5})),
        *good[40:],
    ]
    await world.produce(records, partition=3)
    world.worker()
    await world.caught_up()
    async with world.tables() as c:
        dead = await c.fetch('SELECT partition, "offset", value, reason FROM dead_letters ORDER BY "offset"')
    # One of the three huge quantities fits a bigint, the second would overflow it: halving finds which to set aside.
    assert {(r["partition"], r["offset"]) for r in dead} >= {(3, 20), (3, 44)}
    assert dead[0]["value"] == b"not a record"
    assert "framed by 0x00" in dead[0]["reason"]
    overflowed = [r for r in dead if "out of range" in r["reason"]]
    assert {r["offset"] for r in overflowed} < {41, 42, 43}
    assert len(overflowed) == 2
    assert any("quantities['items']: expected an integer from 0" in r["reason"] for r in dead)
    sums = await world.sums()
    assert sums["requests"] == 60 + 3 - len(overflowed)
    await world.acknowledged()


@pytest.mark.parametrize("batch", ["1", "1000"])
async def test_a_record_that_repeats_another_with_other_content_is_set_aside_wherever_the_batch_ends(
    either: dict[str, str], spawn: Spawn, monkeypatch: pytest.MonkeyPatch, batch: str
) -> None:
    monkeypatch.setattr("streams.replay.verify.SETTLE_S", 0.0)  # results that there are not need not be awaited
    world = LedgerWorld(either, spawn)
    first = usage(customer_id="cus_0", quantities={"items": 4})
    other = usage(request_id=first.request_id, customer_id="cus_0", quantities={"items": 9})
    await world.produce([first, other, first, other, *usages(3, customers=1)], partition=0)
    world.worker(settings={"INFERLOG_LEDGER_BATCH": batch})
    await world.caught_up()
    assert await world.sums() == {"requests": 3, "items": 4 + 12}
    async with world.tables() as c:
        dead = await c.fetch('SELECT "offset", reason FROM dead_letters ORDER BY "offset"')
    assert [r["offset"] for r in dead] == [1, 3]
    assert all(str(first.request_id) in r["reason"] for r in dead)
    i1 = (await verify(world.settings)).verdicts[0]
    assert i1.holds is True
    assert (i1.figures["set_aside"], i1.figures["duplicates"]) == (2, 1)


async def test_a_stop_does_not_wait_for_a_postgres_that_is_stopped(
    either: dict[str, str], spawn: Spawn, stack: Stack
) -> None:
    world = LedgerWorld(either, spawn)
    worker = world.worker()
    async with world.blocked_batch():
        await world.produce(usages(10))
        await world.wait_blocked()
        stack.pause_part("postgres")
        try:
            worker.terminate()
            worker.wait(5)
        finally:
            stack.resume_part("postgres")
    assert await world.committed() == {}
    world.worker()
    await world.caught_up()
    assert await world.sums() == {"requests": 10, "items": 40}


async def test_only_committed_records_are_counted(either: dict[str, str], spawn: Spawn) -> None:
    world = LedgerWorld(either, spawn)
    kept, dropped = usages(5, customers=1), usages(5, customers=1)
    producer = AIOKafkaProducer(
        bootstrap_servers=world.settings.kafka.bootstrap, transactional_id=f"{world.group}-test"
    )
    await producer.start()
    try:
        for records, end in (
            (dropped, producer.abort_transaction),
            (kept, producer.commit_transaction),
            (dropped, producer.abort_transaction),
        ):
            await producer.begin_transaction()
            for r in records:
                await producer.send_and_wait(world.topic, encode(r), partition=0)
            await end()
    finally:
        await producer.stop()
    worker = world.worker()
    await world.caught_up()  # though the topic ends in records and markers that nobody may read
    assert await world.sums() == {"requests": 5, "items": 20}
    assert health(worker)["dead_letters"] == 0


async def test_a_worker_that_does_not_move_ends_itself_with_the_reason(env: dict[str, str], spawn: Spawn) -> None:
    world = LedgerWorld(env, spawn)
    await world.produce(usages(10, customers=1))
    worker = world.worker(
        "tests.integration.ledger_variants:stuck", settings={"INFERLOG_LEDGER_STALL_S": "5"}, ready=False
    )
    assert worker.wait(60) != 0
    assert "the ledger has not moved from 0" in worker.log.read_text()
    assert await world.committed() == {}


async def test_a_held_batch_is_no_stall_and_lag_without_explanation_is(env: dict[str, str], spawn: Spawn) -> None:
    world = LedgerWorld(env, spawn)
    await world.produce(usages(10, customers=1), partition=2)
    holding: list[str | None] = ["Postgres is away"]

    async def positions() -> dict[int, int]:
        return {}

    watchdog = Watchdog(
        world.settings.kafka,
        topic=world.topic,
        partitions=8,
        stall_s=0.0,
        positions=positions,
        assigned=lambda: {2},
        holding=lambda: holding[0],
    )
    async with open_log(world.settings.kafka) as reader:
        for _ in range(3):
            await watchdog.look(reader)
        holding[0] = None
        with pytest.raises(Stalled, match="partition 2: the record at offset 0 has waited"):
            await watchdog.look(reader)
    assert watchdog.lag == 10


async def test_a_killed_workers_partitions_move_on(either: dict[str, str], spawn: Spawn) -> None:
    world = LedgerWorld(either, spawn)
    first = world.worker()
    await world.produce(usages(100))
    await world.caught_up()
    world.worker(ready=False)
    first.kill()
    await world.produce(usages(100))
    await world.caught_up()
    assert await world.sums() == {"requests": 200, "items": 800}
