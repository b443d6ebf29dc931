"""What goes wrong with Redis while gateways ask it: killed, flushed, frozen, made to forget its scripts."""

from __future__ import annotations

import asyncio
import random
import time

from infra.redis import Redis, open_redis
from infra.settings import RedisSettings
from tests.storms.limiter_store import Store

FAULTS = ("cut", "flush", "freeze", "script flush")
#: Gateways are back at the shared buckets so long after a fault has ended, on a busy machine, too.
BACK_WITHIN_US = 4_000_000


async def endure(store: Store, seconds: float, *, seed: int) -> tuple[list[tuple[str, tuple[int, int]]], int]:
    """Faults: first a cut, then each kind once in every four, the first of its kind for long.

    Returns the losses, each with its begin and the time by which everybody is back (microseconds since 1970), and how
    often scripts were forgotten, which loses nothing.
    """
    rng = random.Random(f"{seed} weather")
    losses: list[tuple[str, tuple[int, int]]] = []
    forgotten, kinds = 0, ["cut"]  # so that the shortest storm has one
    ends = time.monotonic() + seconds
    await asyncio.sleep(min(2.0, seconds / 4))
    while time.monotonic() < ends:
        kinds = kinds or list(FAULTS)
        kind = kinds.pop(rng.randrange(len(kinds)))
        pause_s = rng.choice([0.03, 0.2, 1.5]) if kind in [of for of, _ in losses] else 1.5
        began_us = time.time_ns() // 1000
        if kind == "cut":
            await asyncio.to_thread(store.kill)
            await asyncio.sleep(pause_s)
            await asyncio.to_thread(store.start)
        elif kind == "freeze":
            store.freeze()
            await asyncio.sleep(pause_s)
            store.wake()
        else:
            async with open_redis(RedisSettings(url=store.url, namespace=""), timeout_s=5.0) as client:
                await (client.flushall() if kind == "flush" else _forget_scripts(client, pause_s))
        if kind == "script flush":
            forgotten += 1
        else:
            losses.append((kind, (began_us, time.time_ns() // 1000 + BACK_WITHIN_US)))
        await asyncio.sleep(rng.uniform(0.1, 2.5))
    return losses, forgotten


async def _forget_scripts(client: Redis, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        await client.script_flush()


async def stutter(store: Store) -> None:
    """Answers come late again and again, for ever."""
    while True:
        store.freeze()
        await asyncio.sleep(0.02)
        store.wake()
        await asyncio.sleep(0.1)
