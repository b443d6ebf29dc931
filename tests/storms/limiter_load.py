"""Processes that ask for many keys' limits: `python -m tests.storms.limiter_load JSON`.

Each key belongs to a customer, and a call takes from up to five buckets. All processes follow the same plan of how
limits change, each up to a second late, as gateways follow a feed. What is admitted is logged inside the script.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from api.admission.buckets import Limit
from api.admission.caller import Caller, Concurrency
from api.limits.plans import Plan
from infra.redis import LuaCall, LuaScript, open_redis, run_each
from infra.settings import RedisSettings
from schemas.keys import RedisKeys
from tests.hammer import variant
from tests.storms.forks import forked

KEYS_OF_A_CUSTOMER = 4
MODELS = ("digits", "minilm")
#: How often every limit changes during a run.
PHASES = 5
BATCH = 48
LATE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is to be done; `calls` are each process'. `began_s` is on the machine's monotonic clock."""

    url: str
    namespace: str
    processes: int
    seed: int
    keys: int
    calls: int
    seconds: float
    worker: int = 0
    began_s: float = 0.0


def limits_of(seed: int, key: int, phase: int) -> tuple[Limit, ...]:
    """The limits of a key and its customer in a phase; every process finds the same."""
    customer = key // KEYS_OF_A_CUSTOMER

    def drawn(name: str, *, most_us: int, most: int, unit: str = "requests", model: str | None = None) -> Limit:
        rng = random.Random(f"{seed} {name} {phase if hash_of(name, phase) else 0}")
        return Limit(
            name=name,
            interval_us=rng.randint(most_us // 50, most_us),
            burst=rng.randint(most // 4, most),
            unit=unit,
            model=model,
        )

    def hash_of(name: str, phase: int) -> bool:
        # Two thirds of the limits change from one phase to the next, the others stay.
        return phase == 0 or random.Random(f"{name} {seed}").random() < 2 / 3

    return (
        drawn(f"key:k{key}", most_us=400_000, most=12),
        drawn(f"key:k{key}:tokens", most_us=20_000, most=400, unit="tokens"),
        drawn(f"customer:c{customer}", most_us=100_000, most=40),
        drawn(f"customer:c{customer}:items", most_us=40_000, most=160, unit="items"),
        drawn("model:minilm", most_us=300_000, most=20, model="minilm"),
    )


class Asker:
    """Makes the calls of one process."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._rng = random.Random(f"{load.seed} {load.worker}")
        self._keys = RedisKeys(namespace=load.namespace)
        self._script = LuaScript(variant("real"))
        self._late_s = self._rng.random() * LATE_S
        self._plans: dict[tuple[int, str, int], Plan] = {}
        self._number = 0

    def call(self) -> LuaCall:
        """One more call, of a random key."""
        load, rng = self._load, self._rng
        share = (time.monotonic() - load.began_s - self._late_s) / load.seconds
        key, model = rng.randrange(load.keys), rng.choice(MODELS)
        phase = min(PHASES - 1, max(0, int(share * PHASES)))
        plan = self._plans.get((key, model, phase))
        if plan is None:
            caller = Caller(
                customer_id=f"c{key // KEYS_OF_A_CUSTOMER}",
                key_id=f"k{key}",
                limits=limits_of(load.seed, key, phase),
                concurrency=(Concurrency(name=f"key:k{key}", most=10**6),) if key % 8 == 0 else (),
            )
            limits = [b for b in caller.limits if b.model in (None, model)]
            plan = self._plans[key, model, phase] = Plan(self._keys, caller, limits, script=self._script)
        self._number += 1
        words: tuple[str | int, ...] = (1, rng.randint(1, 8), rng.randint(1, 60))
        if plan.places:
            words += (f"{load.worker}-{self._number}", 50_000)
        start = self._script.start(plan.start.keys, plan.start.args, more=len(words) + 1)
        return start.call(*words, f"{load.worker}-{self._number}")

    async def run(self) -> dict[str, Any]:
        """Make all calls. Returns how they were answered."""
        load = self._load
        states: Counter[int] = Counter()
        slept_s = 0.0
        settings = RedisSettings(url=load.url, namespace=load.namespace)
        async with open_redis(settings, timeout_s=30.0, max_connections=2) as client:
            while self._number < load.calls:
                batch = [self.call() for _ in range(min(BATCH, load.calls - self._number))]
                for answer in await run_each(client, batch):
                    states[answer[0] if isinstance(answer, list) else -9] += 1
                ahead_s = self._number / load.calls * load.seconds - (time.monotonic() - load.began_s)
                if ahead_s > 0:  # spread over the run, so that every phase has its part
                    slept_s += ahead_s
                    await asyncio.sleep(ahead_s)
        return {"states": dict(states), "slept_s": round(slept_s, 1)}


def command(load: Load) -> list[str]:
    """How to start processes with this load."""
    return ["python", "-m", "tests.storms.limiter_load", json.dumps(asdict(load))]


def main() -> None:
    """See the module."""
    load = replace(Load(**json.loads(sys.argv[1])), began_s=time.monotonic())

    def run(worker: int) -> None:
        sys.stdout.write(json.dumps(asyncio.run(Asker(replace(load, worker=worker)).run())) + "\n")

    sys.exit(forked(load.processes, run))


if __name__ == "__main__":
    main()
