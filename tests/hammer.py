"""One process that asks for one bucket as fast as it can: `python -m tests.hammer VARIANT RATE BURST SECONDS`.

Prints one JSON array: the times, on Redis' clock, of the calls it was admitted. The variants are the limiter itself and
what it would be with one of its mechanisms removed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from api.admission.buckets import Limit, limit
from api.admission.limits import script_call
from infra.redis import LuaScript, Redis, lua, open_redis
from infra.settings import operator_settings
from schemas.keys import RedisKeys

CLOCK = "local now = time[1] * 1000000 + time[2]\nlocal count"


def changed(source: str, old: str, new: str) -> str:
    """The script with one passage replaced; the passage must be there, or the variant proves nothing."""
    assert old in source
    return source.replace(old, new)


def client_clock(source: str) -> str:
    """`now` is what the caller says (one argument more), as a limiter without TIME would have it."""
    asked = "local said = tonumber(ARGV[#ARGV])\nlocal now = said\nlocal count"
    source = changed(source, CLOCK, asked)
    return changed(source, "local answer = {state, now,", "local answer = {state, time[1] * 1000000 + time[2],")


def only_check(source: str) -> str:
    """The first half of check-then-set: decides, and writes nothing."""
    at = source.index("    redis.call('SET'")
    return source[:at] + source[source.index("\n", at) :]


async def hammer(variant: str, bucket: Limit, seconds: float) -> list[int]:
    """Times of admission."""
    settings = operator_settings()
    keys = RedisKeys(namespace=settings.redis.namespace)
    names, args = script_call(keys, "c", "k", (bucket,))
    source = lua("api.admission", "limits").source
    # Clocks of different machines differ; here every other one is half a second ahead.
    skew_us = 500_000 * (os.getpid() % 2)
    admitted: list[int] = []
    async with open_redis(settings.redis, timeout_s=5.0, max_connections=2) as client:
        take: Callable[[], Any]
        if variant == "client_clock":
            script = LuaScript(client_clock(source))
            take = lambda: script(client, names, [*args, time.time_ns() // 1000 + skew_us])  # noqa: E731
        elif variant == "check_then_set":
            check = LuaScript(only_check(source))
            take = lambda: check_then_set(client, check, names, args, bucket)  # noqa: E731
        else:
            script = LuaScript(source)
            take = lambda: script(client, names, args)  # noqa: E731
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            answer = await take()
            if answer[0] == 1:
                admitted.append(answer[1])
    return admitted


async def check_then_set(client: Redis, check: LuaScript, names: list[str], args: list[Any], bucket: Limit) -> Any:
    """Two calls: what was free at the first may be gone at the second."""
    answer = await check(client, names, args)
    if answer[0] == 1:
        stored = int(await client.get(names[0]) or 0)
        await client.set(names[0], max(stored, answer[1]) + bucket.interval_us, px=60_000)
    return answer


def main() -> None:
    """See the module."""
    variant, requests_per_s, burst, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    bucket = limit("key:k", requests_per_s=requests_per_s, burst=burst)
    if variant == "floor_interval":
        bucket = Limit(name=bucket.name, interval_us=1_000_000 // requests_per_s, burst=burst)
    sys.stdout.write(json.dumps(asyncio.run(hammer(variant, bucket, seconds))) + "\n")


if __name__ == "__main__":
    main()
