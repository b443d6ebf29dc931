"""`make storm-deadlock SECONDS=600`: four ledger workers with the same customers in every batch, as fast as they can.

A customer's records lie on all partitions and so do a request's repetitions, which the product's never do: all workers
write the same rows at once. Exits 1 when PostgreSQL's log notes one deadlock, or the sums are not the generator's.
"""

from __future__ import annotations

import asyncio
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from infra.postgres import open_connection
from infra.settings import ReplaySettings
from streams.replay.verify import wait_for_ledger
from tests.conditions import eventually
from tests.storms.books import balance
from tests.storms.fleet import Fleet
from tests.storms.gauge import REACHED, Gauge
from tests.storms.ground import Ground, Say, Timeline, drawn, open_ground, storm
from tests.storms.sender import open_sender
from tests.storms.usage_stream import Mix, UsageStream
from tests.storms.weather import supervise

_START_S = 120.0
_DRAIN_S = 300.0
#: Enough for a full batch of each worker and the next one.
_AHEAD = 20_000
_ENDLESS = 1_000_000_000


async def run(
    home: Path, *, seconds: float, seed: int, customers: int, workers: int, say: Say, app: str
) -> dict[str, Any]:
    """One storm. Returns the figures."""
    async with open_ground(home) as ground:
        note = Timeline(say)
        fleet = Fleet(ground.env, ground.logs, note, size=workers, app=app)
        mix = Mix(events=_ENDLESS, customers=customers, repeated=0.2, apart_s=0.0001, hot=True)
        stream = UsageStream(seed, mix, began=datetime.now(timezone.utc))
        gauge = Gauge(ground.settings.postgres)
        fleet.keep()
        aside = [
            asyncio.create_task(supervise(fleet)),
            asyncio.create_task(gauge.report(note, lambda: f"{ground.deadlocks()} deadlocks")),
        ]
        try:
            await eventually(lambda: asyncio.to_thread(fleet.reading), timeout_s=_START_S, what="all workers to read")
            note.begin()
            async with open_sender(ground.settings.kafka, stream, scatter=True) as sender:
                await _feed(ground, sender.feed, seconds)
            replay = ReplaySettings(kafka=ground.settings.kafka, postgres=ground.settings.postgres)
            await wait_for_ledger(replay, timeout_s=_DRAIN_S)
            read_s = note.seconds
            for task in (t for t in aside if t.done()):
                task.result()
        finally:
            for task in aside:
                task.cancel()
            await asyncio.gather(*aside, return_exceptions=True)
            fleet.end()
        books = await balance(ground.settings.postgres, stream)
        deadlocks = ground.deadlocks()
    for example in books.examples:
        note(f"WRONG {example}")
    return {
        "seed": seed,
        "events": stream.unique,
        "repetitions": stream.repeats + sender.resent,
        "customers": customers,
        "workers": workers,
        "worker_ends": dict(sorted(fleet.ends.items())),
        "ledger_per_s": round((stream.unique + stream.repeats) / read_s),
        "deadlocks": deadlocks,
        "missing": books.missing,
        "double": books.double,
        "wrong_sums": books.wrong_sums,
        "dead_letters": books.dead_letters,
        "held": books.even and not deadlocks,
        "wall_s": round(note.seconds, 1),
    }


async def _feed(ground: Ground, feed: Any, seconds: float) -> None:
    async with open_connection(ground.settings.postgres) as connection:

        async def reached() -> int:
            found: int = await connection.fetchval(REACHED)
            return found

        await feed(seconds, ahead=_AHEAD, reached=reached)


@click.command(epilog="Example:  python -m tests.storms.deadlock --seconds 60 --seed 7")
@click.option("--seconds", default=600.0, show_default=True, help="How long records are sent.")
@click.option("--customers", default=40, show_default=True, help="Customers, all of them in every batch.")
@click.option("--workers", default=4, show_default=True, help="Ledger workers.")
@click.option("--seed", default=None, type=int, help="Seed of the records; printed when it is drawn.")
@click.option("--app", default="streams.app", show_default=True, help="The Faust app that the workers run.")
@click.option("--keep", is_flag=True, help="Keep the folder with logs and tables for a look afterwards.")
def main(seconds: float, customers: int, workers: int, seed: int | None, app: str, keep: bool) -> None:
    """Have several workers write the same rows without a pause; then look for deadlocks."""
    seed = drawn(seed)
    click.echo(f"seed {seed}: {customers} customers in all batches of {workers} workers for {seconds:g} s")
    figures = storm(
        lambda home: run(
            home, seconds=seconds, seed=seed, customers=customers, workers=workers, say=click.echo, app=app
        ),
        keep=keep,
    )
    if not figures["held"]:
        click.echo(f"NOT HELD. Again: python -m tests.storms.deadlock --seconds {seconds:g} --seed {seed} --app {app}")
    click.echo(json.dumps(figures))
    if not figures["held"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
