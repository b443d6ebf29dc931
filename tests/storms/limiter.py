"""`make limiter-proof CALLS=1000000 SECONDS=60 SEED=7`: the limiter held to the law of its rates, and its mutants.

Real processes on a real server of its own. Every admission is logged inside the script, by Redis' clock, and every pair
of admissions of every bucket is checked in integers, with no tolerance. Prints what is found; the last line is one JSON
object. Exits 1 when a bucket was over its rate, or a mutant was not caught.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from infra.redis import open_redis
from infra.settings import RedisSettings
from schemas.keys import RedisKeys
from tests.gcra import excess_beyond_losses_us, excess_of_changing_us
from tests.hammer import admitted, bucket_of
from tests.processes import Process
from tests.storms import limiter_gateway, limiter_load
from tests.storms.ground import Timeline, drawn
from tests.storms.limiter_gateway import Part
from tests.storms.limiter_liveness import keeps_pace, returns_when_told
from tests.storms.limiter_load import KEYS_OF_A_CUSTOMER, Load
from tests.storms.limiter_log import verdict_of
from tests.storms.limiter_store import Store
from tests.storms.limiter_weather import FAULTS, endure, stutter

PROCESSES, KEYS, GATEWAYS, GATEWAY_KEYS = 8, 400, 4, 5
#: What is tried, and on which rate and burst it shows.
VARIANTS = {
    "real": (3_000, 5),
    "client_clock": (100, 20),
    "fourteen_digits": (10_000, 1),
    "floor_interval": (700, 5),
    "check_then_set": (3_000, 5),
    "two_windows": (20, 20),
    "retry_on_timeout": (100_000, 1_000),
}
MUTANTS = [name for name in VARIANTS if name != "real"]


class Proof:
    """One run, in a folder of its own."""

    def __init__(self, folder: Path, store: Store, note: Timeline, *, seed: int) -> None:
        self.folder, self.store, self.note, self.seed = folder, store, note, seed
        self.figures: dict[str, Any] = {}
        self.failures: list[str] = []

    def settings(self, namespace: str) -> RedisSettings:
        return RedisSettings(url=self.store.url, namespace=namespace)

    def env(self, namespace: str) -> dict[str, str]:
        """Settings of a hammer: of all servers it only reaches Redis."""
        away = {
            "INFERLOG_KAFKA_BOOTSTRAP": "127.0.0.1:1",
            "INFERLOG_POSTGRES_DSN": "postgresql://a:b@127.0.0.1:1/c",
            "INFERLOG_S3_ENDPOINT": "http://127.0.0.1:1",
            "INFERLOG_S3_ACCESS_KEY": "a",
            "INFERLOG_S3_SECRET_KEY": "b",
        }
        home = str(self.folder / "home")
        return {**away, "INFERLOG_HOME": home, "INFERLOG_REDIS_URL": self.store.url, "INFERLOG_NAMESPACE": namespace}

    def fail(self, why: str) -> None:
        self.note(f"FAILED: {why}")
        self.failures.append(why)

    async def together(self, command: list[str], env: dict[str, str], name: str) -> Path:
        """Run processes to their end. Returns their output."""
        log = self.folder / f"{name}.log"
        process = Process(command, env, log)
        try:
            if await asyncio.to_thread(process.wait, 1800) != 0:
                self.fail(f"processes of {name} failed: {process.tail()}")
        finally:
            process.end()
        return log

    async def exact(self, calls: int, seconds: float) -> None:
        """Many keys, several buckets, limits that change; every pair of admissions of every bucket."""
        load = Load(
            url=self.store.url,
            namespace="exact",
            processes=PROCESSES,
            seed=self.seed,
            keys=KEYS,
            calls=-(-calls // PROCESSES),
            seconds=seconds,
        )
        self.note(f"{calls} calls by {PROCESSES} processes, {KEYS} keys, limits change {limiter_load.PHASES - 1} times")
        log = await self.together(limiter_load.command(load), {}, "exact")
        states: dict[str, int] = defaultdict(int)
        for line in log.read_text().splitlines():
            for state, number in json.loads(line)["states"].items():
                states[state] += number
        buckets: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
        count = 0
        async with open_redis(self.settings("exact"), timeout_s=60.0) as client:
            for customer in range(KEYS // KEYS_OF_A_CUSTOMER):
                for at, _, taken in await admitted(client, RedisKeys(namespace="exact"), f"c{customer}"):
                    count += 1
                    for name, cost, interval_us, burst in taken:
                        buckets[name].append((at, int(cost), int(interval_us), int(burst)))
            await client.flushall()
        slack_us = max(map(excess_of_changing_us, buckets.values()), default=Fraction(0))
        limits = sum(len({a[2:] for a in taken}) for taken in buckets.values())
        if slack_us > 0:
            self.fail(f"a bucket was over its rate by {float(slack_us)} µs")
        if states["1"] != count or set(states) - {"0", "1"}:
            self.fail(f"answers {dict(states)} and {count} logged admissions do not go together")
        same = verdict_of(buckets, seed=self.seed)
        if same is not True:
            self.fail(f"the proof of the log says {same} of the same admissions")
        self.figures |= {
            "calls": sum(states.values()),
            "admitted": count,
            "refused": states["0"],
            "buckets": len(buckets),
            "limits": limits,
            "slack_us": float(slack_us),
        }
        self.note(
            f"{count} admitted, {states['0']} refused, {len(buckets)} buckets, {limits} limits: slack {slack_us} µs"
        )

    async def variants(self, seconds: float) -> None:
        """The limiter without one of its mechanisms is over its rate, or charges twice; the limiter itself is not."""
        found, over_us, twice = await self.tried("real", seconds)
        if over_us > 0 or twice:
            self.fail(f"the limiter itself is over its rate by {over_us} µs, and charged {twice} calls twice")
        self.note(f"the limiter itself: {found} admitted, {0 - over_us:g} µs to spare")
        caught = []
        for name in MUTANTS:
            # A fault that needs two calls to meet takes longer where processes get little of the machine.
            for longer in (1, 3, 9):
                found, over_us, twice = await self.tried(name, seconds * longer)
                if over_us > 0 or twice:
                    break
            how = f"{twice} calls charged twice" if twice else f"{over_us:g} µs over the rate"
            self.note(f"mutant {name}: {found} admitted, {how}")
            if over_us > 0 or twice:
                caught.append(name)
            else:
                self.fail(f"mutant {name} was not caught")
        self.figures["mutants_caught"] = sorted(caught)

    async def tried(self, name: str, seconds: float) -> tuple[int, float, int]:
        """How much a variant admitted, how many microseconds over its rate, and how many calls it charged twice."""
        rate, burst = VARIANTS[name]
        command = ["python", "-m", "tests.hammer", *map(str, (PROCESSES, name, rate, burst, seconds))]
        late = asyncio.ensure_future(stutter(self.store)) if name == "retry_on_timeout" else None
        await self.together(command, self.env(name), name)
        if late is not None:
            late.cancel()
            await asyncio.wait([late])
            self.store.wake()
        async with open_redis(self.settings(name), timeout_s=60.0) as client:
            found = await admitted(client, RedisKeys(namespace=name))
            await client.flushall()
        limit = bucket_of("real", rate, burst)
        log = [(at, 1, limit.interval_us, limit.burst) for at, _, _ in found]
        over_us = float(excess_of_changing_us(log))
        if verdict_of({"key:k": log}, seed=self.seed) is not (over_us <= 0):
            self.fail(f"{name}: the proof of the log does not see {over_us} µs")
        # A batch of the hammer shares a word; only calls that are sent one by one can be told apart.
        words = [word for _, word, _ in found] if name == "retry_on_timeout" else []
        return len(found), over_us, len(words) - len(set(words))

    async def liveness(self, calls: int) -> None:
        """Who keeps the pace is never refused, and who comes back when told is admitted."""
        async with open_redis(self.settings("live"), timeout_s=10.0) as client:
            paced, refused = await keeps_pace(client, calls, seed=self.seed)
            told, again = await returns_when_told(client, calls, seed=self.seed)
        if refused or again:
            self.fail(f"{refused} of {paced} paced calls refused, {again} of {told} refused when they came back")
        self.note(f"{paced} calls at exactly the rate: {refused} refused; {told} came back when told: {again} refused")
        self.figures |= {"paced": paced, "paced_refused": refused, "came_back": told, "came_back_refused": again}

    async def faults(self, seconds: float) -> None:
        """Gateways while Redis is cut, flushed, frozen and made to forget its scripts: the union of what they admit."""
        part = Part(
            out=str(self.folder / "gateway"),
            url=self.store.url,
            namespace="union",
            gateways=GATEWAYS,
            seconds=seconds + 2,
            keys=GATEWAY_KEYS,
        )
        self.note(f"{GATEWAYS} gateways, {GATEWAY_KEYS} keys, {seconds:g} s of faults")
        weather = asyncio.ensure_future(endure(self.store, seconds, seed=self.seed))
        await self.together(limiter_gateway.command(part), {}, "union")
        losses, forgotten = await weather
        happened = {kind: sum(of == kind for of, _ in losses) for kind in FAULTS} | {"script flush": forgotten}
        union: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        modes: dict[str, int] = defaultdict(int)
        counts: list[dict[str, int]] = []
        lines = []
        for n in range(GATEWAYS):
            for text in (await asyncio.to_thread(Path(f"{part.out}-{n}").read_text)).splitlines():
                one = json.loads(text)
                if "longest_ms" in one:
                    counts.append(one)
                    continue
                lines.append((n, one))
                modes[one["mode"]] += 1
                for name, _, _, cost, *_ in one["buckets"]:
                    union[one["key"], name].append((one["at"], cost))
        worst: int | None = None
        for (key, name), taken in union.items():
            b = next(b for b in limiter_gateway.limits_of(key) if b.name == name)
            times = [span for _, span in losses]
            over_us = excess_beyond_losses_us(taken, interval_us=b.interval_us, burst=b.burst, losses=times)
            worst = over_us if worst is None else max(worst, over_us)
            if over_us > 0:
                self.fail(f"{name}: {over_us} µs over the rate and a burst per loss")
        if not modes["LOCAL"] or not modes["SHARED"]:
            self.fail(f"somebody decided nothing: {dict(modes)}")
        local = verdict_of({}, seed=self.seed, lines=[(n, one) for n, one in lines if one["mode"] == "LOCAL"])
        if local is not True:
            self.fail(f"the proof of the log says {local} of what gateways decided by themselves")
        longest_ms = max((c["longest_ms"] for c in counts), default=0)
        self.note(f"{dict(modes)} with {happened}: slack {worst} µs; slowest answer {longest_ms} ms")
        self.figures["faults"] = {
            **happened,
            "losses": len(losses),
            "admitted": dict(modes),
            "slack_us": worst,
            "slowest_answer_ms": longest_ms,
        }


async def prove(folder: Path, *, calls: int, seconds: float, seed: int, say: Any) -> dict[str, Any]:
    """The whole proof. Returns its figures; `held` says whether everything held."""
    note = Timeline(say)
    store = Store(folder / "redis")
    proof = Proof(folder, store, note, seed=seed)
    try:
        await asyncio.to_thread(store.start)
        await proof.exact(calls, seconds)
        await proof.variants(max(1.0, min(4.0, seconds / 10)))
        await proof.liveness(max(200, min(5_000, calls // 100)))
        await proof.faults(seconds)
    finally:
        store.wake()
        store.kill()
    return {
        "seed": seed,
        **proof.figures,
        "failures": proof.failures,
        "held": not proof.failures,
        "wall_s": round(note.seconds, 1),
    }


@click.command(help=__doc__)
@click.option("--calls", default=1_000_000, show_default=True, help="Calls of the exact proof.")
@click.option("--seconds", default=60.0, show_default=True, help="Length of the exact proof, and of the faults.")
@click.option("--seed", type=int, default=None, help="Of limits, calls and faults; drawn and said unless given.")
def main(calls: int, seconds: float, seed: int | None) -> None:
    """See the module."""
    seed = drawn(seed)
    click.echo(f"seed {seed}")
    folder = Path(tempfile.mkdtemp(prefix="inferlog-limiter-"))
    try:
        figures = asyncio.run(prove(folder, calls=calls, seconds=seconds, seed=seed, say=click.echo))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    click.echo(json.dumps(figures))
    raise SystemExit(0 if figures["held"] else 1)


if __name__ == "__main__":
    main()
