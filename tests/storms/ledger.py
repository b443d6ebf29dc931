"""`make soak-ledger SECONDS=600 SEED=7`: usage while processes and servers die, counted to the unit afterwards.

Real Kafka, PostgreSQL and Faust workers in a folder of their own. Prints what happens when; the last line is one JSON
object. Exits 1 when a request is missing, billed twice or set aside, whatever the weather was.
"""

from __future__ import annotations

import asyncio
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from infra.settings import ReplaySettings
from streams.replay.verify import wait_for_ledger
from tests.conditions import ConditionTimeout, eventually
from tests.storms.books import Balance, balance
from tests.storms.faults import outage_s, plan
from tests.storms.fleet import Fleet
from tests.storms.gauge import Gauge
from tests.storms.ground import Ground, Say, Timeline, drawn, open_ground, storm
from tests.storms.proof import prove
from tests.storms.sender import Sender, open_sender
from tests.storms.usage_stream import Mix, UsageStream
from tests.storms.weather import Weather, supervise

_START_S = 120.0
_DRAIN_S = 120.0
#: Up to so many requests are proved from the log as well, as `inferlog verify` does, unless told otherwise.
_PROVED = 200_000


async def run(
    home: Path,
    *,
    seconds: float,
    seed: int,
    mix: Mix,
    workers: int,
    say: Say,
    app: str = "streams.app",
    proved: bool = True,
) -> dict[str, Any]:
    """One storm. Returns the figures."""
    async with open_ground(home) as ground:
        note = Timeline(say)
        fleet = Fleet(ground.env, ground.logs, note, size=workers, app=app)
        weather = Weather(ground.stack, fleet, note, seed=seed, outage_s=outage_s(seconds))
        stream = UsageStream(seed, mix, began=datetime.now(timezone.utc))
        gauge = Gauge(ground.settings.postgres)
        try:
            async with open_sender(ground.settings.kafka, stream) as sender:
                figures = await _endure(ground, fleet, weather, sender, gauge, note, seconds=seconds, seed=seed)
        finally:
            fleet.end()
        books = await balance(ground.settings.postgres, stream)
        figures |= _judged(books, note)
        figures["deadlocks"] = ground.deadlocks()
        if proved:
            figures["verified"] = await prove(_replay(ground), note)
        note("the books are closed")
    return {
        "seed": seed,
        "events": stream.unique,
        "repetitions": stream.repeats + sender.resent,
        "sums": len(stream.sums),
        **figures,
        "held": books.even
        and figures["all_read_at_the_end"]
        and not figures["deadlocks"]
        and figures.get("verified", True),
        "wall_s": round(note.seconds, 1),
    }


async def _endure(
    ground: Ground,
    fleet: Fleet,
    weather: Weather,
    sender: Sender,
    gauge: Gauge,
    note: Timeline,
    *,
    seconds: float,
    seed: int,
) -> dict[str, Any]:
    """Send, rage and wait until the ledger has read all of it. Returns what happened."""

    def about() -> str:
        away = f", away: {', '.join(sorted(weather.away))}" if weather.away else ""
        return f"{sender.sent:,} sent, {fleet.running} of {fleet.size} workers run{away}"

    aside: list[asyncio.Future[None]] = [asyncio.create_task(supervise(fleet))]
    await eventually(lambda: asyncio.to_thread(fleet.reading), timeout_s=_START_S, what="all workers to read")
    note.begin()
    aside.append(asyncio.create_task(gauge.report(note, about)))
    work: asyncio.Future[Any] = asyncio.gather(sender.pour(seconds), weather.rage(plan(seed, seconds)))
    try:
        # What watches never ends by itself: when it does, it has failed, and the storm with it.
        await asyncio.wait({work, *aside}, return_when=asyncio.FIRST_COMPLETED)
        for task in (t for t in aside if t.done()):
            task.result()
        await work
        note(f"all sent: {sender.sent:,} records")
        drain_s = await _drained(ground, note, within_s=max(_DRAIN_S, seconds))
        await gauge.look()
        all_read = await _all_read(fleet, note)
    finally:
        for task in (work, *aside):
            task.cancel()
        await asyncio.gather(work, *aside, return_exceptions=True)
    return {
        "faults": dict(sorted(weather.happened.items())),
        "worker_starts": fleet.starts,
        "worker_ends": dict(sorted(fleet.ends.items())),
        "all_read_at_the_end": all_read,
        "overdue_stops": fleet.overdue,
        "slowest_stop_s": round(fleet.slowest_stop_s, 1),
        "ledger_per_s": round(gauge.records / (note.seconds or 1)),
        "ledger_fastest_per_s": round(gauge.fastest_per_s),
        "drain_s": drain_s,
    }


async def _drained(ground: Ground, note: Timeline, *, within_s: float) -> float | None:
    """Seconds until the ledger had read all that was sent; None when it does not within this time."""
    began = note.seconds

    async def caught_up() -> bool:
        await wait_for_ledger(_replay(ground), timeout_s=within_s)
        return True

    try:
        await eventually(caught_up, timeout_s=within_s, what="the ledger")  # again when a server is still coming back
    except ConditionTimeout as error:
        note(f"THE LEDGER DOES NOT MOVE ON: {error}")
        return None
    note(f"the ledger has read all of it, {note.seconds - began:.1f} s later")
    return round(note.seconds - began, 1)


async def _all_read(fleet: Fleet, note: Timeline) -> bool:
    """Whether every worker found its way back to the group: one that did not is a silent loss of capacity."""
    try:
        await eventually(lambda: asyncio.to_thread(fleet.reading), timeout_s=_START_S, what="all workers to read")
    except ConditionTimeout as error:
        note(f"NOT ALL READ: {error}")
        return False
    return True


def _replay(ground: Ground) -> ReplaySettings:
    return ReplaySettings(kafka=ground.settings.kafka, postgres=ground.settings.postgres)


def _judged(books: Balance, note: Timeline) -> dict[str, int]:
    for example in books.examples:
        note(f"WRONG {example}")
    return {
        "missing": books.missing,
        "double": books.double,
        "wrong_sums": books.wrong_sums,
        "dead_letters": books.dead_letters,
    }


@click.command(epilog="Example:  python -m tests.storms.ledger --seconds 60 --events 60000 --seed 7")
@click.option("--seconds", default=600.0, show_default=True, help="How long records are sent and faults happen.")
@click.option("--events", default=None, type=int, help="Requests whose usage is sent; a million in 600 s otherwise.")
@click.option("--customers", default=400, show_default=True, help="Customers they belong to.")
@click.option("--workers", default=3, show_default=True, help="Ledger workers at the start.")
@click.option("--seed", default=None, type=int, help="Seed of the records and the weather; printed when it is drawn.")
@click.option("--app", default="streams.app", show_default=True, help="The Faust app that the workers run.")
@click.option("--prove/--no-prove", default=None, help="Prove from the log, too; otherwise up to 200,000 requests.")
@click.option("--keep", is_flag=True, help="Keep the folder with logs and tables for a look afterwards.")
def main(
    seconds: float,
    events: int | None,
    customers: int,
    workers: int,
    seed: int | None,
    app: str,
    prove: bool | None,
    keep: bool,
) -> None:
    """Send usage while workers, PostgreSQL and Kafka go down and come back; then count."""
    seed = drawn(seed)
    count = events if events is not None else round(1_000_000 * min(1.0, seconds / 600))
    mix = Mix(events=count, customers=customers, apart_s=seconds / max(1, count))
    click.echo(f"seed {seed}: {count:,} requests of {customers} customers in {seconds:g} s, {workers} workers")
    proved = prove if prove is not None else count <= _PROVED
    figures = storm(
        lambda home: run(
            home, seconds=seconds, seed=seed, mix=mix, workers=workers, say=click.echo, app=app, proved=proved
        ),
        keep=keep,
    )
    if not figures["held"]:
        click.echo(
            f"NOT HELD. Again: python -m tests.storms.ledger --seconds {seconds:g} --events {count} "
            f"--customers {customers} --workers {workers} --seed {seed} --app {app}"
        )
    click.echo(json.dumps(figures))
    if not figures["held"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
