"""The ledger's statements on real Postgres: once per request, forward only, and no writer in another's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from uuid import uuid4

import pytest

from infra.local.stack import Stack
from infra.postgres import open_pool
from infra.settings import PostgresSettings
from schemas.records import UsageRecorded
from streams.ledger.dedup import Overtaken
from streams.ledger.delivery import Delivery
from streams.ledger.projections import Counted, LocatedUsage
from streams.ledger.stretches import Skipped, Stretch
from streams.ledger.tables import Ledger
from streams.ledger.transaction import LedgerTransaction
from tests.conditions import eventually
from tests.unit.streams.usage_samples import TOPIC, located, raw, usage

GROUP = "usage-ledger"
LONG = "".join(chr(0x4E00 + n * 7919 % 20_000) for n in range(4000))


@pytest.fixture
async def ledger(env: dict[str, str]) -> AsyncIterator[Ledger]:
    async with open_pool(PostgresSettings(dsn=env["INFERLOG_POSTGRES_DSN"]), max_size=4) as pool:
        yield Ledger(pool, group=GROUP)


async def sums(ledger: Ledger) -> dict[str, int]:
    rows = await ledger._pool.fetch("SELECT meter, sum(quantity) AS quantity FROM usage_hourly GROUP BY meter")
    return {r["meter"]: int(r["quantity"]) for r in rows}


def told(counted: Counted) -> tuple[list[int], list[int]]:
    """The numbers of the records that were new, and of those that contradict."""
    return numbers(counted.fresh), numbers(counted.contradicting)


def numbers(usages: Iterable[LocatedUsage]) -> list[int]:
    return sorted(u.record.request_id.int - 1 for u in usages)


async def test_a_request_counted_before_counts_nothing(ledger: Ledger) -> None:
    async with ledger.transaction() as t:
        assert len((await t.count([located(usage(1)), located(usage(2))])).fresh) == 2
    async with ledger.transaction() as t:
        assert told(await t.count([located(usage(2)), located(usage(3))])) == ([3], [])
    assert await sums(ledger) == {"items": 12, "requests": 3}


async def test_a_request_counted_before_with_other_content_is_told_apart(ledger: Ledger) -> None:
    other = located(usage(2, quantities={"items": 9}))
    async with ledger.transaction() as t:
        await t.count([located(usage(1)), located(usage(2))])
    async with ledger.transaction() as t:
        assert told(await t.count([located(usage(1)), other, located(usage(3))])) == ([3], [2])
    assert await sums(ledger) == {"items": 12, "requests": 3}


async def test_a_row_from_before_digests_were_kept_contradicts_nothing(ledger: Ledger) -> None:
    async with ledger.transaction() as t:
        await t.count([located(usage(1))])
    await ledger._pool.execute("UPDATE processed_requests SET content_digest = NULL")
    async with ledger.transaction() as t:
        other = located(usage(1, quantities={"items": 9}))
        assert told(await t.count([other])) == ([], [])


async def test_of_two_writers_at_once_with_contradicting_records_one_counts_and_the_other_is_told(
    ledger: Ledger,
) -> None:
    other = located(usage(1, quantities={"items": 9}))

    async def second() -> Counted:
        async with ledger.transaction() as t:
            return await t.count([other])

    async def waits() -> bool:
        return bool(await ledger._pool.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))

    async with ledger.transaction() as t:
        await t.count([located(usage(1))])
        task = asyncio.create_task(second())
        await eventually(waits, what="the second writer waits for the first")
    assert told(await task) == ([], [1])


async def test_contradictions_are_set_aside_in_the_transaction_that_finds_them(ledger: Ledger) -> None:
    delivery = Delivery(ledger, give_up_s=30)
    await delivery.deliver([raw(usage(1), 0)])
    await delivery.deliver([raw(usage(1), 1), raw(usage(1, quantities={"items": 9}), 2), raw(usage(2), 3)])
    rows = await ledger._pool.fetch('SELECT "offset", reason FROM dead_letters')
    assert [r["offset"] for r in rows] == [2]
    assert str(usage(1).request_id) in rows[0]["reason"]
    assert await sums(ledger) == {"items": 8, "requests": 2}
    assert await ledger.positions(TOPIC) == {0: 4}


async def test_nothing_of_a_transaction_that_raises_is_kept(ledger: Ledger) -> None:
    async def killed_before_commit() -> None:
        async with ledger.transaction() as t:
            await t.count([located(usage(1))])
            await t.advance([Stretch(topic=TOPIC, partition=0, begin=0, end=1)])
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        await killed_before_commit()
    assert await sums(ledger) == {}
    assert await ledger.positions(TOPIC) == {}


async def advance(ledger: Ledger, begin: int, end: int, *, partition: int = 3) -> None:
    async with ledger.transaction() as t:
        await t.count([located(usage(end))])
        await t.advance([Stretch(topic=TOPIC, partition=partition, begin=begin, end=end)])


async def test_the_position_only_moves_forward(ledger: Ledger) -> None:
    for begin, end in ((0, 5), (5, 9), (4, 7)):
        await advance(ledger, begin, end)
    assert await ledger.positions(TOPIC) == {3: 9}


@pytest.mark.parametrize(("before", "begin"), [([(0, 5)], 6), ([], 1)])
async def test_a_batch_that_does_not_follow_the_position_is_refused_and_nothing_of_it_kept(
    ledger: Ledger, before: list[tuple[int, int]], begin: int
) -> None:
    for known in before:
        await advance(ledger, *known)
    with pytest.raises(Skipped, match=f"partition 3: a batch begins at {begin}"):
        await advance(ledger, begin, begin + 4)
    assert await ledger.positions(TOPIC) == ({3: 5} if before else {})
    assert (await sums(ledger)).get("requests", 0) == len(before)


@pytest.mark.parametrize("before", [0, 5])
async def test_a_position_that_another_writer_moved_meanwhile_is_found_out(ledger: Ledger, before: int) -> None:
    if before:
        await advance(ledger, 0, before)
    mine = Stretch(topic=TOPIC, partition=3, begin=before, end=before + 4)

    async def frozen() -> None:
        async with ledger.transaction() as t:
            await t.opening([mine])
            await advance(ledger, before, before + 2)
            await t.count([located(usage(99))])
            await t.advance([mine])

    with pytest.raises(Overtaken):
        await frozen()
    assert await ledger.positions(TOPIC) == {3: before + 2}
    assert (await sums(ledger))["requests"] == (2 if before else 1)


async def test_a_position_is_set_where_the_topic_was_made_anew(ledger: Ledger) -> None:
    await advance(ledger, 0, 9)
    await ledger.move(TOPIC, None, {3: (9, 2), 4: (None, 7)})
    assert await ledger.positions(TOPIC) == {3: 2, 4: 7}
    assert await ledger.topic_id(TOPIC) is None
    one, other = uuid4(), uuid4()
    await ledger.move(TOPIC, one, {3: (9, 0), 4: (None, 0)})  # as read before somebody else moved them
    assert await ledger.topic_id(TOPIC) == one
    await ledger.move(TOPIC, other, {})
    assert await ledger.topic_id(TOPIC) == other
    assert await ledger.positions(TOPIC) == {3: 2, 4: 7}
    await advance(ledger, 7, 8, partition=4)


@pytest.mark.parametrize(
    "bad",
    [
        usage(2, quantities={"items": 2**63 - 1}),  # the sum overflows
        usage(2, quantities={"items": -100}),  # the table's own check
        usage(2, customer="a\x00b"),  # no such character in Postgres
        replace(usage(2), occurred_at=datetime.min.replace(tzinfo=timezone.utc)),  # -infinity to Postgres
        replace(usage(2), occurred_at=datetime.max.replace(tzinfo=timezone.utc)),
        usage(
            2, customer="".join(chr(0x4E00 + n * 7919 % 20_000) for n in range(4000))
        ),  # longer than an index takes, also compressed
    ],
)
async def test_a_record_that_is_refused_is_found_and_its_neighbours_count(ledger: Ledger, bad: UsageRecorded) -> None:
    async with ledger.transaction() as t:
        await t.count([located(usage(1))])
        counted = await t.count([located(u) for u in (usage(3), usage(4), bad, usage(1), usage(5))])
        assert [u.record for u, _ in counted.refused] == [bad]
        assert told(counted) == ([3, 4, 5], [])
        assert told(await t.count([located(usage(2))])) == ([2], [])
    assert await sums(ledger) == {"items": 20, "requests": 5}
    kept = await ledger._pool.fetchval("SELECT count(*) FROM processed_requests")
    assert kept == 5, "a request is not known for a record that was refused"


async def test_of_many_records_the_refused_one_is_found_in_few_attempts(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = 0
    add = LedgerTransaction._add

    async def counting(self: LedgerTransaction, fresh: Sequence[LocatedUsage]) -> int:
        nonlocal attempts
        attempts += 1
        return await add(self, fresh)

    monkeypatch.setattr(LedgerTransaction, "_add", counting)
    records = [usage(n, customer=f"cus_{n}") for n in range(64)]
    records[37] = usage(37, customer="a\x00b")
    async with ledger.transaction() as t:
        assert len((await t.count([located(r) for r in records])).refused) == 1
    assert attempts < 20  # about 2·log2(64), not 64
    assert (await sums(ledger))["requests"] == 63


async def test_writers_with_the_same_records_in_other_orders_count_each_once(ledger: Ledger) -> None:
    records = [usage(n, customer=f"cus_{n % 5}", minutes=n % 90) for n in range(300)]
    log = [raw(r, offset, partition=offset % 4, follows=0) for offset, r in enumerate(records)]

    async def write(order: list[int]) -> None:
        delivery = Delivery(ledger, give_up_s=30)
        for start in range(0, len(order), 25):
            await delivery.deliver([log[n] for n in order[start : start + 25]])

    forward = list(range(300))
    shuffled = sorted(forward, key=lambda _n: uuid4())
    await asyncio.wait_for(asyncio.gather(write(forward), write(forward[::-1]), write(shuffled)), 60)
    assert await sums(ledger) == {"items": 1200, "requests": 300}
    assert await ledger.positions(TOPIC) == {p: 297 + p for p in range(4)}


@pytest.mark.parametrize("use", ["count", "commit", "positions", "reachable"])
async def test_a_cancelled_use_does_not_wait_for_a_server_that_is_stopped(
    ledger: Ledger, stack: Stack, use: str
) -> None:
    begun, paused = asyncio.Event(), asyncio.Event()

    async def pause() -> None:
        begun.set()
        await paused.wait()

    async def run() -> None:
        if use in ("count", "commit"):
            async with ledger.transaction() as t:
                await t.count([located(usage(1))])
                await pause()
                if use == "count":
                    await t.count([located(usage(2))])
        else:
            await ledger.positions(TOPIC)  # a connection is open, and stays
            await pause()
            await (ledger.positions(TOPIC) if use == "positions" else ledger.reachable(timeout_s=60))

    task = asyncio.create_task(run())
    await begun.wait()
    stack.pause_part("postgres")
    try:
        paused.set()
        for _ in range(20):
            await asyncio.sleep(0)  # until its statement is on its way
        assert not task.done()
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=5)
    finally:
        stack.resume_part("postgres")
    assert done
    assert task.cancelled()
