"""A process that takes places among the unfinished and keeps them: `… -m tests.storms.limiter_holder N SECONDS`."""

from __future__ import annotations

import asyncio
import sys
from datetime import datetime, timedelta, timezone
from uuid import uuid4

from api.admission.buckets import Limit
from api.admission.caller import Caller, Concurrency
from api.admission.demand import Cost, Demand
from api.limits.limiter import Limiter, RedisScript
from infra.redis import open_redis
from infra.settings import operator_settings
from schemas.ids import EPOCH
from schemas.keys import RedisKeys


def holding(most: int, *, lasts_s: float) -> Demand:
    """A request that takes one of `most` places until its deadline."""
    now = datetime.now(timezone.utc)
    return Demand(
        caller=Caller(
            customer_id="c",
            key_id="k",
            limits=(Limit(name="key:k", interval_us=1, burst=100_000),),
            concurrency=(Concurrency(name="key:k", most=most),),
        ),
        model="digits",
        cost=Cost(items=1),
        request_id=uuid4(),
        admitted_at=now,
        until=now + timedelta(seconds=lasts_s),
    )


async def main(most: int, lasts_s: float) -> None:
    """Take them, say when the last one was taken, and wait to be killed."""
    settings = operator_settings()
    async with open_redis(settings.redis, timeout_s=5.0) as client:
        limiter = Limiter(RedisScript(client, within_s=5.0), RedisKeys(namespace=settings.redis.namespace))
        for _ in range(most):
            charge = await limiter.take(holding(most, lasts_s=lasts_s))
        sys.stdout.write(f"held {(charge.at - EPOCH) // timedelta(microseconds=1)}\n")
        sys.stdout.flush()
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))
