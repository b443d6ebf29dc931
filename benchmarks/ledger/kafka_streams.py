"""Kafka Streams as the outside reference: compiled and run where a JDK is, told to be missing where none is."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ledger.events import Sums
from benchmarks.ledger.pace import Sample
from benchmarks.ledger.watched import Failed, program, tail
from benchmarks.ledger.world import World
from docs.demo.shell import ROOT, say
from infra.local import jars

_SOURCES = ROOT / "benchmarks" / "kafka_streams"
_METERS = ("requests", "items", "tokens")
_RUN_WITHIN_S = 600.0
_JVM = ("-Xms512m", "-Xmx1g", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One run of the hourly count. `guarantee` is Kafka Streams' own word."""

    name: str
    guarantee: str
    dedup: bool
    threads: int

    def argument(self, records: int) -> str:
        """As the program takes it."""
        return f"{self.name}:{self.guarantee}:{'dedup' if self.dedup else 'plain'}:{self.threads}:{records}"


_ALOS, _EOS = "at_least_once", "exactly_once_v2"
WARM_UP = Variant(name="warm-up", guarantee=_ALOS, dedup=True, threads=1)
VARIANTS = (
    Variant(name="alos", guarantee=_ALOS, dedup=False, threads=1),
    Variant(name="alos-dedup", guarantee=_ALOS, dedup=True, threads=1),
    Variant(name="eos", guarantee=_EOS, dedup=False, threads=1),
    Variant(name="eos-dedup", guarantee=_EOS, dedup=True, threads=1),
    Variant(name="alos-dedup-2-threads", guarantee=_ALOS, dedup=True, threads=2),
    Variant(name="eos-dedup-2-threads", guarantee=_EOS, dedup=True, threads=2),
)


def compiler() -> Path | None:
    """The JDK's compiler: of JAVA_HOME, else of the path; None where there is none."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("javac", path=str(Path(home) / "bin") if home else None) or shutil.which("javac")
    return Path(found).resolve() if found else None


async def run(world: World, javac: Path, variants: Sequence[Variant], *, total: int) -> dict[str, list[Sample]]:
    """Samples of each variant over the whole topic, all in one virtual machine after a warm-up. Raises Failed."""
    folder = world.home / "kafka-streams"
    classpath = await asyncio.to_thread(_compile, javac, folder / "classes")
    wanted = [WARM_UP.argument(total), *(v.argument(total) for v in variants)]
    place = [world.kafka.bootstrap, world.topic, str(folder)]
    argv = [str(javac.with_name("java")), *_JVM, "-cp", classpath, "HourlyCount", *place, *wanted]
    log = folder / "log"
    async with program(argv, {}, log) as process:
        try:
            await asyncio.to_thread(process.wait, _RUN_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"not done after {_RUN_WITHIN_S:.0f} s\n{tail(log)}") from None
        if process.returncode:
            raise Failed(f"exited {process.returncode}\n{tail(log)}")
    return read_samples(log.read_text())


def _compile(javac: Path, classes: Path) -> str:
    """Compile the program; returns the class path that it runs with. Raises Failed, PartError."""
    paths = jars.fetch(say, lock=jars.read_lock((_SOURCES / "streams.jars.lock").read_text()))
    classpath = ":".join(map(str, paths))
    classes.mkdir(parents=True)
    sources = [str(p) for p in sorted(_SOURCES.glob("*.java"))]
    argv = [str(javac), "-d", str(classes), "-cp", classpath, *sources]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{javac} cannot compile the hourly count:\n{done.stdout}{done.stderr}")
    return f"{classes}:{classpath}"


def read_samples(text: str) -> dict[str, list[Sample]]:
    """Samples by variant from the lines `AT name nanoseconds records cpuNanoseconds` of its output."""
    found: dict[str, list[Sample]] = {}
    for line in text.splitlines():
        if line.startswith("AT "):
            _, name, at_ns, records, cpu_ns = line.split()
            sample = Sample(at_s=int(at_ns) / 1e9, records=int(records), cpu_s={"own": int(cpu_ns) / 1e9})
            found.setdefault(name, []).append(sample)
    return found


def sums_of(world: World, variant: Variant) -> Sums:
    """What a variant's windowed store held at the end."""
    found: Sums = Counter()
    for line in (world.home / "kafka-streams" / f"{variant.name}.tsv").read_text().splitlines():
        customer, start_ms, *quantities = line.split("\t")
        for meter, quantity in zip(_METERS, quantities, strict=True):
            found[customer, int(start_ms) // 1000, meter] = int(quantity)
    return found
