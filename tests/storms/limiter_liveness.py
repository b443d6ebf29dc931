"""What a limiter owes its callers: who keeps the pace is never refused, who comes back when told to is admitted."""

from __future__ import annotations

import asyncio
import random
import time

from api.admission.buckets import Limit
from infra.redis import LuaScript, Redis, run_each
from schemas.keys import RedisKeys
from tests.hammer import changed, plan_of, variant

BATCH = 64


async def keeps_pace(client: Redis, calls: int, *, seed: int) -> tuple[int, int]:
    """Calls exactly one interval apart, on a clock that is told: how many, and how many were refused."""
    rng, keys = random.Random(seed), RedisKeys(namespace="live")
    script = LuaScript(variant("client_clock"))
    made = refused = 0
    for key in range(8):
        bucket = Limit(name=f"key:{key}", interval_us=rng.randint(1, 200_000), burst=rng.choice([1, 1, 5]))
        plan = plan_of(keys, bucket, script)
        start = script.start(plan.start.keys, plan.start.args, more=4)
        now_us = time.time_ns() // 1000
        for _ in range(-(-calls // 8 // BATCH)):
            batch = []
            for _ in range(BATCH):
                batch.append(start.call(1, 1, 0, now_us))
                now_us += bucket.interval_us
            answers = await run_each(client, batch)
            made += len(answers)
            refused += sum(not isinstance(a, list) or a[0] != 1 for a in answers)
    return made, refused


async def returns_when_told(client: Redis, calls: int, *, seed: int) -> tuple[int, int]:
    """Refused callers that wait as long as they are told: how many, and how many were refused again."""
    rng, keys = random.Random(seed), RedisKeys(namespace="live")
    # The script itself says whether a call came early, so that nobody's timing matters.
    source = changed(
        variant("real"),
        "if retry_after > 0 then\n",
        "local early = now < tonumber(ARGV[#ARGV])\nif early then return {7, now} end\nif retry_after > 0 then\n",
    )
    script = LuaScript(source)
    told = again = 0
    for key in range(max(1, min(20, calls // 10))):
        interval_us, burst = rng.randint(100, 4_000), rng.randint(1, 6)
        plan = plan_of(keys, Limit(name=f"key:told{key}", interval_us=interval_us, burst=burst), script)
        start = script.start(plan.start.keys, plan.start.args, more=4)
        not_before_us = 0
        for _ in range(10):
            while True:
                answer = (await run_each(client, [start.call(1, 1, 0, not_before_us)]))[0]
                if answer[0] != 7:
                    break
                await asyncio.sleep(0)
            if not_before_us:
                told += 1
                again += answer[0] != 1
            while answer[0] == 1:
                # In one round trip: one alone may take longer than the bucket needs for a unit, and none be refused.
                # The last one counts: after a refusal in between another call may have been let through.
                answer = (await run_each(client, [start.call(1, 1, 0, 0)] * (burst + 8)))[-1]
            not_before_us = answer[1] + answer[2]
    return told, again
