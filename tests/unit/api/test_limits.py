from __future__ import annotations

import asyncio

import pytest

from api.admission.buckets import limit
from api.admission.limits import Limiter, judge, script_call
from api.errors import RateLimited, Unauthorized, Unavailable
from schemas.keys import RedisKeys
from tests.conditions import eventually
from tests.fakes import FakeScript, demand

KEY = limit("key:k1", requests_per_s=7, burst=3)
CUSTOMER = limit("customer:c1", requests_per_s=100, burst=20)
LIMITS = (KEY, CUSTOMER)
NOW_US = 1_780_000_000_000_001


def test_the_interval_is_rounded_up_so_that_the_rate_is_never_exceeded() -> None:
    assert KEY.interval_us == 142_858
    assert limit("x", requests_per_s=1_000_000, burst=1).interval_us == 1


def test_keys_and_arguments_are_in_the_order_the_script_reads_them() -> None:
    keys, args = script_call(RedisKeys(namespace="n"), "c1", "k1", LIMITS)
    assert keys == ["n.limit:{c1}:key:k1", "n.limit:{c1}:customer:c1", "n.revoked:{c1}"]
    assert args == ["k1", 142_858, 3, 1, 10_000, 20, 1]


def test_a_charge_carries_the_evidence_and_the_tightest_bucket() -> None:
    charge = judge([1, NOW_US, 0, 2, 142_858, 19, 10_000], LIMITS)
    assert charge.at.timestamp() == pytest.approx(NOW_US / 1e6)
    assert charge.at.microsecond == NOW_US % 1_000_000
    assert [(b.bucket, b.remaining, b.cost) for b in charge.buckets] == [("key:k1", 2, 1), ("customer:c1", 19, 1)]
    assert charge.headers == {
        "RateLimit-Policy": '"key";q=3;w=1, "customer";q=20;w=1',
        "RateLimit": '"key";r=2;t=1',
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "143ms",
    }


def test_a_refusal_names_the_bucket_to_wait_for_and_rounds_up() -> None:
    with pytest.raises(RateLimited) as refused:
        judge([0, NOW_US, 142_857, 0, 428_573, 4, 160_000], LIMITS)
    assert "the key's limit of 3 requests" in refused.value.message
    assert refused.value.headers["Retry-After"] == "1"
    assert refused.value.headers["retry-after-ms"] == "143"
    assert refused.value.headers["RateLimit"] == '"key";r=0;t=1'


def test_the_customers_bucket_is_named_when_it_is_the_one() -> None:
    with pytest.raises(RateLimited, match="the customer's limit of 20"):
        judge([0, NOW_US, 9_000, 1, 285_000, 0, 199_000], LIMITS)


def test_a_revoked_key_is_refused_by_the_script_itself() -> None:
    with pytest.raises(Unauthorized, match="revoked"):
        judge([-1, NOW_US], LIMITS)


async def test_calls_that_wait_share_the_next_round_trip_and_each_gets_its_own_answer() -> None:
    script = FakeScript()
    limiter = Limiter(script, RedisKeys())
    script.hold.clear()
    calls = [asyncio.ensure_future(limiter.take(demand("c1", f"k{i}", LIMITS))) for i in range(10)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    script.hold.set()
    await asyncio.gather(*calls)
    assert sum(script.batches) == 10
    assert len(script.batches) <= 2


async def test_redis_away_fails_every_waiting_call_at_once_and_nothing_is_sent_again() -> None:
    script = FakeScript()
    limiter = Limiter(script, RedisKeys())
    script.hold.clear()
    script.away = True
    first = asyncio.ensure_future(limiter.take(demand("c1", "k1", LIMITS)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    later = [asyncio.ensure_future(limiter.take(demand("c1", "k1", LIMITS))) for _ in range(5)]
    await asyncio.sleep(0)
    script.hold.set()
    for call in (first, *later):
        with pytest.raises(Unavailable, match="Redis does not answer") as refused:
            await call
        assert "Retry-After" in refused.value.headers
    assert script.batches == [1]
    script.away = False
    await limiter.take(demand("c1", "k1", LIMITS))


async def test_one_refused_run_does_not_fail_its_neighbours() -> None:
    script = FakeScript()
    limiter = Limiter(script, RedisKeys())
    good = [1, NOW_US, 0, 2, 5, 2, 5]
    script.answer = ValueError("WRONGTYPE")
    with pytest.raises(Unavailable):
        await limiter.take(demand("c1", "k1", LIMITS))
    script.answer = good
    assert (await limiter.take(demand("c1", "k1", LIMITS))).buckets[0].remaining == 2


async def test_a_caller_that_left_does_not_disturb_the_batch() -> None:
    script = FakeScript()
    limiter = Limiter(script, RedisKeys())
    script.hold.clear()
    gone, stays = (asyncio.ensure_future(limiter.take(demand("c1", "k1", LIMITS))) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    script.hold.set()
    assert (await stays).buckets
    with pytest.raises(asyncio.CancelledError):
        await gone


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), KeyError("x"), "too few answers"])
async def test_an_unforeseen_failure_leaves_nobody_waiting(fault: Exception | str) -> None:
    """More calls than one round trip takes: also those that were never sent are answered, and the next is served."""
    script = FakeScript()
    limiter = Limiter(script, RedisKeys())
    script.hold.clear()
    script.breaks = fault if isinstance(fault, Exception) else None
    script.loses = fault == "too few answers"
    calls = [asyncio.ensure_future(limiter.take(demand("c1", f"k{i}", LIMITS))) for i in range(600)]
    await eventually(lambda: script.batches)
    script.hold.set()
    await asyncio.wait_for(asyncio.wait(calls), 10)
    refused = [c.exception() for c in calls if c.exception() is not None]
    assert len(refused) >= 599 - 256
    assert all(isinstance(error, Unavailable) for error in refused)
    script.breaks, script.loses = None, False
    assert (await limiter.take(demand("c1", "k1", LIMITS))).buckets
