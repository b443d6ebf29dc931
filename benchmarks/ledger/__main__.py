"""`make bench-ledger`: usage from one topic into hourly sums, by the ledger's two modes and what it is held against.

Every contender reads the same topic from its begin, as a group and into a database or store of its own, one after the
other. Faust's bare loop is the floor under our agent, the bare sink the ceiling of both, Kafka Streams the outside
reference. The last line is one JSON object. Exits 1 when sums are wrong, never for slowness.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import click

from benchmarks.ledger import kafka_streams, sink
from benchmarks.ledger.events import Generated, differences, recently
from benchmarks.ledger.pace import Pace, pace
from benchmarks.ledger.product import running
from benchmarks.ledger.watched import Failed, faust_worker, program, watch
from benchmarks.ledger.world import World, servers, sums_of
from docs.demo.shell import say
from tests.processes import free_port

CONTENDERS = ("faust", "agent", "loop", "sink", "kafka-streams")
_SINK_EVENTS = 200_000
_SINK_BATCH = 5000


@click.command(epilog="Example:  python -m benchmarks.ledger --events 50000 --only loop --only sink")
@click.option("--events", default=500_000, show_default=True, help="Usage records on the topic.")
@click.option("--only", multiple=True, type=click.Choice(CONTENDERS), help="Measure these; all unless given.")
@click.option("--seed", default=None, type=int, help="Seed of the records; printed when it is drawn.")
@click.option("--keep", is_flag=True, help="Keep the folder with logs for a look afterwards.")
def main(events: int, only: tuple[str, ...], seed: int | None, keep: bool) -> None:
    """Measure events a second and CPU per event of everything that can count usage from the log."""
    drawn = seed if seed is not None else int.from_bytes(os.urandom(4), "big")
    say(f"seed {drawn}")
    generated = Generated(events=events, seed=drawn, begins=recently())
    with servers(keep=keep) as world:
        if keep:
            say(f"folder {world.home}")
        bench = _Bench(world, generated)
        asyncio.run(bench.run(only or CONTENDERS))
    for line in bench.broken:
        say(f"BROKEN: {line}")
    say(json.dumps({"events": events, "seed": drawn, **bench.figures, "broken": len(bench.broken)}))
    sys.exit(1 if bench.broken else 0)


class _Bench:
    def __init__(self, world: World, generated: Generated) -> None:
        self._world = world
        self._generated = generated
        self.figures: dict[str, Any] = {"contenders": {}}
        self.broken: list[str] = []

    async def run(self, chosen: tuple[str, ...]) -> None:
        rate = await self._world.write(self._generated)
        say(f"wrote {self._generated.events} records, {rate:,.0f}/s")
        for name in chosen:
            work = {"faust": self._faust, "sink": self._sink, "kafka-streams": self._kafka_streams}.get(name)
            try:
                await (work() if work else self._ledger(name))
            except Failed as error:
                self.broken.append(f"{name}: {error}")

    def _tell(self, name: str, found: Pace, began: float) -> None:
        figures = found.figures()
        self.figures["contenders"][name] = figures
        cpu = " ".join(f"{k} {v}" for k, v in figures["cpu_us_per_event"].items())  # type: ignore[attr-defined]
        say(
            f"{name:<24} {figures['events_per_s']:>9,} events/s {figures['per_cpu_s']:>9,} per CPU second;"
            f" CPU µs/event: {cpu} ({time.monotonic() - began:.0f} s)"
        )

    def _check(self, name: str, wrong: list[str]) -> None:
        self.broken += [f"{name}: {line}" for line in wrong]

    async def _faust(self) -> None:
        """Plain iteration, which only counts."""
        began, world, total = time.monotonic(), self._world, self._generated.events
        log, place = world.home / "plain-faust.log", world.home / "plain-faust.count"
        env = {
            "BENCH_GROUP": "bench-plain-faust",
            "BENCH_BOOTSTRAP": world.kafka.bootstrap,
            "BENCH_TOPIC": world.topic,
            "BENCH_DATADIR": str(world.home / "plain-faust"),
            "BENCH_COUNT_FILE": str(place),
            "BENCH_WEB_PORT": str(free_port()),
        }

        async def position() -> int:
            return int(place.read_text() or 0) if place.exists() else 0

        async with program(faust_worker("benchmarks.ledger.plain_faust"), env, log) as process:
            samples = await watch(process, position, total=total, log=log, servers=world.pids)
        self._tell("faust", pace(samples, total=total), began)

    async def _ledger(self, mode: str) -> None:
        """The product's own worker in one of its modes, whole."""
        began, world, total = time.monotonic(), self._world, self._generated.events
        async with running(world, mode, name=mode) as product:
            samples = await watch(
                product.process,
                lambda: world.position(product.tables),
                total=total,
                log=product.log,
                servers=world.pids,
            )
            self._check(mode, differences(self._generated.once, await sums_of(product.tables)))
        self._tell(mode, pace(samples, total=total), began)

    async def _sink(self) -> None:
        world = self._world
        records = min(_SINK_EVENTS, self._generated.events)
        batches = await sink.decoded_batches(world, records=records, batch=_SINK_BATCH)
        for name, work in (("sink-ledger", sink.through_ledger), ("sink-statements", sink.bare_statements)):
            began = time.monotonic()
            async with world.database(name) as env:
                self._tell(name, await work(world, env, batches), began)

    async def _kafka_streams(self) -> None:
        javac = kafka_streams.compiler()
        if javac is None:
            say("kafka-streams: skipped, there is no javac (install a JDK of 17 or newer, or set JAVA_HOME)")
            self.figures["kafka_streams"] = "skipped: no JDK"
            return
        began, total = time.monotonic(), self._generated.events
        found = await kafka_streams.run(self._world, javac, kafka_streams.VARIANTS, total=total)
        for variant in kafka_streams.VARIANTS:
            name = f"kafka-streams-{variant.name}"
            expected = self._generated.once if variant.dedup else self._generated.read
            self._check(name, differences(expected, kafka_streams.sums_of(self._world, variant)))
            self._tell(name, pace(found[variant.name], total=total), began)


if __name__ == "__main__":
    main()
