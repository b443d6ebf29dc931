"""While Redis does not answer: who decides, for how long, and what becomes of it afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from api.admission.buckets import Limit
from api.admission.caller import Concurrency
from api.admission.demand import Demand, Spending
from api.errors import ApiError, RateLimited, Unavailable
from api.limits.limiter import Limiter
from api.limits.plans import RELEASE, SETTLE
from infra.redis import LuaCall
from schemas.keys import RedisKeys
from schemas.records import LimiterMode
from tests.conditions import eventually
from tests.fakes import FakeScript, demand

SECOND_US = 1_000_000
#: A share of one of four holds 5 units and gets one more every 400 ms.
BUCKET = Limit(name="key:k1", interval_us=100_000, burst=20)


class Gateway:
    """A limiter whose clock a test moves, on a Redis that a test takes away."""

    def __init__(self) -> None:
        self.now_us = 10 * SECOND_US
        self.told: str | None = None
        self.script = FakeScript()
        self.limiter = Limiter(self.script, RedisKeys(), replicas=4, clock=lambda: self.now_us)

    async def lose_redis(self) -> None:
        self.script.away = True
        for _ in range(3):
            with pytest.raises(ApiError):
                await self.limiter.take(call())

    async def asked_away(self, *, hangs_us: int = 0) -> int:
        """What comes of a call that finds out that Redis is away, which takes so long."""
        self.script.away = True
        self.script.hold.clear()
        asked = asyncio.ensure_future(self.asked())
        await eventually(lambda: self.script.calls)
        self.now_us += hangs_us
        self.script.hold.set()
        return await asked

    async def asked(self, d: Demand | None = None) -> int:
        """200, or the status of the refusal."""
        try:
            return 200 if (await self.limiter.take(d or call())).buckets else 0
        except ApiError as error:
            self.told = error.headers.get("x-inferlog-limits")
            return error.status

    def settled(self) -> list[tuple[str, Sequence[str | int]]]:
        """What was entered in Redis afterwards: key and arguments."""
        return [
            (c.start.keys[0], c.start.args) for c in self.script.calls if c.start.args[:1] in (("units",), ("place",))
        ]


def call(limits: tuple[Limit, ...] = (BUCKET,), **changes: Any) -> Demand:
    d = demand("c1", "k1", limits)
    caller = replace(d.caller, concurrency=changes.pop("places", ()))
    return replace(d, caller=caller, **changes)


async def test_after_three_failures_nobody_waits_for_redis() -> None:
    gateway = Gateway()
    await gateway.lose_redis()
    asked = len(gateway.script.batches)
    gateway.script.hold.clear()  # whoever asked it now would hang
    assert await asyncio.wait_for(gateway.asked(), 5) == 429
    assert gateway.told == "local"
    assert len(gateway.script.batches) == asked
    assert "the limits' Redis did not answer" in (gateway.limiter.trouble() or "")


async def test_one_failure_alone_does_not_change_who_decides() -> None:
    gateway = Gateway()
    assert await gateway.asked_away() == 429
    gateway.script.away = False
    assert (await gateway.limiter.take(call())).mode is LimiterMode.SHARED


async def test_a_share_begins_empty_and_fills_at_its_part_of_the_rate() -> None:
    gateway = Gateway()
    await gateway.lose_redis()
    assert await gateway.asked() == 429
    gateway.now_us += 399_999
    assert await gateway.asked() == 429
    gateway.now_us += 1
    assert await gateway.asked() == 200
    assert await gateway.asked() == 429
    gateway.now_us += 3600 * SECOND_US
    assert [await gateway.asked() for _ in range(6)] == [200] * 5 + [429]
    assert gateway.limiter.counts["limits_local"] == 13
    assert gateway.limiter.counts["limits_local_refused"] == 7


async def test_the_evidence_says_that_a_share_decided_and_of_how_many() -> None:
    gateway = Gateway()
    await gateway.lose_redis()
    gateway.now_us += SECOND_US
    charge = await gateway.limiter.take(call())
    assert charge.mode is LimiterMode.LOCAL
    (b,) = charge.buckets
    assert (b.bucket, b.interval_us, b.burst, b.cost, b.shares) == ("key:k1", 400_000, 5, 1, 4)
    assert charge.headers["x-inferlog-limits"] == "local"
    assert charge.headers["RateLimit-Policy"] == '"key";q=5;w=2'


async def test_a_share_that_is_left_and_entered_again_is_empty_again() -> None:
    gateway = Gateway()
    await gateway.lose_redis()
    gateway.now_us += 3600 * SECOND_US
    assert await gateway.asked() == 200
    gateway.script.away = False
    while gateway.limiter.trouble():
        await gateway.limiter.mend()
    assert (await gateway.limiter.take(call())).mode is LimiterMode.SHARED
    gateway.now_us += 3600 * SECOND_US
    await gateway.lose_redis()
    assert await gateway.asked() == 429


async def test_a_failure_long_ago_gives_no_credit_at_the_next_one() -> None:
    """In between Redis decided, here or elsewhere, and nothing of that is known to the share."""
    gateway = Gateway()
    assert await gateway.asked_away() == 429
    gateway.script.away = False
    run = asyncio.ensure_future(gateway.limiter.run())
    await eventually(lambda: len(gateway.script.batches) == 2)  # it is asked again although nobody calls
    run.cancel()
    await asyncio.wait([run])
    gateway.now_us += 3600 * SECOND_US
    assert await gateway.asked_away() == 429


async def test_going_back_takes_several_good_answers_in_a_row() -> None:
    gateway = Gateway()
    await gateway.lose_redis()
    gateway.script.away = False
    for _ in range(4):
        await gateway.limiter.mend()
    gateway.script.away = True
    await gateway.limiter.mend()
    gateway.script.away = False
    for _ in range(4):
        await gateway.limiter.mend()
        assert gateway.limiter.trouble() is not None
    await gateway.limiter.mend()
    assert gateway.limiter.trouble() is None


async def test_what_a_share_gave_is_charged_to_the_bucket_when_redis_is_back() -> None:
    gateway = Gateway()
    await gateway.lose_redis()
    gateway.now_us += 10 * SECOND_US
    for _ in range(3):
        assert await gateway.asked() == 200
    gateway.script.away = False
    for _ in range(5):
        assert gateway.settled() == []
        await gateway.limiter.mend()
    assert gateway.settled() == [("limit:{c1}:key:k1", ("units", 100_000, 3))]
    await gateway.limiter.mend()
    assert len(gateway.settled()) == 1, "once"


async def test_what_filled_again_long_ago_is_not_charged() -> None:
    gateway = Gateway()
    await gateway.lose_redis()
    gateway.now_us += 10 * SECOND_US
    assert await gateway.asked() == 200
    gateway.now_us += 10 * SECOND_US
    gateway.script.away = False
    for _ in range(6):
        await gateway.limiter.mend()
    assert gateway.settled() == []


async def test_a_charge_that_may_not_have_arrived_is_owed_still() -> None:
    gateway = Gateway()
    assert await gateway.asked_away(hangs_us=SECOND_US) == 200
    await gateway.limiter.mend()
    gateway.script.away = False
    await gateway.limiter.mend()
    assert [args for _, args in gateway.settled()] == [("units", 100_000, 1)] * 2


async def test_a_timed_out_call_is_charged_here_and_never_sent_again() -> None:
    gateway = Gateway()
    assert await gateway.asked_away(hangs_us=400_000) == 200
    gateway.script.away = False
    await gateway.limiter.mend()
    takes = [c for c in gateway.script.calls if c.start.args[:1] == ("k1",)]
    assert len(takes) == 1


async def test_a_bucket_too_small_to_be_divided_is_told_as_ours_not_the_callers() -> None:
    gateway = Gateway()
    await gateway.lose_redis()
    gateway.now_us += 3600 * SECOND_US
    small = call((Limit(name="key:k1", interval_us=100_000, burst=3),))
    with pytest.raises(Unavailable, match="part of the key's limit") as refused:
        await gateway.limiter.take(small)
    assert "Retry-After" in refused.value.headers
    places = call(places=(Concurrency(name="customer:c1", most=3),))
    with pytest.raises(Unavailable, match="the customer's limit of unfinished requests"):
        await gateway.limiter.take(places)


async def test_money_is_not_spent_without_redis() -> None:
    gateway = Gateway()
    await gateway.lose_redis()
    gateway.now_us += 3600 * SECOND_US
    d = call()
    rich = replace(d, spending=Spending(left_micros=10**12, settled_at=d.admitted_at, cost_micros=1))
    with pytest.raises(Unavailable) as refused:
        await gateway.limiter.take(rich)
    assert refused.value.code == "spend_unknown"
    assert gateway.limiter.counts["spend_unknown"] == 1
    gateway.script.away = False
    while gateway.limiter.trouble():
        await gateway.limiter.mend()
    gateway.script.answer = [-4, 1, 1]  # Redis is back, and has forgotten what was reserved
    with pytest.raises(Unavailable):
        await gateway.limiter.take(rich)
    assert gateway.limiter.counts["spend_unknown"] == 2


async def test_places_are_a_part_too_and_those_had_before_count() -> None:
    gateway, places = Gateway(), (Concurrency(name="key:k1", most=12),)
    shared = call(places=places)
    await gateway.limiter.take(shared)
    await gateway.lose_redis()
    gateway.now_us += 4 * SECOND_US  # the share of the bucket is full again, the request is not over
    mine = [call(places=places) for _ in range(3)]
    assert [await gateway.asked(d) for d in mine] == [200, 200, 429]
    with pytest.raises(RateLimited, match="3 unfinished requests") as refused:
        await gateway.limiter.take(mine[2])
    assert refused.value.code == "concurrency_limit_exceeded"
    assert await gateway.asked(mine[1]) == 200, "the same request has its place already"
    gateway.limiter.release(shared)
    assert await gateway.asked(mine[2]) == 200
    gateway.now_us += 12 * SECOND_US
    assert await gateway.asked(call(places=places)) == 200, "nobody frees a place after its deadline"


async def test_places_taken_alone_are_entered_when_redis_is_back() -> None:
    gateway, places = Gateway(), (Concurrency(name="key:k1", most=12),)
    await gateway.lose_redis()
    gateway.now_us += 3600 * SECOND_US
    kept, ended = call(places=places), call(places=places)
    await gateway.limiter.take(kept)
    await gateway.limiter.take(ended)
    gateway.limiter.release(ended)
    gateway.now_us += 3 * SECOND_US
    gateway.script.away = False
    while gateway.limiter.trouble():
        await gateway.limiter.mend()
    (entered,) = [args for key, args in gateway.settled() if key == "places:{c1}:key:k1"]
    assert entered[:2] == ("place", kept.request_id.hex)
    assert int(entered[2]) == 8 * SECOND_US
    freed = [c for c in gateway.script.calls if not c.start.args]
    assert len(freed) == 1, "what could not be freed while Redis was away"


async def test_what_redis_refuses_to_enter_is_owed_until_it_enters_it() -> None:
    """It answers the question whether it is there, and has no memory for writes, or another thing under that name."""

    class Refuses(FakeScript):
        refuses = True

        async def run(self, calls: Sequence[LuaCall]) -> Sequence[Any]:
            answers = await super().run(calls)
            refused = RuntimeError("OOM command not allowed")
            return [
                refused if self.refuses and c.start.script is SETTLE else a for c, a in zip(calls, answers, strict=True)
            ]

    gateway, places = Gateway(), (Concurrency(name="key:k1", most=12),)
    gateway.script = script = Refuses()
    gateway.limiter = Limiter(script, RedisKeys(), replicas=4, clock=lambda: gateway.now_us)
    await gateway.lose_redis()
    gateway.now_us += 3600 * SECOND_US
    kept = call(places=places)
    await gateway.limiter.take(kept)
    script.away = False
    while gateway.limiter.trouble():
        await gateway.limiter.mend()
    await gateway.limiter.mend()  # and does not ask again and again without a pause
    refused = len(gateway.settled())
    assert (refused, gateway.limiter.counts["limits_unsettled"]) == (4, 4), "both, in each of two tries"
    script.refuses = False
    await gateway.limiter.mend()
    entered = gateway.settled()[refused:]
    assert [args[:2] for _, args in entered] == [("units", 100_000), ("place", kept.request_id.hex)]
    await gateway.limiter.mend()
    assert len(gateway.settled()) == refused + 2, "once"


async def test_places_that_nobody_frees_are_forgotten_after_their_deadline() -> None:
    gateway, places = Gateway(), (Concurrency(name="key:k1", most=100),)
    for _ in range(50):
        await gateway.limiter.take(call(places=places))
        gateway.now_us += SECOND_US
    held = gateway.limiter._local._places
    assert sum(map(len, held.values())) <= 13
    gateway.now_us += 12 * SECOND_US
    await gateway.limiter.take(
        replace(call(places=places), caller=replace(call(places=places).caller, customer_id="c2"))
    )
    assert [customer_id for customer_id, _ in held] == ["c2"]


@pytest.mark.parametrize("may_run", [False, True])
@pytest.mark.parametrize("end", ["gone", "refused"])
async def test_a_call_that_is_refused_keeps_the_place_of_a_request_that_may_run_already(
    may_run: bool, end: str
) -> None:
    gateway = Gateway()
    d = call(places=(Concurrency(name="key:k1", most=12),), may_run_already=may_run)
    gateway.script.hold.clear()
    gateway.script.away = end == "refused"
    taking = asyncio.ensure_future(gateway.asked(d))
    await eventually(lambda: gateway.script.calls)
    if end == "gone":
        taking.cancel()
    gateway.script.hold.set()
    await asyncio.wait([taking])
    gateway.script.away = False
    await gateway.limiter.mend()
    assert any(c.start.script is RELEASE for c in gateway.script.calls) is not may_run


async def test_by_itself_it_asks_again_until_redis_is_back() -> None:
    gateway = Gateway()
    await gateway.lose_redis()
    run = asyncio.ensure_future(gateway.limiter.run())
    gateway.script.away = False
    await eventually(lambda: gateway.limiter.trouble() is None)
    probes = len(gateway.script.batches)
    assert probes == 3 + 5
    run.cancel()
    await asyncio.wait([run])
    assert len(gateway.script.batches) == probes, "and then it is not asked for nothing"


async def test_a_server_that_refuses_everything_is_as_good_as_away() -> None:
    class Refuses(FakeScript):
        async def run(self, calls: Sequence[LuaCall]) -> Sequence[Any]:
            return [RuntimeError("OOM command not allowed") for _ in calls]

    limiter = Limiter(Refuses(), RedisKeys())
    for _ in range(3):
        with pytest.raises(ApiError):
            await limiter.take(call())
    assert "OOM" in (limiter.trouble() or "")
