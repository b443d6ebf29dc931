"""A key never exceeds its rate: the Lua script on a real server against an integer model and an exact judge."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from api.admission.buckets import Limit, limit
from api.admission.caller import Concurrency
from api.errors import RateLimited, Unauthorized
from api.limits.limiter import Limiter, RedisScript
from infra.redis import LuaScript, Redis, lua, open_redis
from infra.settings import operator_settings
from schemas.keys import RedisKeys
from schemas.records import LimiterMode
from tests.conditions import eventually
from tests.conftest import run_apart
from tests.fakes import demand
from tests.gcra import Bucket, Model, Money
from tests.integration.api_desk import customer, open_desk, run
from tests.storms.ground import drawn
from tests.storms.limiter import MUTANTS, prove
from tests.storms.limiter_holder import holding

PLACES = {"key:k": 3, "customer:c": 5}
#: The script on a clock that a test sets, and with keys that stay: what expires by real time has a test of its own.
INJECTED = (
    lua("api.limits", "limits")
    .source.replace("local time = redis.call('TIME')", "local time = {0, redis.call('GET', KEYS[1] .. ':clock')}")
    .replace("'PX', math.ceil(after / 1000) + 1", "'KEEPTTL'")
    .replace("redis.call('PEXPIRE', key, ttl)", "redis.call('PERSIST', key)")
)


def call_of(
    keys: RedisKeys,
    buckets: list[Bucket],
    *,
    places: dict[str, int] | None = None,
    request: str = "r",
    lasts_us: int = 0,
    money: Money | None = None,
) -> tuple[list[str], list[str | int]]:
    """Keys and arguments as the script's own page says, without the code that makes them for the gateway."""
    places = places or {}
    names = [keys.revoked_keys("c"), *(keys.bucket("c", b.name) for b in buckets)]
    names += [keys.places("c", name) for name in places]
    args: list[str | int] = ["k", len(buckets), len(places), int(money is not None)]
    # Each of up to three buckets counts a unit of its own, so that every cost may differ.
    for unit, b in enumerate(buckets, start=1):
        args += [b.interval_us, b.burst, unit]
    args += [*places.values(), *([b.cost for b in buckets] + [0, 0, 0])[:3]]
    if places:
        args += [request, lasts_us]
    if money is not None:
        names.append(keys.money("c"))
        args += [money.left, money.settled_s, money.second, money.cost]
    return names, args


@pytest.mark.parametrize("seed", range(6))
async def test_the_script_decides_as_the_model_does(env: dict[str, str], seed: int) -> None:
    """Random costs and buckets, changing limits, keys that expire meanwhile: equal to the microsecond."""
    rng, model = random.Random(seed), Model()
    settings = operator_settings(env)
    keys, script = RedisKeys(namespace=settings.redis.namespace), lua("api.limits", "limits")
    longest_us = rng.choice([200, 5_000, 2_000_000])
    async with open_redis(settings.redis) as redis:
        for step in range(150):
            buckets = []
            for name in rng.sample("abcd", rng.randint(1, 3)):
                burst = rng.randint(1, 12)
                buckets.append(Bucket(name, rng.randint(1, longest_us), burst, rng.randint(1, burst)))
            names, args = call_of(keys, buckets)
            answer = await script(redis, names, args)
            forget_the_full(model, answer[1])
            assert answer == model.take(buckets, answer[1]), f"step {step}: {buckets}"
            if answer[0] == 1:
                for b, name, reset_us in zip(buckets, names[1:], answer[4::2], strict=True):
                    stored = await redis.get(name)
                    assert stored is None or tuple(map(int, stored.split())) == model.arrival_us[b.name]
                    assert await redis.pttl(name) <= -(-reset_us // 1000) + 1


def forget_the_full(model: Model, now_us: int) -> None:
    """A key may be gone once its bucket is full; whether it is makes no difference."""
    model.arrival_us = {name: kept for name, kept in model.arrival_us.items() if kept[0] > now_us}


MOMENTS = st.integers(0, 3_000_000)
MONEY = st.builds(Money, st.integers(0, 300), st.integers(-4, 90), st.integers(0, 90), st.integers(0, 90))
CALLS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 400), MOMENTS, st.just(200_000_000)),
        st.lists(
            st.tuples(st.sampled_from("abc"), st.integers(1, 300), st.integers(1, 12), st.integers(1, 12)),
            max_size=3,
            unique_by=lambda b: b[0],
        ),
        st.sampled_from([(), ("key:k",), ("key:k", "customer:c")]),
        st.integers(0, 6),
        st.integers(1, 4_000_000),
        st.one_of(st.none(), MONEY),
    ),
    max_size=30,
)


async def test_everything_at_once_is_decided_as_the_model_does(env: dict[str, str]) -> None:
    """Buckets whose limits change, places that expire and are asked for twice, money and what is known of it, on a
    clock that is set; what is stored afterwards is the same, too."""
    settings = operator_settings(env)
    keys, script = RedisKeys(namespace=settings.redis.namespace), LuaScript(INJECTED)
    assert INJECTED.count("TIME") == INJECTED.count("PX'") == INJECTED.count("PEXPIRE") == 0

    async def play(calls: list[Any]) -> None:
        model, now_us = Model(), 1_780_000_000_000_000
        async with open_redis(settings.redis) as redis:
            await redis.delete(*call_of(keys, [Bucket(n, 1, 1) for n in "abc"], places=PLACES, money=NOTHING)[0])
            for step_us, wanted, places, request, lasts_us, money in calls:
                now_us += step_us
                buckets = [Bucket(name, t, b, min(cost, b)) for name, t, b, cost in wanted]
                asked: dict[str, Any] = {
                    "places": {name: PLACES[name] for name in places},
                    "request": str(request),
                    "lasts_us": lasts_us,
                    "money": money
                    and replace(
                        money, settled_s=now_us // 10**6 + money.settled_s - 60, second=now_us // 10**6 - money.second
                    ),
                }
                names, args = call_of(keys, buckets, **asked)
                await redis.set(names[0] + ":clock", now_us)
                assert await script(redis, names, args) == model.take(buckets, now_us, **asked)
            for name, kept in model.arrival_us.items():
                assert tuple(map(int, (await redis.get(keys.bucket("c", name)) or b"").split())) == kept
            for name, held in model.places.items():
                stored = {
                    r.decode(): int(s) for r, s in await redis.zrange(keys.places("c", name), 0, -1, withscores=True)
                }
                assert {r: at for r, at in stored.items() if at > now_us} == {
                    r: at for r, at in held.items() if at > now_us
                }
            stored = {k.decode(): int(v) for k, v in (await redis.hgetall(keys.money("c"))).items() if k != b"run"}
            assert stored.pop("since", None) == model.since_s
            assert stored == {str(second): amount for second, amount in model.reserved.items()}

    @settings_of_hypothesis(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(CALLS)
    def check(calls: list[Any]) -> None:
        run_apart(play(calls))

    await asyncio.to_thread(check)


NOTHING = Money(0, 0, 0, 0)


async def test_calls_that_share_a_round_trip_are_decided_one_by_one(env: dict[str, str]) -> None:
    settings = operator_settings(env)
    limits = (limit("key:k", requests_per_s=1, burst=5), limit("customer:c", requests_per_s=1, burst=100))
    async with open_redis(settings.redis, timeout_s=5.0) as redis:
        limiter = Limiter(RedisScript(redis, within_s=5.0), RedisKeys(namespace=settings.redis.namespace))
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
        limiter = Limiter(RedisScript(redis, within_s=5.0), RedisKeys(namespace=settings.redis.namespace))
        for _ in range(3):
            await redis.script_flush()
            charges = await asyncio.gather(*(limiter.take(demand("c", "k", limits)) for _ in range(10)))
            assert {c.mode for c in charges} == {LimiterMode.SHARED}
    assert charges[-1].buckets[0].remaining == 20, "each call was charged once"


async def test_the_revoked_set_is_read_in_the_same_call(env: dict[str, str]) -> None:
    settings = operator_settings(env)
    keys, limits = RedisKeys(namespace=settings.redis.namespace), (limit("key:k", requests_per_s=1, burst=5),)
    async with open_redis(settings.redis, timeout_s=5.0) as redis:
        limiter = Limiter(RedisScript(redis, within_s=5.0), keys)
        await limiter.take(demand("c", "k", limits))
        before = await redis.get(keys.bucket("c", "key:k"))
        await redis.sadd(keys.revoked_keys("c"), "k")
        with pytest.raises(Unauthorized, match="revoked"):
            await limiter.take(demand("c", "k", limits))
        assert await redis.get(keys.bucket("c", "key:k")) == before


async def test_a_bucket_that_an_earlier_release_wrote_is_gone_on_with(env: dict[str, str]) -> None:
    settings = operator_settings(env)
    async with open_redis(settings.redis, timeout_s=5.0) as redis:
        keys = RedisKeys(namespace=settings.redis.namespace)
        seconds, us = await redis.time()
        full_at_us = seconds * 1_000_000 + us + 3 * 3_600_000_000  # three of four units are used, for hours
        await redis.set(keys.bucket("c", "key:k"), str(full_at_us))
        limits = (Limit(name="key:k", interval_us=3_600_000_000, burst=4),)
        limiter = Limiter(RedisScript(redis, within_s=20), keys)
        assert (await limiter.take(demand("c", "k", limits))).buckets[0].remaining == 0
        with pytest.raises(RateLimited):
            await limiter.take(demand("c", "k", limits))


async def test_what_was_decided_without_redis_is_entered_in_a_bucket_that_an_earlier_release_wrote(
    env: dict[str, str],
) -> None:
    settings = operator_settings(env)
    async with open_redis(settings.redis, timeout_s=5.0) as redis:
        keys = RedisKeys(namespace=settings.redis.namespace)
        bucket = Limit(name="key:k", interval_us=3_600_000_000, burst=5)
        seconds, us = await redis.time()
        full_at_us = seconds * 1_000_000 + us + 3 * bucket.interval_us
        await redis.set(keys.bucket("c", "key:k"), str(full_at_us))
        await lua("api.limits", "settle")(redis, [keys.bucket("c", "key:k")], ["units", bucket.interval_us, 1])
        limiter = Limiter(RedisScript(redis, within_s=20), keys)
        assert (await limiter.take(demand("c", "k", (bucket,)))).buckets[0].remaining == 0


async def test_what_was_decided_without_redis_is_entered_there(env: dict[str, str]) -> None:
    settings = operator_settings(env)
    keys = RedisKeys(namespace=settings.redis.namespace)
    bucket, places = Limit(name="key:k", interval_us=10_000_000, burst=20), keys.places("c", "key:k")
    asked = demand("c", "k", (bucket,))
    asked = replace(asked, caller=replace(asked.caller, concurrency=(Concurrency(name="key:k", most=2),)))
    async with open_redis(settings.redis, timeout_s=5.0) as redis:
        limiter = Limiter(RedisScript(redis, within_s=5.0), keys)
        assert (await limiter.take(asked)).buckets[0].remaining == 19
        for units in (3, 4):
            await lua("api.limits", "settle")(redis, [keys.bucket("c", "key:k")], ["units", bucket.interval_us, units])
        await lua("api.limits", "settle")(redis, [places], ["place", "another", 60_000_000])
        limiter.release(asked)
        await eventually(lambda: gone(redis, places, asked.request_id.hex))
        again = replace(asked, request_id=uuid4())
        assert (await limiter.take(again)).buckets[0].remaining == 11
        assert await limiter.take(again), "the same request has its place already"
        with pytest.raises(RateLimited, match="2 unfinished requests"):
            await limiter.take(replace(asked, request_id=uuid4()))


async def gone(redis: Redis, places: str, request: str) -> bool:
    return await redis.zscore(places, request) is None


async def test_a_killed_process_holds_its_places_until_its_requests_would_have_ended_and_no_longer(
    env: dict[str, str], spawn: Any
) -> None:
    """Fifty places of a process that is killed: never one more at once, and all of them again after the deadline and a
    second."""
    settings = operator_settings(env)
    keys, lasts_s = RedisKeys(namespace=settings.redis.namespace), 2.0
    holder = spawn(["python", "-m", "tests.storms.limiter_holder", str(HELD), str(lasts_s)], env, name="holder")
    await eventually(lambda: "held" in holder.log.read_text())
    holder.kill()
    last_us = int(holder.log.read_text().split()[-1])  # when the last of them was taken, by Redis' clock
    async with open_redis(settings.redis, timeout_s=5.0) as redis:
        limiter = Limiter(RedisScript(redis, within_s=5.0), keys)
        admitted: list[int] = []

        async def another() -> bool:
            assert await redis.zcount(keys.places("c", "key:k"), await now_of(redis), "+inf") <= HELD
            with suppress(RateLimited):
                admitted.append((await limiter.take(holding(HELD, lasts_s=60))).at.timestamp())
            return len(admitted) == HELD

        await eventually(another)
        with pytest.raises(RateLimited, match=f"{HELD} unfinished requests") as refused:
            await limiter.take(holding(HELD, lasts_s=60))
        assert refused.value.code == "concurrency_limit_exceeded"
        waited_s = min(admitted) - last_us / 1e6
        assert waited_s > lasts_s, "requests of the killed process were still running"
        free_at = await redis.zrangebyscore(keys.places("c", "key:k"), 0, last_us + (lasts_s + 1) * 1e6)
        assert free_at == [], "none of the killed process' places is left"


HELD = 50


async def now_of(redis: Redis) -> int:
    seconds, micros = await redis.time()
    return seconds * 1_000_000 + micros


@pytest.mark.timeout(600)
async def test_a_short_proof_of_the_limiter_holds_and_catches_every_mutant(tmp_path: Path) -> None:
    """`make limiter-proof` with fewer calls: eight processes, 400 keys, mutants, and Redis away at times."""
    lines: list[str] = []
    figures = await prove(tmp_path, calls=15_000, seconds=5.0, seed=drawn(None), say=lines.append)
    told = "\n".join([*lines, json.dumps(figures)])
    assert figures["held"], told
    assert figures["slack_us"] <= 0, told
    assert set(figures["mutants_caught"]) == set(MUTANTS), told
    assert figures["paced_refused"] == figures["came_back_refused"] == 0, told


async def test_a_limited_caller_is_told_when_to_come_back_and_then_served(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env) as desk:
        slow = desk.caller.with_key(customer(env, "Slow", requests_per_s=2, burst=3)["key"])
        replies = [await slow.infer() for _ in range(3)]
        assert {r.status for r in replies} == {200}
        calls = await asyncio.gather(*(slow.infer() for _ in range(5)))
        refused = next(r for r in calls if r.status == 429)
        assert "the key's limit of 2 requests per s, 3 at once," in refused.json["error"]
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
        assert any("the key's limit of 1 request per s, 1 at once," in r.json["error"] for r in refused)
        refused = [r for r in await asyncio.gather(*(second.infer() for _ in range(20))) if r.status == 429]
        assert any("limit of 1 request per s, 4 at once," in r.json["error"] for r in refused)


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
