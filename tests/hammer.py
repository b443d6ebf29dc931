"""Processes that ask for one bucket as fast as they can: `python -m tests.hammer N VARIANT RATE BURST SECONDS`.

What is admitted is logged inside the script, by Redis' clock (`admitted`). The variants are the limiter itself and what
it would be with one of its mechanisms removed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

from api.admission.buckets import Limit, limit
from api.admission.caller import Caller
from api.limits.plans import Plan
from infra.redis import LuaScript, Redis, RedisError, lua, open_redis, run_each
from infra.settings import operator_settings
from schemas.keys import RedisKeys
from tests.storms.forks import forked

BATCH = 8
CLOCK = "local now = time[1] * 1000000 + time[2]\n"
#: Where the script logs what it admits; only scripts of tests do.
ADMITTED = ":admitted"


def changed(source: str, old: str, new: str) -> str:
    """The script with one passage replaced; the passage must be there, or the variant proves nothing."""
    assert old in source, old
    return source.replace(old, new)


def logged(source: str) -> str:
    """The script that logs each admission: the moment, the call's own words, then each bucket with its limit."""
    clock = "real" if "local real =" in source else "now"
    note = f"""
local note = {{string.format('%.17g', {clock}), ARGV[#ARGV]}}
for i = 1, count do
  note[i + 2] = KEYS[i + 1] .. ' ' .. cost[i] .. ' ' .. ARGV[3 * i + 2] .. ' ' .. ARGV[3 * i + 3]
end
redis.call('RPUSH', KEYS[1] .. ':admitted', table.concat(note, '|'))
"""
    assert source.endswith("return answer\n")
    return source[: -len("return answer\n")] + note + "return answer\n"


def client_clock(source: str) -> str:
    """`now` is what the caller says (one argument more), as a limiter without TIME would have it."""
    return changed(source, CLOCK, "local real = time[1] * 1000000 + time[2]\nlocal now = tonumber(ARGV[#ARGV])\n")


def fourteen_digits(source: str) -> str:
    """Numbers are stored as tostring() writes them."""
    source = changed(source, "'^(%d+) (%d+) (%d+)$'", "'^(%S+) (%S+) (%S+)$'")
    stored = "string.format('%.17g %.17g %.17g', now + after, interval, now)"
    return changed(source, stored, "tostring(now + after) .. ' ' .. tostring(interval) .. ' ' .. tostring(now)")


def only_check(source: str) -> str:
    """The first half of check-then-set: decides, and writes nothing."""
    at = source.index("  redis.call('SET', KEYS[i + 1]")
    return source[:at] + source[source.index("\n  answer[", at) :]


TWO_WINDOWS = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local interval, burst = tonumber(ARGV[5]), tonumber(ARGV[6])
local count, cost = 1, {1}
local window = interval * burst
local key = KEYS[2] .. ':' .. math.floor(now / window)
if tonumber(redis.call('GET', key) or '0') >= burst then return {0, now, 0, 0, 0} end
redis.call('INCR', key)
redis.call('PEXPIRE', key, math.ceil(window / 1000) * 2 + 1)
local answer = {1, now, 0, 0, 0}
return answer
"""


def variant(name: str) -> str:
    """The source of a variant, logging what it admits."""
    source = lua("api.limits", "limits").source
    changes: dict[str, Callable[[str], str]] = {
        "client_clock": client_clock,
        "fourteen_digits": fourteen_digits,
        "check_then_set": only_check,
        "two_windows": lambda _: TWO_WINDOWS,
    }
    return logged(changes.get(name, lambda same: same)(source))


def plan_of(keys: RedisKeys, bucket: Limit, script: LuaScript | None = None) -> Plan:
    """One key with one bucket."""
    caller = Caller(customer_id="c", key_id="k", limits=(bucket,))
    return Plan(keys, caller, caller.limits, script=script or lua("api.limits", "limits"))


async def admitted(client: Redis, keys: RedisKeys, customer_id: str = "c") -> list[tuple[int, str, list[list[str]]]]:
    """What was logged: when, the call's last word, and per bucket its key, cost, interval and burst."""
    found = []
    for line in await client.lrange(keys.revoked_keys(customer_id) + ADMITTED, 0, -1):  # type: ignore[misc]
        at, word, *buckets = line.decode().split("|")
        found.append((int(at), word, [b.rsplit(" ", 3) for b in buckets]))
    return found


async def hammer(name: str, bucket: Limit, seconds: float) -> None:
    """Ask until the time is over."""
    settings = operator_settings()
    keys = RedisKeys(namespace=settings.redis.namespace)
    script = LuaScript(variant(name))
    plan = plan_of(keys, bucket, script)
    start = script.start(plan.start.keys, plan.start.args, more=4)
    # Clocks of different machines differ; here every other one is half a second ahead.
    skew_us = 500_000 * (os.getpid() % 2)
    ends = time.monotonic() + seconds
    timeout_s = 0.002 if name == "retry_on_timeout" else 5.0
    async with open_redis(settings.redis, timeout_s=timeout_s, max_connections=4) as client:
        while time.monotonic() < ends:
            told = [time.time_ns() // 1000 + skew_us] if name == "client_clock" else [uuid4().hex]
            calls = [start.call(1, 1, 0, *told) for _ in range(BATCH)]
            if name == "check_then_set":
                await check_then_set(client, calls, keys.bucket("c", bucket.name), bucket)
            elif name == "retry_on_timeout":
                await until_answered(lambda calls=calls[:1]: run_each(client, calls))
            else:
                await run_each(client, calls)


async def until_answered(ask: Callable[[], Awaitable[Any]]) -> None:
    """What a client does that takes no answer for no effect."""
    for _ in range(20):
        try:
            await ask()
        except (RedisError, OSError):
            continue
        return


async def check_then_set(client: Redis, calls: list[Any], key: str, bucket: Limit) -> None:
    """Two calls: what was free at the first may be gone at the second."""
    for answer in await run_each(client, calls[:1]):
        if answer[0] == 1:
            stored = int((await client.get(key) or b"0").split()[0])
            full = max(stored, answer[1]) + bucket.interval_us
            await client.set(key, f"{full} {bucket.interval_us} {answer[1]}", px=60_000)


def bucket_of(name: str, requests_per_s: int, burst: int) -> Limit:
    """The bucket that a variant is tried on."""
    bucket = limit("key:k", requests_per_s=requests_per_s, burst=burst)
    if name == "floor_interval":
        return Limit(name=bucket.name, interval_us=1_000_000 // requests_per_s, burst=burst)
    return bucket


def main() -> None:
    """See the module."""
    number, name, requests_per_s, burst = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    bucket, seconds = bucket_of(name, requests_per_s, burst), float(sys.argv[5])
    sys.exit(forked(number, lambda _: asyncio.run(hammer(name, bucket, seconds))))


if __name__ == "__main__":
    main()
