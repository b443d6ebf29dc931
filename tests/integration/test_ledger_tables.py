"""The ledger's statements on real Postgres: once per request, forward only, and no writer in another's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from infra.postgres import is_data_error, open_pool
from infra.settings import PostgresSettings
from streams.delivery import Delivery
from streams.ledger import Ledger
from streams.projections import NextOffset
from tests.unit.streams.usage_samples import TOPIC, located, raw, usage

GROUP = "usage-ledger"


@pytest.fixture
async def ledger(env: dict[str, str]) -> AsyncIterator[Ledger]:
    async with open_pool(PostgresSettings(dsn=env["INFERLOG_POSTGRES_DSN"]), max_size=4) as pool:
        yield Ledger(pool, group=GROUP)


async def sums(ledger: Ledger) -> dict[str, int]:
    rows = await ledger._pool.fetch("SELECT meter, sum(quantity) AS quantity FROM usage_hourly GROUP BY meter")
    return {r["meter"]: int(r["quantity"]) for r in rows}


async def test_a_request_counted_before_counts_nothing(ledger: Ledger) -> None:
    async with ledger.transaction() as t:
        assert await t.count([located(usage(1)), located(usage(2))]) == 2
    async with ledger.transaction() as t:
        assert await t.count([located(usage(2)), located(usage(3))]) == 1
    assert await sums(ledger) == {"items": 12, "requests": 3}


async def test_nothing_of_a_transaction_that_raises_is_kept(ledger: Ledger) -> None:
    async def killed_before_commit() -> None:
        async with ledger.transaction() as t:
            await t.count([located(usage(1))])
            await t.advance([NextOffset(topic=TOPIC, partition=0, next_offset=1)])
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        await killed_before_commit()
    assert await sums(ledger) == {}
    assert await ledger.positions(TOPIC) == {}


async def test_the_position_only_moves_forward(ledger: Ledger) -> None:
    for offset in (5, 9, 7):
        async with ledger.transaction() as t:
            await t.advance([NextOffset(topic=TOPIC, partition=3, next_offset=offset)])
    assert await ledger.positions(TOPIC) == {3: 9}


@pytest.mark.parametrize(
    "bad",
    [
        usage(2, quantities={"items": 2**63 - 1}),  # the sum overflows
        usage(2, quantities={"items": -100}),  # the table's own check
        usage(2, customer="a\x00b"),  # no such character in Postgres
    ],
)
async def test_a_transaction_goes_on_after_refused_data(ledger: Ledger, bad: object) -> None:
    async with ledger.transaction() as t:
        await t.count([located(usage(1))])
        with pytest.raises(Exception, match=r".") as refused:
            await t.count([located(bad)])  # type: ignore[arg-type]
        assert is_data_error(refused.value)
        await t.count([located(usage(3))])
    assert await sums(ledger) == {"items": 8, "requests": 2}


async def test_writers_with_the_same_records_in_other_orders_count_each_once(ledger: Ledger) -> None:
    records = [usage(n, customer=f"cus_{n % 5}", minutes=n % 90) for n in range(300)]
    log = [raw(r, offset, partition=offset % 4) for offset, r in enumerate(records)]

    async def write(order: list[int]) -> None:
        delivery = Delivery(ledger, give_up_s=30)
        for start in range(0, len(order), 25):
            await delivery.deliver([log[n] for n in order[start : start + 25]])

    forward = list(range(300))
    shuffled = sorted(forward, key=lambda _n: uuid4())
    await asyncio.wait_for(asyncio.gather(write(forward), write(forward[::-1]), write(shuffled)), 60)
    assert await sums(ledger) == {"items": 1200, "requests": 300}
    assert await ledger.positions(TOPIC) == {p: 297 + p for p in range(4)}
