"""A key never exceeds its rate: the Lua script on a real server against an integer model and an exact judge."""

from __future__ import annotations

import asyncio
import json
import random
from datetime import datetime, timezone
from typing import Any

import pytest

from api.admission.buckets import limit
from api.admission.limits import Limiter, RedisScript
from api.errors import RateLimited, Unauthorized
from infra.postgres import connect, queries
from infra.redis import LuaScript, lua, open_redis
from infra.settings import operator_settings
from schemas.keys import RedisKeys
from tests.conditions import eventually
from tests.fakes import demand
from tests.gcra import Bucket, Model, excess_us
from tests.integration.api_desk import customer, open_desk, run

PROCESSES = 8


def call_of(keys: RedisKeys, buckets: list[Bucket]) -> tuple[list[str], list[str | int]]:
    names = [*(keys.bucket("c", b.name) for b in buckets), keys.revoked_keys("c")]
    args: list[str | int] = ["k"]
    for b in buckets:
        args += [b.interval_us, b.burst, b.cost]
    return names, args


@pytest.mark.parametrize("seed", range(12))
async def test_the_script_decides_as_the_model_does(env: dict[str, str], seed: int) -> None:
    """Random costs and buckets, changing limits, keys that expire meanwhile: equal to the microsecond."""
    rng, model = random.Random(seed), Model()
    settings = operator_settings(env)
    keys, script = RedisKeys(namespace=settings.redis.namespace), lua("api.admission", "limits")
    longest_us = rng.choice([200, 5_000, 2_000_000])
    async with open_redis(settings.redis) as redis:
        for step in range(150):
            buckets = []
            for name in rng.sample("abcd", rng.randint(1, 4)):
                burst = rng.randint(1, 12)
                buckets.append(Bucket(name, rng.randint(1, longest_us), burst, rng.randint(1, burst)))
            names, args = call_of(keys, buckets)
            answer = await script(redis, names, args)
            assert answer == model.take(buckets, answer[1]), f"step {step}: {buckets}"
            if answer[0] == 1:
                for b, name, reset_us in zip(buckets, names, answer[4::2], strict=False):
                    stored = await redis.get(name)
                    assert stored is None or int(stored) == model.arrival_us[b.name]
                    assert await redis.pttl(name) <= -(-reset_us // 1000) + 1


async def test_calls_that_share_a_round_trip_are_decided_one_by_one(env: dict[str, str]) -> None:
    settings = operator_settings(env)
    limits = (limit("key:k", requests_per_s=1, burst=5), limit("customer:c", requests_per_s=1, burst=100))
    async with open_redis(settings.redis, timeout_s=5.0) as redis:
        limiter = Limiter(RedisScript(redis), RedisKeys(namespace=settings.redis.namespace))
        calls = await asyncio.gather(
            *(limiter.take(demand("c", "k", limits)) for _ in range(40)), return_exceptions=True
        )
    taken = [c for c in calls if not isinstance(c, BaseException)]
    assert [c.buckets[0].remaining for c in taken] == [4, 3, 2, 1, 0]
    assert all(isinstance(c, RateLimited) for c in calls if isinstance(c, BaseException))
    # What the key's bucket refused did not touch the customer's.
    assert taken[-1].buckets[1].remaining == 95


async def test_a_server_that_forgot_the_script_is_told_it_again(env: dict[str, str]) -> None:
    settings = operator_settings(env)
    limits = (limit("key:k", requests_per_s=1, burst=50),)
    async with open_redis(settings.redis, timeout_s=5.0) as redis:
        limiter = Limiter(RedisScript(redis), RedisKeys(namespace=settings.redis.namespace))
        for _ in range(3):
            await redis.script_flush()
            await asyncio.gather(*(limiter.take(demand("c", "k", limits)) for _ in range(10)))


async def test_the_revoked_set_is_read_in_the_same_call(env: dict[str, str]) -> None:
    settings = operator_settings(env)
    keys, limits = RedisKeys(namespace=settings.redis.namespace), (limit("key:k", requests_per_s=1, burst=5),)
    async with open_redis(settings.redis, timeout_s=5.0) as redis:
        limiter = Limiter(RedisScript(redis), keys)
        await limiter.take(demand("c", "k", limits))
        before = await redis.get(keys.bucket("c", "key:k"))
        await redis.sadd(keys.revoked_keys("c"), "k")
        with pytest.raises(Unauthorized, match="revoked"):
            await limiter.take(demand("c", "k", limits))
        assert await redis.get(keys.bucket("c", "key:k")) == before


async def hammered(env: dict[str, str], spawn: Any, variant: str, rate: int, burst: int, seconds: float) -> list[int]:
    """When eight processes at once were admitted, on Redis' clock."""
    command = ["python", "-m", "tests.hammer", variant, str(rate), str(burst), str(seconds)]
    running = [spawn(command, env, name=f"hammer-{variant}") for _ in range(PROCESSES)]
    for process in running:
        assert await asyncio.to_thread(process.wait, 60) == 0, process.tail()
    admitted: list[int] = []
    for process in running:
        admitted += json.loads(process.log.read_text().splitlines()[-1])
    return admitted


@pytest.mark.parametrize(("rate", "burst"), [(3_000, 5), (100, 20), (7, 3)])
async def test_eight_processes_never_exceed_a_keys_rate(env: dict[str, str], spawn: Any, rate: int, burst: int) -> None:
    admitted = await hammered(env, spawn, "real", rate, burst, 2.0)
    interval_us = limit("key:k", requests_per_s=rate, burst=burst).interval_us
    assert excess_us(admitted, interval_us=interval_us, burst=burst) <= 0
    assert len(admitted) > burst, "nothing was admitted after the first burst, so nothing was shown"


@pytest.mark.parametrize(
    ("variant", "rate", "burst"),
    [("client_clock", 100, 20), ("check_then_set", 3_000, 5), ("floor_interval", 700, 5)],
)
async def test_without_one_mechanism_the_rate_is_exceeded_and_the_judge_sees_it(
    env: dict[str, str], spawn: Any, variant: str, rate: int, burst: int
) -> None:
    admitted = await hammered(env, spawn, variant, rate, burst, 3.0)
    interval_us = limit("key:k", requests_per_s=rate, burst=burst).interval_us
    assert excess_us(admitted, interval_us=interval_us, burst=burst) > 0


async def test_numbers_stored_with_fourteen_digits_break_the_bound(env: dict[str, str]) -> None:
    """Why the script formats what it stores: the same script with tostring() drifts from the model."""
    settings, model = operator_settings(env), Model()
    source = lua("api.admission", "limits").source.replace("string.format('%.17g', after[i])", "tostring(after[i])")
    script, bucket = LuaScript(source), Bucket("a", 1_000_003, 1_000)
    names, args = call_of(RedisKeys(namespace=settings.redis.namespace), [bucket])
    async with open_redis(settings.redis) as redis:
        answers = [await script(redis, names, args) for _ in range(50)]
    assert any(answer != model.take([bucket], answer[1]) for answer in answers)


async def test_a_limited_caller_is_told_when_to_come_back_and_then_served(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env) as desk:
        slow = desk.caller.with_key(customer(env, "Slow", requests_per_s=2, burst=3)["key"])
        replies = [await slow.infer() for _ in range(3)]
        assert {r.status for r in replies} == {200}
        calls = await asyncio.gather(*(slow.infer() for _ in range(5)))
        refused = next(r for r in calls if r.status == 429)
        assert "the key's limit of 3 requests" in refused.json["error"]
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.headers["RateLimit"].startswith('"key";r=0')
        assert '"customer";q=3' in refused.headers["RateLimit-Policy"]
        await asyncio.sleep(int(refused.headers["Retry-After"]))
        assert (await slow.infer()).status == 200
        # Other customers never notice.
        assert (await desk.caller.infer()).status == 200


async def test_a_keys_limit_narrows_its_customers(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env) as desk:
        wide = customer(env, "Wide", requests_per_s=1, burst=4)
        narrow = run(env, "keys", "create", "Wide", "--requests-per-s", "1", "--burst", "1", "--json")
        first, second = desk.caller.with_key(narrow["key"]), desk.caller.with_key(wide["key"])
        refused = [r for r in await asyncio.gather(*(first.infer() for _ in range(10))) if r.status == 429]
        assert any("the key's limit of 1 requests" in r.json["error"] for r in refused)
        refused = [r for r in await asyncio.gather(*(second.infer() for _ in range(20))) if r.status == 429]
        assert any("limit of 4 requests" in r.json["error"] for r in refused)


async def test_a_revoked_key_is_refused_at_the_next_call(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env) as desk:
        assert (await desk.caller.infer()).status == 200
        done = run(env, "keys", "revoke", desk.acme["key_id"], "--json")
        assert done["customer_id"] == desk.acme["customer_id"]
        reply = await desk.caller.infer()
        assert reply.status == 401
        assert "revoked" in reply.json["error"]
        embeddings = await desk.caller.call("POST", "/v1/embeddings", {"model": "texts", "input": "x"})
        assert embeddings.status == 401
        assert embeddings.json["error"]["code"] == "revoked_api_key"
        assert run(env, "keys", "revoke", desk.acme["key_id"], "--json")["revoked_at"] == done["revoked_at"]


async def test_without_the_revoked_set_a_revoked_key_would_go_on(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env) as desk:
        assert (await desk.caller.infer()).status == 200
        connection = await connect(operator_settings(env).postgres)
        await connection.execute(queries("api")["revoke_key"], desk.acme["key_id"], datetime.now(timezone.utc))
        await connection.close()
        assert (await desk.caller.infer()).status == 200  # still remembered from the look-up before

        async def refused() -> bool:
            return (await desk.caller.infer()).status == 401

        await eventually(refused, what="the look-up that ends it")
