"""Limiters of several gateways, asked for a few keys without pause: `python -m tests.storms.limiter_gateway JSON`.

Writes a line of JSON per admission: bucket, the moment in microseconds, who decided, and the limit it was held to. It
is the product's own limiter with breaker and share, on a Redis that goes away and comes back.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TextIO
from uuid import uuid4

from api.admission.buckets import Limit
from api.admission.caller import Caller
from api.admission.demand import Cost, Demand
from api.errors import ApiError
from api.limits.limiter import TIMEOUT_S, Charge, Limiter, RedisScript
from infra.redis import open_redis
from infra.settings import RedisSettings
from schemas.ids import EPOCH
from schemas.keys import RedisKeys
from tests.storms.forks import forked

ASKERS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is to be done; gateway n writes into `<out>-<n>`."""

    out: str

    url: str
    namespace: str
    gateways: int
    seconds: float
    keys: int


def limits_of(key: int) -> tuple[Limit, ...]:
    """Slow and fast buckets; a share of the last one's key holds nothing."""
    interval_us, burst = [(20_000, 40), (5_000, 200), (100_000, 8), (2_000, 500), (250_000, 3)][key % 5]
    return (
        Limit(name=f"key:k{key}", interval_us=interval_us, burst=burst),
        Limit(name=f"customer:c{key}", interval_us=interval_us * 2, burst=burst * 2),
        Limit(name=f"customer:c{key}:items", interval_us=interval_us // 2, burst=burst * 6, unit="items"),
    )


def demand(key: int, items: int) -> Demand:
    """One call of a key."""
    now = datetime.now(timezone.utc)
    return Demand(
        caller=CALLERS[key],
        model="digits",
        cost=Cost(items=items),
        request_id=uuid4(),
        admitted_at=now,
        until=now + timedelta(seconds=5),
    )


CALLERS = {k: Caller(customer_id=f"c{k}", key_id=f"k{k}", limits=limits_of(k)) for k in range(100)}


async def run(part: Part, out: TextIO) -> None:
    """Ask until the time is over, and say how long the longest answer took."""
    settings = RedisSettings(url=part.url, namespace=part.namespace)
    longest_s, ends = 0.0, time.monotonic() + part.seconds
    async with open_redis(settings, timeout_s=2 * TIMEOUT_S, max_connections=4) as client:
        limiter = Limiter(RedisScript(client), RedisKeys(namespace=part.namespace), replicas=part.gateways)
        mending = asyncio.ensure_future(limiter.run())

        async def ask(key: int) -> None:
            nonlocal longest_s
            items = 0
            while time.monotonic() < ends:
                items = items % 3 + 1
                began_s = time.monotonic()
                try:
                    charge = await limiter.take(demand(key, items))
                    out.write(line(key, charge))
                except ApiError:
                    await asyncio.sleep(0.001)
                longest_s = max(longest_s, time.monotonic() - began_s)
                await asyncio.sleep(0)

        await asyncio.gather(*(ask(n % part.keys) for n in range(part.keys * ASKERS)))
        mending.cancel()
        with suppress(asyncio.CancelledError):
            await mending
        out.write(json.dumps({"longest_ms": round(longest_s * 1000), **limiter.counts}) + "\n")


def line(key: int, charge: Charge) -> str:
    """An admission as a line."""
    at_us = (charge.at - EPOCH) // timedelta(microseconds=1)
    buckets = [[b.bucket, b.interval_us, b.burst, b.cost, b.remaining, b.shares] for b in charge.buckets]
    return json.dumps({"key": key, "at": at_us, "mode": charge.mode.value, "buckets": buckets}) + "\n"


def command(part: Part) -> list[str]:
    """How to start processes with this part."""
    return ["python", "-m", "tests.storms.limiter_gateway", json.dumps(asdict(part))]


def main() -> None:
    """See the module."""
    logging.disable()  # that Redis is away is no news here
    part = Part(**json.loads(sys.argv[1]))

    def gateway(number: int) -> None:
        with Path(f"{part.out}-{number}").open("w") as out:
            asyncio.run(run(part, out))

    sys.exit(forked(part.gateways, gateway))


if __name__ == "__main__":
    main()
