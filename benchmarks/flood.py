"""`make bench-flood`: what customers feel of callers who mean no good (`benchmarks.floods`), and what those take.

In each round the same open loop of a well-behaved customer runs quiet before, between and after all kinds of attack.
What counts is the p95 of all rounds under an attack beside that of the quiet windows before it, or after it, whichever
is worse; how far these two lie apart tells what the machine does by itself. The gateway's memory is sampled meanwhile.
The last line is one JSON object. Exits 1 when an attack makes p95 more than 1.5 times as long, or the gateway grows
past its bound; 2 when the same traffic elsewhere on the machine does so too, and nothing can be told.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil
import uvloop

from benchmarks.floods import FLOODS
from benchmarks.load import http_request, open_loop
from benchmarks.meters import cpu_seconds
from docs.demo import digits
from docs.demo.shell import inferlog, inferlog_json, say
from infra.local.stack import Stack

MOST_RATIO = 1.5
#: What docs/overload.md states for the default settings and these attacks, in MB: the process and its bounds.
MOST_RSS_MB = 400.0
QUIET, CONTROL = "quiet", "elsewhere"
#: Below this a difference is the machine's, not the gateway's.
_FLOOR_MS = 1.0
#: Opening hundreds of connections is over by then; what a first burst on them costs is not what is measured here.
_BEGINS_WITHIN_S, _SETTLES_WITHIN_S = 1.0, 0.2
_SAMPLE_EVERY_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What was measured in one stretch: what the customer waited, the gateway's share of a core, its largest memory."""

    kind: str
    latencies_s: list[float]
    cores: float
    rss_mb: float


@click.command(epilog="Example:  python -m benchmarks.flood --rounds 5")
@click.option("--rounds", default=5, show_default=True, help="How often everything is measured.")
@click.option("--seconds", default=1.2, show_default=True, help="Length of each window.")
@click.option("--rate", default=80.0, show_default=True, help="Inferences a second.")
@click.option("--only", multiple=True, type=click.Choice(list(FLOODS)), help="Only these attacks.")
@click.option("--from-customer", is_flag=True, help="The attackers come from the address of the customer.")
def main(rounds: int, seconds: float, rate: float, only: tuple[str, ...], from_customer: bool) -> None:
    """Measure p95 of inference quiet and under attack, on a stack of its own."""
    home = Path(tempfile.mkdtemp(prefix="inferlog-flood-"))
    os.environ["INFERLOG_HOME"] = str(home)
    stack = Stack(home)
    try:
        env = stack.up(progress=lambda line: say(f"  {line}"))
        digits.build(home / "bundle")
        inferlog("models", "publish", "digits", str(home / "bundle"), "--route")
        key = _customer("flood", 100_000)
        # Little: what a customer's calls within its rate cost the others is what it pays for.
        os.environ["FLOOD_KEY"] = _customer("mallory", 10)
        if from_customer:
            os.environ["FLOOD_FROM"] = "127.0.0.1"
        pid = next(s.pid for s in stack.status() if s.name == "api")
        assert pid is not None
        bench = Bench(int(env["INFERLOG_API_PORT"]), key, pid, seconds=seconds, rate=rate)
        figures = uvloop.run(bench.run(only or tuple(FLOODS), rounds))
    finally:
        stack.down(wipe=True)
        shutil.rmtree(home, ignore_errors=True)
    control = figures["ratio"].pop(CONTROL, 0.0)
    worst, largest = max(figures["ratio"].values(), default=0.0), max(figures["rss_mb"].values())
    figures["control"] = control
    say(
        f"worst ratio of p95 {worst}, expected at most {MOST_RATIO}; largest memory {largest} MB, at most {MOST_RSS_MB}"
    )
    say(f"of traffic elsewhere {control}; quiet windows of one kind lie up to {max(figures['swing'].values())} apart")
    if control > MOST_RATIO:
        say("too much else runs here to tell: traffic that never reaches the gateway makes as much of a difference")
    say(json.dumps(figures))
    sys.exit(2 if control > MOST_RATIO else int(worst > MOST_RATIO or largest > MOST_RSS_MB))


def _customer(name: str, per_s: int) -> str:
    """A new customer's key."""
    made = inferlog_json("customers", "create", name, "--requests-per-s", str(per_s), "--burst", str(per_s))
    return str(inferlog_json("keys", "create", made["customer_id"])["key"])


async def _line(attacker: asyncio.subprocess.Process) -> bytes:
    assert attacker.stdout is not None
    return await asyncio.wait_for(attacker.stdout.readline(), 60)


def _tell(attacker: asyncio.subprocess.Process) -> None:
    assert attacker.stdin is not None
    attacker.stdin.write(b"\n")


class Bench:
    """One gateway, its well-behaved customer, and what was measured of both."""

    def __init__(self, port: int, key: str, pid: int, *, seconds: float, rate: float) -> None:
        rows, _ = digits.held_out()
        inputs = [{"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": [float(x) for x in rows[0]]}]
        self._request = http_request("/v2/models/digits/infer", key, json.dumps({"inputs": inputs}).encode())
        self._port, self._pid, self._seconds, self._rate = port, pid, seconds, rate
        self._process = psutil.Process(pid)
        self._windows: list[Window] = []
        self._saw: dict[str, Counter[str]] = {}

    async def run(self, kinds: tuple[str, ...], rounds: int) -> dict[str, Any]:
        """Measure, and return the figures."""
        self._saw = {kind: Counter() for kind in kinds}
        attackers = {kind: await self._attacker(kind) for kind in kinds}
        try:
            await self._window(QUIET, -1, None)
            for number in range(rounds):
                for kind in kinds:
                    await self._window(QUIET, number, None)
                    await self._window(kind, number, attackers[kind])
                await self._window(QUIET, number, None)
        finally:
            for attacker in attackers.values():
                attacker.kill()
                await attacker.wait()
        return self._figures(kinds, rounds)

    async def _attacker(self, kind: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        command = ["-m", "benchmarks.floods", kind, str(self._port)]
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe)
        await _line(process)
        return process

    async def _window(self, kind: str, number: int, attacker: asyncio.subprocess.Process | None) -> None:
        await asyncio.sleep(_SETTLES_WITHIN_S)
        sampling = asyncio.ensure_future(self._largest_rss_mb(over := asyncio.Event()))
        if attacker is not None:
            _tell(attacker)
            await asyncio.sleep(_BEGINS_WITHIN_S)
        before_s = cpu_seconds({"api": self._pid})["api"]
        run = await open_loop(
            "127.0.0.1",
            self._port,
            [self._request],
            rate=self._rate,
            seconds=self._seconds,
            connections=16,
            seed=number,
        )
        cores = (cpu_seconds({"api": self._pid})["api"] - before_s) / run.wall_s
        if attacker is not None:
            _tell(attacker)
            self._saw[kind].update(json.loads(await _line(attacker)))
        over.set()
        rss_mb = await sampling
        if set(run.statuses) != {200}:
            raise RuntimeError(f"expected only answers with status 200 under '{kind}', found {dict(run.statuses)}")
        if number >= 0:
            self._windows.append(window := Window(kind=kind, latencies_s=run.latencies_s, cores=cores, rss_mb=rss_mb))
            p95_ms = _p95_ms([window])
            say(f"round {number}  {kind:>12}: p95 {p95_ms} ms, gateway {cores:.2f} of a core, {rss_mb:.0f} MB")

    async def _largest_rss_mb(self, over: asyncio.Event) -> float:
        largest = 0
        while not over.is_set():
            largest = max(largest, self._process.memory_info().rss)
            await asyncio.sleep(_SAMPLE_EVERY_S)
        return round(largest / 1e6, 1)

    def _figures(self, kinds: tuple[str, ...], rounds: int) -> dict[str, Any]:
        ratio, swing = {}, {}
        for kind in kinds:
            at = [number for number, window in enumerate(self._windows) if window.kind == kind]
            before, during, after = (_p95_ms([self._windows[n + step] for n in at]) for step in (-1, 0, 1))
            ratio[kind] = round(during / max(_FLOOR_MS, before, after), 2)
            swing[kind] = round(max(before, after) / max(_FLOOR_MS, min(before, after)), 2)

        def of(kind: str) -> list[Window]:
            return [w for w in self._windows if w.kind == kind]

        return {
            "ratio": ratio,
            "swing": swing,
            "p95_ms": {kind: _p95_ms(of(kind)) for kind in (QUIET, *kinds)},
            "rss_mb": {kind: max(w.rss_mb for w in of(kind)) for kind in (QUIET, *kinds)},
            "gateway_cores": {kind: round(statistics.median(w.cores for w in of(kind)), 2) for kind in (QUIET, *kinds)},
            "attackers_saw": {kind: dict(seen) for kind, seen in self._saw.items()},
            "rounds": rounds,
        }


def _p95_ms(windows: list[Window]) -> float:
    latencies_s = sorted(second for window in windows for second in window.latencies_s)
    return round(1000 * latencies_s[int(0.95 * len(latencies_s))], 2)


if __name__ == "__main__":
    main()
