from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest

from api.access.key_record import rate
from api.admission.buckets import Limit, limit
from api.admission.caller import Caller, Cap, Concurrency
from api.admission.demand import Cost, Demand, Spending
from api.errors import ApiError, BadInput, PaymentRequired, RateLimited, Unauthorized, Unavailable
from api.limits.limiter import Limiter
from api.limits.plans import Plan, Plans
from api.limits.verdicts import judge
from schemas.keys import RedisKeys
from schemas.records import LimiterMode
from tests.conditions import eventually
from tests.fakes import FakeScript, demand

KEY = limit("key:k1", requests_per_s=7, burst=3)
CUSTOMER = limit("customer:c1", requests_per_s=100, burst=20)
TOKENS = Limit(name="customer:c1:tokens", interval_us=60_000, burst=1_000, unit="tokens")
MODEL = Limit(name="model:digits", interval_us=1_000, burst=50, model="digits")
OTHER = Limit(name="model:minilm:items", interval_us=1_000, burst=50, model="minilm", unit="items")
LIMITS = (KEY, CUSTOMER)
NOW_US = 1_780_000_000_000_001
NOW = datetime(2026, 5, 28, tzinfo=timezone.utc)


def asked(
    *limits: Limit, cost: Cost | None = None, spending: Spending | None = None, places: tuple[Concurrency, ...] = ()
) -> Demand:
    return Demand(
        caller=Caller(
            customer_id="c1",
            key_id="k1",
            limits=limits,
            concurrency=places,
            cap=Cap(amount_micros=5_000_000, currency="eur"),
        ),
        model="digits",
        cost=cost or Cost(items=2),
        request_id=UUID(int=7),
        admitted_at=NOW,
        until=NOW + timedelta(seconds=10),
        spending=spending,
    )


def plan(d: Demand) -> Plan:
    return Plans(RedisKeys(namespace="n"), parts=4).of(d)


def words(d: Demand) -> tuple[list[str], list[str]]:
    """Keys and arguments as they are on the wire."""
    call = plan(d).call(d)
    texts = call.packed.decode().split("\r\n")[2::2]  # each behind its length
    count = int(texts[2])
    return texts[3 : 3 + count], texts[3 + count :]


def test_the_interval_is_rounded_up_so_that_the_rate_is_never_exceeded() -> None:
    assert KEY.interval_us == 142_858
    assert limit("x", requests_per_s=1_000_000, burst=1).interval_us == 1


def test_keys_and_arguments_are_in_the_order_the_script_reads_them() -> None:
    keys, args = words(asked(*LIMITS))
    assert keys == ["n.revoked:{c1}", "n.limit:{c1}:key:k1", "n.limit:{c1}:customer:c1"]
    assert args == ["k1", "2", "0", "0", "142858", "3", "1", "10000", "20", "1", "1", "2", "0"]


def test_places_and_money_come_behind_the_buckets() -> None:
    spending = Spending(left_micros=900, settled_at=NOW - timedelta(seconds=1.5), cost_micros=30)
    keys, args = words(asked(KEY, spending=spending, places=(Concurrency(name="key:k1", most=4),)))
    assert keys == ["n.revoked:{c1}", "n.limit:{c1}:key:k1", "n.places:{c1}:key:k1", "n.money:{c1}"]
    second = int(NOW.timestamp())
    assert args == [
        *("k1", "1", "1", "1", "142858", "3", "1", "4", "1", "2", "0", UUID(int=7).hex, "11000000"),
        *("900", str(second - 2), str(second), "30"),
    ]


def test_only_the_buckets_that_the_call_takes_from_are_asked() -> None:
    keys, args = words(asked(KEY, TOKENS, MODEL, OTHER, cost=Cost(items=2, tokens=0)))
    assert keys[1:] == ["n.limit:{c1}:key:k1", "n.limit:{c1}:model:digits"]
    keys, args = words(asked(KEY, TOKENS, MODEL, OTHER, cost=Cost(items=2, tokens=40)))
    assert keys[1:] == ["n.limit:{c1}:key:k1", "n.limit:{c1}:customer:c1:tokens", "n.limit:{c1}:model:digits"]
    assert args[-3:] == ["1", "2", "40"]


def test_every_key_of_a_call_has_the_customers_hash_tag() -> None:
    spending = Spending(left_micros=900, settled_at=NOW, cost_micros=30)
    keys, _ = words(asked(*LIMITS, TOKENS, spending=spending, places=(Concurrency(name="key:k1", most=4),)))
    assert len(keys) == 5
    assert all("{c1}" in key for key in keys)


def test_a_plan_is_made_once_until_the_key_is_looked_up_again() -> None:
    plans, first = Plans(RedisKeys(), parts=4), asked(*LIMITS)
    assert plans.of(first) is plans.of(replace(first, cost=Cost(items=1)))
    changed = replace(first, caller=replace(first.caller, limits=(KEY,)))
    assert [b.name for b in plans.of(changed).limits] == ["key:k1"]
    assert plans.of(replace(first, cost=Cost(items=1, tokens=3))) is not plans.of(first)


def test_a_call_that_no_bucket_could_ever_hold_is_told_so_before_redis_is_asked() -> None:
    with pytest.raises(BadInput, match="1001 tokens, more than the customer's limit lets through at once") as refused:
        plan(asked(*LIMITS, TOKENS, cost=Cost(items=1, tokens=1_001)))
    assert (refused.value.status, refused.value.code) == (400, "cost_exceeds_limit")


def test_a_charge_carries_the_evidence_and_the_tightest_bucket() -> None:
    d = asked(*LIMITS)
    charge = judge([1, NOW_US, 0, 2, 142_858, 19, 10_000], plan(d), d)
    assert charge.at.timestamp() == pytest.approx(NOW_US / 1e6)
    assert charge.at.microsecond == NOW_US % 1_000_000
    assert [(b.bucket, b.remaining, b.cost) for b in charge.buckets] == [("key:k1", 2, 1), ("customer:c1", 19, 1)]
    assert charge.mode is LimiterMode.SHARED
    assert charge.headers == {
        "RateLimit-Policy": '"key";q=3;w=1, "customer";q=20;w=1',
        "RateLimit": '"key";r=2;t=1',
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "143ms",
    }


def test_the_tightest_bucket_is_the_one_with_the_least_share_left_whatever_its_unit() -> None:
    d = asked(KEY, TOKENS, cost=Cost(items=1, tokens=800))
    charge = judge([1, NOW_US, 0, 2, 142_858, 200, 48_000_000], plan(d), d)
    assert charge.headers["RateLimit"] == '"customer-tokens";r=200;t=48'
    assert charge.headers["RateLimit-Policy"] == '"key";q=3;w=1, "customer-tokens";q=1000;w=60;qu="tokens"'
    assert charge.headers["x-ratelimit-remaining-requests"] == "2"
    assert charge.headers["x-ratelimit-limit-tokens"] == "1000"
    assert charge.headers["x-ratelimit-remaining-tokens"] == "200"
    assert charge.headers["x-ratelimit-reset-tokens"] == "48000ms"
    assert [(b.bucket, b.cost) for b in charge.buckets] == [("key:k1", 1), ("customer:c1:tokens", 800)]


def test_a_refusal_names_the_bucket_to_wait_for_and_rounds_up() -> None:
    d = asked(*LIMITS)
    with pytest.raises(RateLimited) as refused:
        judge([0, NOW_US, 142_857, 0, 428_573, 4, 160_000], plan(d), d)
    assert "the key's limit of 7 requests per s, 3 at once, is used up" in refused.value.message
    assert refused.value.headers["Retry-After"] == "1"
    assert refused.value.headers["retry-after-ms"] == "143"
    assert refused.value.headers["RateLimit"] == '"key";r=0;t=1'


def test_the_customers_bucket_is_named_when_it_is_the_one() -> None:
    d = asked(*LIMITS)
    with pytest.raises(RateLimited, match="the customer's limit of 100 requests per s, 20 at once"):
        judge([0, NOW_US, 9_000, 1, 285_000, 0, 199_000], plan(d), d)


@pytest.mark.parametrize(
    ("amount", "window_s", "words"),
    [
        (1, 1, "1 item per s"),
        (3, 1, "3 items per s"),
        (60, 60, "1 item per s"),
        (7, 60, "7 items per minute"),
        (1000, 3600, "1000 items per hour"),
        (1, 86_400, "1 item per day"),
        (1, 7, "1 item per 7 s"),
        (5, 7, "1 item per 1.4 s"),
    ],
)
def test_a_refusal_tells_the_rate_as_it_was_given_and_the_burst_beside_it(
    amount: int, window_s: int, words: str
) -> None:
    given = rate(amount=amount, window_s=window_s, burst=2, unit="items")
    d = asked(Limit(name="key:k1:items", interval_us=given.interval_us, burst=given.burst, unit="items"))
    with pytest.raises(RateLimited, match=f"the key's limit of {words}, 2 at once, is used up"):
        judge([0, NOW_US, 1_000_000, 0, 2 * given.interval_us], plan(d), d)


SPENDING = Spending(left_micros=900, settled_at=NOW, cost_micros=30)


def test_a_refusal_names_the_bucket_that_does_not_hold_enough_for_this_call() -> None:
    """Six units of a slow bucket that is nearly used up; a fast one beside it is nearly full."""
    day = Limit(name="key:k1:items", interval_us=86_400_000_000, burst=20, unit="items")
    d = asked(limit("key:k1", requests_per_s=1, burst=1000), day, cost=Cost(items=6))
    with pytest.raises(RateLimited, match="1 item per day, 20 at once") as refused:
        judge([0, NOW_US, 2 * 86_400_000_000, 995, 5_000_000, 4, 16 * 86_400_000_000], plan(d), d)
    assert refused.value.headers["RateLimit"].startswith('"key-items"')


@pytest.mark.parametrize(
    ("answer", "kind", "status", "code"),
    [
        ([-1, NOW_US], Unauthorized, 401, "revoked_api_key"),
        ([-2, NOW_US, 1], RateLimited, 429, "concurrency_limit_exceeded"),
        ([-3, NOW_US, 880], PaymentRequired, 402, "spend_cap_reached"),
        ([-4, NOW_US, NOW_US // 1_000_000], Unavailable, 503, "spend_unknown"),
    ],
)
def test_other_refusals_of_the_script(answer: list[int], kind: type[ApiError], status: int, code: str) -> None:
    d = asked(*LIMITS, spending=SPENDING, places=(Concurrency(name="customer:c1", most=4),))
    with pytest.raises(kind) as refused:
        judge(answer, plan(d), d)
    assert (refused.value.status, refused.value.code) == (status, code)
    if status in (429, 503):
        assert {"Retry-After", "retry-after-ms"} <= refused.value.headers.keys()


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
        with pytest.raises(ApiError, match="Redis does not answer") as refused:
            await call
        assert refused.value.headers["x-inferlog-limits"] == "local"
        assert "Retry-After" in refused.value.headers
    assert script.batches == [1]
    script.away = False
    await limiter.take(demand("c1", "k1", LIMITS))


async def test_one_refused_run_does_not_fail_its_neighbours() -> None:
    script = FakeScript()
    limiter = Limiter(script, RedisKeys())
    good = [1, NOW_US, 0, 2, 5, 2, 5]
    script.answer = ValueError("WRONGTYPE")
    with pytest.raises(ApiError, match="Redis does not answer"):
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
    assert all(isinstance(error, ApiError) for error in refused)
    script.breaks, script.loses = None, False
    assert (await limiter.take(demand("c1", "k1", LIMITS))).buckets


def released(script: Any) -> int:
    return sum(not call.start.args for call in script.calls)


PLACES = (Concurrency(name="key:k1", most=4), Concurrency(name="customer:c1", most=8))


async def test_places_are_freed_in_the_background_and_never_hold_an_answer_up() -> None:
    script = FakeScript()
    limiter, d = Limiter(script, RedisKeys()), asked(*LIMITS, places=PLACES)
    await limiter.take(d)
    script.hold.clear()
    limiter.release(d)
    assert released(script) == 0, "it has only been noted"
    script.hold.set()
    await eventually(lambda: released(script) == 1)
    limiter.release(asked(*LIMITS))
    await asyncio.sleep(0)
    assert released(script) == 1, "who has no places frees none"


@pytest.mark.parametrize("sent", [True, False], ids=["while it was decided", "before it was sent"])
async def test_a_caller_that_left_before_it_was_answered_keeps_no_place(sent: bool) -> None:
    script = FakeScript()
    limiter, d = Limiter(script, RedisKeys()), asked(*LIMITS, places=PLACES)
    script.hold.clear()
    calls = [asyncio.ensure_future(limiter.take(d if sent else asked(*LIMITS)))]
    await eventually(lambda: script.calls)
    if not sent:
        calls.append(asyncio.ensure_future(limiter.take(d)))
        await asyncio.sleep(0)
    calls[-1].cancel()
    script.hold.set()
    await asyncio.wait(calls)
    await eventually(lambda: released(script) == 1)


async def test_callers_who_all_left_before_they_were_asked_for_are_no_failure_of_redis() -> None:
    script = FakeScript()
    limiter = Limiter(script, RedisKeys())
    for _ in range(5):
        calls = [asyncio.ensure_future(limiter.take(asked(*LIMITS))) for _ in range(3)]
        await asyncio.sleep(0)  # they wait for the next round trip, which has not begun
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await eventually(lambda: limiter._sender is None or limiter._sender.done())
    assert script.batches == []
    assert limiter.counts["limits_redis_failures"] == 0
    assert limiter.trouble() is None
    assert (await limiter.take(asked(*LIMITS))).mode is LimiterMode.SHARED
