"""Writers of the same rows wait for each other in line, never in a circle.

A deadlock would be no loss: Postgres ends one of the two, and the batch is written again. So the sums do not show it,
and what is shown here is that there is none. Both writers are let in while somebody holds the row in the middle.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone

import pytest
from asyncpg import DeadlockDetectedError

import streams.ledger.transaction
from infra.postgres import open_pool
from infra.settings import PostgresSettings
from schemas.evidence import dead_letter
from streams.ledger.dedup import Overtaken
from streams.ledger.projections import LocatedUsage, processed_rows
from streams.ledger.stretches import Stretch, stretches
from streams.ledger.tables import Ledger
from streams.ledger.transaction import LedgerTransaction
from tests.conditions import eventually
from tests.unit.streams.usage_samples import NOON, TOPIC, located, raw, usage

#: Takes a writer's number, and which rows it meets in which order.
Step = Callable[[LedgerTransaction, int, Sequence[int]], Awaitable[object]]

MIDDLE = 2
UP, DOWN = (1, MIDDLE, 3), (3, MIDDLE, 1)


@pytest.fixture
async def ledger(env: dict[str, str]) -> AsyncIterator[Ledger]:
    async with open_pool(PostgresSettings(dsn=env["INFERLOG_POSTGRES_DSN"]), max_size=4) as pool:
        yield Ledger(pool, group="g")


async def count_requests(t: LedgerTransaction, _writer: int, numbers: Sequence[int]) -> None:
    await t.count([located(usage(n)) for n in numbers])


async def count_hours(t: LedgerTransaction, writer: int, numbers: Sequence[int]) -> None:
    await t.count([located(usage(100 * writer + n, customer=f"cus_{n}")) for n in numbers])


#: Both sort before the others, so that Postgres refuses a batch before it waits for any of them.
BAD_HOUR = "\x00"
BAD_REQUEST = located(replace(usage(0), occurred_at=datetime.min.replace(tzinfo=timezone.utc)))


async def count_hours_beside_a_bad_record(t: LedgerTransaction, writer: int, numbers: Sequence[int]) -> None:
    bad = [located(usage(100 * writer, customer=BAD_HOUR))] if len(numbers) > 1 else []
    others = [located(usage(100 * writer + n, customer=f"cus_{n}")) for n in numbers]
    assert len((await t.count([*bad, *others])).refused) == len(bad)


async def count_requests_beside_a_bad_record(t: LedgerTransaction, _writer: int, numbers: Sequence[int]) -> None:
    bad = [BAD_REQUEST] if len(numbers) > 1 else []
    assert len((await t.count([*bad, *(located(usage(n)) for n in numbers)])).refused) == len(bad)


async def count_an_hour_that_halves_hold(t: LedgerTransaction, writer: int, numbers: Sequence[int]) -> None:
    """The second writer's halves wait for a request of the third's, which waits for an hour that is theirs by then."""
    rows = {1: [usage(MIDDLE)], 2: [usage(1, customer="x"), usage(MIDDLE), usage(3, customer="x")]}
    third = [usage(3, customer="x")]
    bad = [BAD_REQUEST] if writer == 2 else []
    await t.count([*bad, *(located(u) for u in rows.get(writer, third))])


async def set_aside(t: LedgerTransaction, _writer: int, numbers: Sequence[int]) -> None:
    await t.set_aside([dead_letter(raw(b"bad", n), "bad", occurred_at=NOON) for n in numbers])


async def move(t: LedgerTransaction, _writer: int, numbers: Sequence[int]) -> None:
    await t.advance(stretches(raw(usage(n), 0, partition=n) for n in numbers))


async def move_as_given(t: LedgerTransaction, _writer: int, numbers: Sequence[int]) -> None:
    """By a plan of Postgres that comes upon the positions in the order given; which it takes is its own affair."""
    for plan in ("hashjoin", "mergejoin", "seqscan", "bitmapscan"):
        await t._connection.execute(f"SET LOCAL enable_{plan} = off")
    await t.advance([Stretch(topic=TOPIC, partition=n, begin=0, end=1) for n in numbers])


async def race(ledger: Ledger, step: Step) -> None:
    """Two writers with the same rows in opposite orders, both at work before either can be done."""

    async def write(writer: int, numbers: Sequence[int]) -> None:
        with suppress(Overtaken):  # who comes second to a position begins anew; that is an end of waiting as well
            async with ledger.transaction() as t:
                await step(t, writer, numbers)

    async def wait_for(waiting: int, last: asyncio.Task[None]) -> None:
        async def seen() -> bool:
            found = await ledger._pool.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            return bool(found == waiting) or last.done()

        await eventually(seen, what=f"{waiting} writers waiting, or the last one done")

    async with ledger.transaction() as held:
        await step(held, 1, [MIDDLE])
        first = asyncio.create_task(write(2, UP))
        await wait_for(1, first)
        second = asyncio.create_task(write(3, DOWN))
        await wait_for(2, second)
    await asyncio.gather(first, second)


@pytest.mark.parametrize(
    "step",
    [
        count_requests,
        count_hours,
        count_hours_beside_a_bad_record,
        count_requests_beside_a_bad_record,
        count_an_hour_that_halves_hold,
        set_aside,
        move,
    ],
)
async def test_two_writers_of_the_same_rows_in_opposite_orders_both_finish(ledger: Ledger, step: Step) -> None:
    await race(ledger, step)


async def test_two_writers_move_positions_that_are_there_in_one_order_whatever_theirs_is(ledger: Ledger) -> None:
    async with ledger.transaction() as t:
        await move(t, 0, UP)
    await race(ledger, move_as_given)
    assert await ledger.positions(TOPIC) == {1: 1, 2: 1, 3: 1}


async def test_in_the_order_of_arrival_the_same_two_end_in_a_deadlock(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_they_came(usages: Sequence[LocatedUsage]) -> list[object]:
        rows = {row[0]: row for row in processed_rows(usages)}
        return [rows[u.record.request_id] for u in usages]

    monkeypatch.setattr(streams.ledger.transaction, "processed_rows", as_they_came)
    with pytest.raises(DeadlockDetectedError):
        await race(ledger, count_requests)
