"""`make soak-ledger SECONDS=600 SEED=7`: usage while processes and servers die, counted to the unit afterwards.

Real Kafka, PostgreSQL and Faust workers in a folder of their own. Prints what happened when; the last line is one JSON
object. Exits 1 when a record is missing, counted twice or set aside, whatever the weather was.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

import click

from infra.kafka import KeyedRecord, open_producer
from infra.local.stack import Stack
from infra.postgres import open_connection
from infra.provision import provision
from infra.settings import OperatorSettings, ReplaySettings, operator_settings
from schemas.codec import encode
from schemas.topics import USAGE
from streams.replay.verify import wait_for_ledger
from tests.conditions import eventually
from tests.processes import Process, free_port
from tests.storms.faults import OUTAGE_S, Fault, Kind, plan
from tests.storms.usage_stream import HourKey, Mix, UsageStream

Say = Callable[[str], None]

_TICK_S = 0.05
_BATCH = 2000
_DRAIN_S = 300.0
_WORKER = {"INFERLOG_LEDGER_SESSION_S": "2", "INFERLOG_LEDGER_STALL_S": "30"}


class Workers:
    """Faust workers as an orchestrator keeps them: `wanted` of them run, and one that ended is started again."""

    def __init__(self, env: dict[str, str], logs: Path, say: Say, *, wanted: int) -> None:
        self._env = {**env, **_WORKER}
        self._logs = logs
        self._say = say
        self._running: list[Process] = []
        self.wanted = wanted
        self.starts = 0
        self.ends: Counter[str] = Counter()

    def keep(self) -> None:
        """Start what is missing; whatever ended by itself is noted."""
        for process in [p for p in self._running if p.returncode is not None]:
            self._running.remove(process)
            self.ends[str(process.returncode)] += 1
            self._say(f"worker {process.pid} ended with {process.returncode}")
        while len(self._running) < self.wanted:
            self.starts += 1
            env = {**self._env, "INFERLOG_STREAMS_PORT": str(free_port())}
            command = ["faust", "-A", "streams.app", "worker", "-l", "info"]
            self._running.append(Process(command, env, self._logs / f"worker-{self.starts}.log"))

    def victim(self, rng: random.Random) -> Process | None:
        """One that runs."""
        alive = [p for p in self._running if p.returncode is None]
        return rng.choice(alive) if alive else None

    def end(self) -> None:
        """All of them, at once."""
        for process in self._running:
            process.end()


class Storm:
    """One run: a stream, its workers and the weather."""

    def __init__(self, stack: Stack, settings: OperatorSettings, workers: Workers, say: Say, *, seed: int) -> None:
        self._stack = stack
        self._settings = settings
        self._workers = workers
        self._say = say
        self._rng = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self.resent = 0

    async def send(self, stream: UsageStream, seconds: float) -> None:
        """Every record of the stream, spread evenly over the time, each until it is acknowledged."""
        total = stream.mix.events * (1 + stream.mix.repeated)
        loop = asyncio.get_running_loop()
        began, sent = loop.time(), 0
        source = stream.records()
        async with open_producer(self._settings.kafka, linger_ms=5, request_timeout_ms=30_000) as producer:
            while True:
                passed = (loop.time() - began) / seconds
                due = int(passed * total) + 1 - sent if passed < 1 else _BATCH  # how many repeat is only about known
                records = list(islice(source, min(due, _BATCH))) if due > 0 else []
                if records:
                    await self._acknowledge(producer, [self._keyed(r) for r in records])
                    sent += len(records)
                elif due > 0:
                    return
                else:
                    await asyncio.sleep(_TICK_S)

    def _keyed(self, record: Any) -> KeyedRecord:
        name = USAGE.in_namespace(self._settings.kafka.namespace).name
        return KeyedRecord(name, record.customer_id.encode(), encode(record))

    async def _acknowledge(self, producer: Any, records: list[KeyedRecord]) -> None:
        left = records

        async def all_are() -> bool:
            nonlocal left
            handed, left = await producer.enqueue_all(left, timeout_s=20, keys_repeat=True)
            await asyncio.wait([future for future, _ in handed])
            for future, members in handed:
                if future.exception() is not None:
                    self.resent += len(members)  # perhaps written, perhaps not: one more repetition
                    left += members
            return not left

        await eventually(all_are, timeout_s=_DRAIN_S, what="Kafka to take all records")

    async def rage(self, faults: list[Fault]) -> None:
        """The planned faults, each at its time; one that takes long delays those behind it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        keeping = asyncio.create_task(self._keep())
        try:
            for fault in faults:
                await asyncio.sleep(max(0.0, began + fault.at_s - loop.time()))
                self._say(fault.kind.value)
                await self._strike(fault.kind)
                self.happened[fault.kind.name.lower()] += 1
        finally:
            keeping.cancel()

    async def _keep(self) -> None:
        while True:
            self._workers.keep()
            await asyncio.sleep(0.2)

    async def _strike(self, kind: Kind) -> None:
        if kind in (Kind.KILL_WORKER, Kind.STOP_WORKER):
            victim = self._workers.victim(self._rng)
            if victim is not None:
                await asyncio.to_thread(victim.kill if kind is Kind.KILL_WORKER else victim.terminate)
        elif kind is Kind.JOIN:
            self._workers.wanted += 1
        elif kind is Kind.LEAVE:
            self._workers.wanted = max(1, self._workers.wanted - 1)
            victim = self._workers.victim(self._rng)
            if victim is not None:
                victim.terminate()
        else:
            name = "kafka" if kind is Kind.RESTART_KAFKA else "postgres"
            await asyncio.to_thread(self._stack.stop_part, name)
            if kind is Kind.POSTGRES_OUTAGE:
                await asyncio.sleep(OUTAGE_S)
            await asyncio.to_thread(self._stack.start_part, name)

    async def drained(self) -> float:
        """Seconds until the ledger had read all that was sent. Raises ConditionTimeout when it never does."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        settings = ReplaySettings(kafka=self._settings.kafka, postgres=self._settings.postgres)

        async def caught_up() -> bool:
            await wait_for_ledger(settings, timeout_s=_DRAIN_S)
            return True

        keeping = asyncio.create_task(self._keep())
        try:
            # Again when a server is still coming back.
            await eventually(caught_up, timeout_s=_DRAIN_S, what="the ledger to have read all of it")
        finally:
            keeping.cancel()
        return loop.time() - began


async def _books(settings: OperatorSettings) -> tuple[dict[HourKey, int], int, int]:
    """The hours, the requests counted, and the dead letters."""
    async with open_connection(settings.postgres) as connection:
        rows = await connection.fetch(
            "SELECT customer_id, hour, model, version, price_id, meter, quantity FROM usage_hourly"
        )
        counted = await connection.fetchval("SELECT count(*) FROM processed_requests")
        dead = await connection.fetchval("SELECT count(*) FROM dead_letters")
    return {tuple(r)[:6]: r["quantity"] for r in rows}, counted, dead


async def run(home: Path, *, seconds: float, seed: int, mix: Mix, workers: int, say: Say) -> dict[str, Any]:
    """One storm on a stack in `home`, which is left running. Returns the figures."""
    stack = Stack(home)
    env = await asyncio.to_thread(stack.up, services_only=True)
    settings = operator_settings({**env, "INFERLOG_HOME": str(home)})
    await provision(settings)
    began = time.monotonic()
    timeline: list[str] = []

    def note(line: str) -> None:
        timeline.append(f"{time.monotonic() - began:7.1f} s  {line}")
        say(timeline[-1])

    logs = home / "logs"
    fleet = Workers({**env, "INFERLOG_HOME": str(home)}, logs, note, wanted=workers)
    storm = Storm(stack, settings, fleet, note, seed=seed)
    stream = UsageStream(seed, mix, began=datetime.now(timezone.utc))
    try:
        fleet.keep()
        faults = plan(seed, seconds)
        await asyncio.gather(storm.send(stream, seconds), storm.rage(faults))
        note(f"sent {stream.unique} requests and {stream.repeats} repetitions")
        drain_s = await storm.drained()
        note(f"the ledger has read all of it {drain_s:.1f} s later")
        found, counted, dead = await _books(settings)
    finally:
        fleet.end()
    wrong = {key for key in stream.sums.keys() | found.keys() if stream.sums.get(key, 0) != found.get(key, 0)}
    for key in sorted(wrong)[:10]:
        note(f"WRONG {key}: sent {stream.sums.get(key, 0)}, ledger {found.get(key, 0)}")
    return {
        "seed": seed,
        "requests": stream.unique,
        "repetitions": stream.repeats + storm.resent,
        "hours": len(stream.sums),
        "missing": max(0, stream.unique - counted),
        "double": max(0, counted - stream.unique),
        "wrong_sums": len(wrong),
        "dead_letters": dead,
        "faults": dict(sorted(storm.happened.items())),
        "worker_starts": fleet.starts,
        "worker_ends": dict(sorted(fleet.ends.items())),
        "drain_s": round(drain_s, 1),
        "seconds": round(time.monotonic() - began, 1),
        "held": not wrong and counted == stream.unique and not dead,
    }


@click.command(epilog="Example:  python -m tests.storms.ledger --seconds 60 --events 60000 --seed 7")
@click.option("--seconds", default=600.0, show_default=True, help="How long records are sent and faults happen.")
@click.option("--events", default=1_000_000, show_default=True, help="Requests whose usage is sent.")
@click.option("--customers", default=400, show_default=True, help="Customers they belong to.")
@click.option("--workers", default=3, show_default=True, help="Ledger workers at the start.")
@click.option("--seed", default=None, type=int, help="Seed of the records and the weather; printed when it is drawn.")
@click.option("--keep", is_flag=True, help="Keep the folder with logs and tables for a look afterwards.")
def main(seconds: float, events: int, customers: int, workers: int, seed: int | None, keep: bool) -> None:
    """Send usage while workers, PostgreSQL and Kafka go down and come back; then count."""
    drawn = seed if seed is not None else int.from_bytes(os.urandom(4), "big")
    home = Path(tempfile.mkdtemp(prefix="inferlog-storm-"))
    click.echo(f"seed {drawn}, in {home}")
    stack = Stack(home)
    try:
        mix = Mix(events=events, customers=customers)
        figures = asyncio.run(run(home, seconds=seconds, seed=drawn, mix=mix, workers=workers, say=click.echo))
    finally:
        stack.down(wipe=not keep)
    click.echo(json.dumps(figures))
    if not figures["held"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
