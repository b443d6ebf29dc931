"""`make bench-ledger-latency`: from the moment usage is due to be written until the ledger shows it, in both modes.

Arrivals are drawn (Poisson), and latency counts from when a record was due, so that all who wait pay for a slow moment.
A record is visible when Postgres, asked every few milliseconds, says that the ledger is past its offset. The last line
is one JSON object. Exits 1 when a record is missing, never for slowness.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import click

from benchmarks.ledger.events import usage_event
from benchmarks.ledger.product import Product, running
from benchmarks.ledger.watched import Failed, tail
from benchmarks.ledger.world import World, servers
from benchmarks.percentiles import percentiles_ms
from docs.demo.shell import say
from infra.kafka import open_producer
from infra.postgres import Connection, queries
from schemas.codec import encode

MODES = ("agent", "loop")
_LOOK_S = 0.005
_VISIBLE_WITHIN_S = 60.0
_WARM_UP_S = 5.0

#: Partition and offset of a record.
Place = tuple[int, int]


@click.command(epilog="Example:  python -m benchmarks.ledger.latency --seconds 10 --only loop")
@click.option("--seconds", default=60.0, show_default=True, help="Length of each run, after a warm-up of 5 s.")
@click.option("--rate", default=300.0, show_default=True, help="Arrivals a second.")
@click.option("--only", multiple=True, type=click.Choice(MODES), help="Measure these; both unless given.")
@click.option("--seed", default=None, type=int, help="Seed of the arrivals; printed when it is drawn.")
def main(seconds: float, rate: float, only: tuple[str, ...], seed: int | None) -> None:
    """Measure how long usage takes from its writer to the ledger."""
    drawn = seed if seed is not None else int.from_bytes(os.urandom(4), "big")
    say(f"seed {drawn}")
    figures: dict[str, Any] = {}
    broken = []
    with servers(keep=False) as world:
        for mode in only or MODES:
            try:
                figures[mode] = asyncio.run(_measure(world, mode, rate, seconds, drawn))
                say(f"{mode:<6} {json.dumps(figures[mode])}")
            except Failed as error:
                broken.append(f"{mode}: {error}")
    for line in broken:
        say(f"BROKEN: {line}")
    say(json.dumps({"offered_per_s": rate, "seed": drawn, "modes": figures, "broken": len(broken)}))
    sys.exit(1 if broken else 0)


async def _measure(world: World, mode: str, rate: float, seconds: float, seed: int) -> dict[str, float]:
    async with running(world, mode, name=f"latency-{mode}") as product:
        looks: list[tuple[float, dict[int, int]]] = []
        looking = asyncio.create_task(_look(world, product.tables, looks))
        try:
            warm_up = await _write(world, rate=rate, seconds=_WARM_UP_S, seed=seed + 1)
            await _visible(warm_up, looks, product, looking)  # the worker may have started after them
            due = await _write(world, rate=rate, seconds=seconds, seed=seed)
            await _visible(due, looks, product, looking)
        finally:
            looking.cancel()
    latencies = latencies_s(due, looks)
    return {
        "events": len(latencies),
        "looks_per_s": round(len(looks) / (looks[-1][0] - looks[0][0])),
        **percentiles_ms(latencies),
    }


async def _visible(
    due: Mapping[Place, float],
    looks: Sequence[tuple[float, Mapping[int, int]]],
    product: Product,
    looking: asyncio.Task[None],
) -> None:
    """Return when all of these are in the ledger. Raises Failed, and what ended the looking."""
    ends = time.monotonic() + _VISIBLE_WITHIN_S
    while not looks or not _past(looks[-1][1], due):
        if looking.done():
            looking.result()
        if product.process.poll() is not None or time.monotonic() > ends:
            raise Failed(f"records are missing in the ledger\n{tail(product.log)}")
        await asyncio.sleep(_LOOK_S)


async def _look(world: World, connection: Connection, looks: list[tuple[float, dict[int, int]]]) -> None:
    """Where the ledger stands in each partition, again and again, with when the question was asked."""
    sql = queries("streams.ledger")["positions"]
    while True:
        rows = await connection.fetch(sql, world.group, world.topic)
        looks.append((time.monotonic(), {r["partition"]: r["next_offset"] for r in rows}))
        await asyncio.sleep(_LOOK_S)


async def _write(world: World, *, rate: float, seconds: float, seed: int) -> dict[Place, float]:
    """Write records as they are due; returns when each was, by its place."""
    draw = random.Random(seed)
    waiting: list[tuple[float, asyncio.Future[Any]]] = []
    async with open_producer(world.kafka) as producer:
        began = time.monotonic()
        due = began + draw.expovariate(rate)
        while due < began + seconds:
            await asyncio.sleep(due - time.monotonic())
            record = usage_event(draw, occurred_at=datetime.now(timezone.utc))
            key = record.customer_id.encode()
            waiting.append((due, await producer.enqueue(world.topic, encode(record), key=key, timeout_s=10.0)))
            due += draw.expovariate(rate)
        await producer.acknowledged([future for _, future in waiting], timeout_s=30.0)
    return {(future.result().partition, future.result().offset): due for due, future in waiting}


def _past(stands: Mapping[int, int], due: Mapping[Place, float]) -> bool:
    return all(offset < stands.get(partition, 0) for partition, offset in due)


def latencies_s(due: Mapping[Place, float], looks: Sequence[tuple[float, Mapping[int, int]]]) -> list[float]:
    """Seconds from when each record was due to the first look that showed it, in ascending order.

    `looks` are in the order of their times. A record that no look showed is not among them.
    """
    found = []
    by_partition: dict[int, list[tuple[int, float]]] = {}
    for (partition, offset), at_s in due.items():
        by_partition.setdefault(partition, []).append((offset, at_s))
    for partition, records in by_partition.items():
        seen = iter(looks)
        at, stands = next(seen, (0.0, {}))
        for offset, due_s in sorted(records):
            while stands.get(partition, 0) <= offset:
                at, stands = next(seen, (0.0, {partition: sys.maxsize}))
            if at:
                found.append(at - due_s)
    return sorted(found)


if __name__ == "__main__":
    main()
