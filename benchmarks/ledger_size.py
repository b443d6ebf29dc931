"""`make bench-ledger-size`: the ledger's transaction against a table of 25 million requests, beside an empty one.

The same batches go to both databases of one server in turns, then more of them while the pruner lets go of old rows.
The last line is one JSON object. Exits 1 when the two counted differently or set anything aside, never for slowness.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import click
import uvloop

from benchmarks.ledger.world import World, servers
from docs.demo.shell import say
from infra.postgres import Pool, open_connection, open_pool, queries
from infra.settings import PostgresSettings
from schemas.codec import encode
from schemas.ids import usage_id
from schemas.records import UsageRecorded
from schemas.topics import USAGE
from streams.ledger.delivery import Delivery
from streams.ledger.pruner import Pruner
from streams.ledger.raw import RawRecord
from streams.ledger.sorting import SortedBatch
from streams.ledger.tables import Ledger

BATCH = 1000
CUSTOMERS = 400
DUPLICATES = 0.05
HORIZON = timedelta(days=40)
#: How far back the rows reach: a fifth of them lies past the horizon.
FILLED = timedelta(days=50)
_SLICE = 500_000
_WARM_UP = 20
_LATE_S = 2 * 3600


@click.command(epilog="Example:  python -m benchmarks.ledger_size --rows 1000000 --batches 100")
@click.option("--rows", default=25_000_000, show_default=True, help="Requests that the full table remembers.")
@click.option("--batches", default=600, show_default=True, help="Transactions of 1000 records that are measured.")
@click.option("--seed", default=None, type=int, help="Seed of the records; printed when it is drawn.")
def main(rows: int, batches: int, seed: int | None) -> None:
    """Measure rate and latency of the batch transaction; needs about 250 bytes of disk for a row."""
    drawn = seed if seed is not None else int.from_bytes(os.urandom(4), "big")
    say(f"seed {drawn}")
    with servers(keep=False) as world:
        figures, broken = uvloop.run(_measure(world, rows=rows, batches=batches, seed=drawn))
    for line in broken:
        say(f"BROKEN: {line}")
    say(json.dumps({**figures, "seed": drawn}))
    sys.exit(1 if broken else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A database and the ledger on it; `took_s` are the seconds of its transactions in the phase being measured."""

    pool: Pool
    delivery: Delivery
    took_s: list[float]

    async def write(self, batch: SortedBatch) -> None:
        began = time.perf_counter()
        await self.delivery.write(batch)
        self.took_s.append(time.perf_counter() - began)

    def figures(self) -> dict[str, float]:
        """Of the phase that ends here."""
        took = sorted(self.took_s[_WARM_UP:])
        self.took_s.clear()
        return {
            "records_per_s": round(BATCH * len(took) / sum(took)),
            "p50_ms": round(1000 * took[len(took) // 2], 2),
            "p99_ms": round(1000 * took[int(len(took) * 0.99)], 2),
        }


async def _measure(world: World, *, rows: int, batches: int, seed: int) -> tuple[dict[str, object], list[str]]:
    now = datetime.now(timezone.utc)
    ready = _batches(world, random.Random(seed), 2 * (batches + _WARM_UP), now)
    async with AsyncExitStack() as stack:
        envs = {name: await stack.enter_async_context(world.database(name)) for name in ("empty", "full")}
        filled_s, sizes = await _fill(envs["full"], rows, now)
        sides: dict[str, Contender] = {}
        for name, env in envs.items():
            pool = await stack.enter_async_context(open_pool(_postgres(env), max_size=1))
            delivery = Delivery(Ledger(pool, group=world.group), give_up_s=60)
            sides[name] = Contender(pool=pool, delivery=delivery, took_s=[])
        quiet = await _phase(sides, ready, batches + _WARM_UP)
        say(f"quiet: {json.dumps(quiet)}")
        pruner = await _pruner(world, envs["full"])
        began = time.perf_counter()
        pruning = asyncio.create_task(pruner.round())
        deleting = await _phase(sides, ready, batches + _WARM_UP)
        let_go, ended = pruner.let_go, pruning.done()
        took_s = time.perf_counter() - began
        pruning.cancel()
        await asyncio.wait({pruning})
        say(f"while rows are let go of: {json.dumps(deleting)}")
        broken = [f"the pruner failed: {pruning.exception()!r}"] if ended and pruning.exception() else []
        broken += [f"{name}: {side.delivery.dead} dead letters" for name, side in sides.items() if side.delivery.dead]
        counted = {name: side.delivery.counted for name, side in sides.items()}
        if len(set(counted.values())) != 1:
            broken.append(f"the same batches were counted differently: {counted}")
    figures: dict[str, object] = {
        "rows": rows,
        "batch_records": BATCH,
        **quiet,
        "p99_ratio": _ratio(quiet, "p99_ms"),
        "p50_ratio": _ratio(quiet, "p50_ms"),
        "rate_ratio": round(1 / _ratio(quiet, "records_per_s"), 3),
        "while_letting_go": {
            **deleting,
            "p99_ratio": _ratio(deleting, "p99_ms"),
            "p50_ratio": _ratio(deleting, "p50_ms"),
            "let_go_per_s": round(let_go / took_s),
            "let_go": let_go,
            "ended_early": ended,
        },
        "fill_s": round(filled_s, 1),
        **{name.replace("_bytes", "_mb"): round(size / 1e6) for name, size in sizes.items()},
    }
    return figures, broken


async def _phase(sides: Mapping[str, Contender], ready: Iterator[list[RawRecord]], batches: int) -> dict[str, object]:
    """Each batch goes to both, one after the other; who is first changes every time."""
    order = list(sides.values())
    for _ in range(batches):
        batch = await order[0].delivery.prepare(next(ready))
        for side in order:
            await side.write(batch)
        order.reverse()
    return {name: side.figures() for name, side in sides.items()}


def _ratio(figures: Mapping[str, Any], name: str) -> float:
    full, empty = figures["full"], figures["empty"]
    return round(float(full[name] / empty[name]), 3)


async def _fill(env: Mapping[str, str], rows: int, now: datetime) -> tuple[float, dict[str, int]]:
    """As if the ledger had run for as long as `FILLED`; returns the seconds it took, and what is on the disk."""
    sql, begins = queries("benchmarks"), now - FILLED
    began = time.perf_counter()
    async with open_connection(_postgres(env), command_timeout_s=600) as connection:
        begins_ms, step_ms = int(begins.timestamp() * 1000), FILLED.total_seconds() * 1000 / rows
        for first in range(0, rows, _SLICE):
            last = min(first + _SLICE, rows) - 1
            await connection.execute(sql["fill_processed"], first, last, begins_ms, step_ms)
            say(f"  {last + 1:,} requests are remembered after {time.perf_counter() - began:.0f} s")
        await connection.execute(sql["fill_hourly"], CUSTOMERS, begins)
        await connection.execute(sql["settle"])
        await connection.execute(sql["checkpoint"])
        sizes = dict(await connection.fetchrow(sql["sizes"]) or {})
    return time.perf_counter() - began, sizes


async def _pruner(world: World, env: Mapping[str, str]) -> Pruner:
    async with open_connection(_postgres(env)) as connection:
        await connection.execute(queries("benchmarks")["complete"], world.group, world.topic, USAGE.partitions)
    return Pruner(_postgres(env), group=world.group, topic=world.topic, partitions=USAGE.partitions, horizon=HORIZON)


def _postgres(env: Mapping[str, str]) -> PostgresSettings:
    return PostgresSettings(dsn=env["INFERLOG_POSTGRES_DSN"])


def _batches(world: World, draw: random.Random, count: int, now: datetime) -> Iterator[list[RawRecord]]:
    """Batches as a reader of all partitions gets them: some records repeated, a tenth late by up to two hours."""
    ends = [0] * USAGE.partitions
    recent: list[tuple[bytes, bytes]] = []
    for number in range(count):
        batch: list[RawRecord] = []
        for _ in range(BATCH):
            if recent and draw.random() < DUPLICATES:
                key, value = draw.choice(recent)
            else:
                late_s = draw.random() * (_LATE_S if draw.random() < 0.1 else 2)
                record = _usage(draw, now + timedelta(seconds=0.1 * number - late_s))
                key, value = record.customer_id.encode(), encode(record)
                recent.append((key, value))
            partition = key[-1] % len(ends)
            offset = ends[partition]
            ends[partition] += 1
            batch.append(
                RawRecord(topic=world.topic, partition=partition, offset=offset, follows=offset, key=key, value=value)
            )
        del recent[: max(0, len(recent) - 10 * BATCH)]
        yield batch


def _usage(draw: random.Random, at: datetime) -> UsageRecorded:
    request_id = UUID(int=int(at.timestamp() * 1000) << 80 | 0x7 << 76 | 0b10 << 62 | draw.getrandbits(62))
    return UsageRecorded(
        event_id=usage_id(request_id),
        occurred_at=at,
        request_id=request_id,
        customer_id=f"cust_{draw.randrange(CUSTOMERS):04d}",
        model="digits",
        version="d1" * 32,
        price_id="standard-v1",
        quantities={"requests": 1, "items": draw.randrange(1, 9), "tokens": draw.randrange(1, 2000)},
    )


if __name__ == "__main__":
    main()
