"""A caller's limits: one Lua call takes units, a place and money, or nothing, by Redis' own clock.

Calls that arrive together share a round trip, each still decided by its own run of the script. A call that is not
answered in time is decided by this gateway's own share of the limits, and charged there, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from api.admission.demand import Demand
from api.errors import ApiError, Unavailable
from api.limits.local_share import LocalShare, monotonic_us
from api.limits.plans import DECIDE, Plan, Plans
from api.limits.store import TIMEOUT_S, LimiterAway, RedisScript, Script
from api.limits.verdicts import LOCAL_HEADER, Charge, crowded, judge, judge_share
from api.spend.spend import SpendUnknown
from infra.breaker import Breaker
from infra.redis import LuaCall, LuaScript
from schemas.keys import RedisKeys

__all__ = ["TIMEOUT_S", "Charge", "Limiter", "LimiterAway", "RedisScript", "Script"]

logger = logging.getLogger(__name__)

_MAX_BATCH = 256
#: Places that could not be freed are freed later, so many of them; others free themselves.
_MAX_RELEASES = 10_000
_OPENS_AFTER = 3
_CLOSES_AFTER = 5
_PROBE_EVERY_S = 0.1
_SHARE_RETRY_S = 1.0


class Limiter:
    """Decides calls. `replicas`: among how many gateways limits are divided while Redis does not answer.

    Of the calls that wait while a round trip is on its way, as many as possible go together in the next one. `counts`:
    what was decided without Redis, since the start.
    """

    def __init__(
        self,
        script: Script,
        keys: RedisKeys,
        *,
        replicas: int = 4,
        clock: Callable[[], int] = monotonic_us,
        decide: LuaScript = DECIDE,
    ) -> None:
        self._script = script
        self._clock = clock
        self._plans = Plans(keys, parts=replicas, script=decide)
        self._probe_call = decide.start((keys.revoked_keys("-"),), ("-", 0, 0, 0), more=3).call(0, 0, 0)
        self._local = LocalShare(keys, clock=clock)
        self._breaker = Breaker(
            "the limits' Redis", pause_s=_PROBE_EVERY_S, opens_after=_OPENS_AFTER, closes_after=_CLOSES_AFTER
        )
        self._waiting: list[tuple[LuaCall, asyncio.Future[Sequence[int]]]] = []
        self._releases: list[LuaCall] = []
        self._sender: asyncio.Task[None] | None = None
        self._to_mend = asyncio.Event()
        self._is_refusing = False
        self.counts: Counter[str] = Counter()

    def trouble(self) -> str | None:
        """What is wrong with Redis while this gateway keeps limits by itself; else None."""
        return self._breaker.trouble()

    async def take(self, demand: Demand) -> Charge:
        """Take what one call needs.

        Raises RateLimited, BadInput (it could never pass), Unauthorized (revoked key), PaymentRequired (spend cap),
        Unavailable (neither Redis nor this gateway's share can decide).
        """
        try:
            return await self._taken(self._plans.of(demand), demand)
        except SpendUnknown as error:
            self.counts[error.code] += 1
            raise

    async def _taken(self, plan: Plan, demand: Demand) -> Charge:
        if self._breaker.is_open:
            return self._by_itself(plan, demand)
        decided: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((plan.call(demand), decided))
        self._wake()
        try:
            answer = await decided
        except LimiterAway:
            try:
                return self._by_itself(plan, demand)
            except ApiError:
                self._refused(plan, demand)
                raise
        except asyncio.CancelledError:
            self._refused(plan, demand)
            raise
        charge = judge(answer, plan, demand)
        if plan.places:
            self._local.hold(plan.share, demand, is_told=True)
        return charge

    def release(self, demand: Demand) -> None:
        """The request is over, or was never begun: its places among the unfinished are free soon.

        Never waits, never raises. Of a request that may run still nothing is said: its places free themselves.
        """
        if demand.caller.concurrency:
            plan = self._plans.of(demand)
            self._local.free(plan.share, demand)
            self._release(plan, demand.request_id)

    def _refused(self, plan: Plan, demand: Demand) -> None:
        """Redis may have given it places, of which nobody was told."""
        if not demand.may_run_already:
            self._release(plan, demand.request_id)

    def _release(self, plan: Plan, request_id: UUID) -> None:
        if plan.places and len(self._releases) < _MAX_RELEASES:
            self._releases.append(plan.release(request_id))
            if not self._breaker.is_open:
                self._wake()

    def _wake(self) -> None:
        if self._sender is None or self._sender.done():
            self._sender = asyncio.ensure_future(self._send())

    def _by_itself(self, plan: Plan, demand: Demand) -> Charge:
        """Decide by this gateway's share. Raises RateLimited, Unavailable."""
        share = plan.share
        self.counts["limits_local"] += 1
        try:
            if demand.spending is not None:
                raise SpendUnknown("Redis, which knows what requests have reserved, does not answer")
            for b, cost in zip(share.limits, plan.costs(demand.cost), strict=True):
                if cost > b.burst:
                    raise _no_share(f"{b.owner} limit", f"{b.burst} {b.unit}")
            for name, most in share.places:
                if most == 0:
                    raise _no_share(f"the {name.partition(':')[0]}'s limit of unfinished requests", "none")
            full = self._local.full(share, demand)
            if full is not None:
                raise crowded(*full)
            charge = judge_share(self._local.take(share, demand), share, demand)
        except ApiError as error:
            self.counts["limits_local_refused"] += 1
            error.headers.update(LOCAL_HEADER)
            raise
        self._local.hold(share, demand, is_told=False)
        self._to_mend.set()
        return charge

    async def _send(self) -> None:
        while self._waiting or self._releases:
            # A caller that has left before its call was sent needs no answer.
            waiting = [(call, decided) for call, decided in self._waiting if not decided.done()]
            takes, self._waiting = waiting[:_MAX_BATCH], waiting[_MAX_BATCH:]
            releases, self._releases = self._releases[:_MAX_BATCH], self._releases[_MAX_BATCH:]
            if not takes and not releases:
                continue
            since_us = self._clock()
            try:
                answers = await self._script.run([*(call for call, _ in takes), *releases])
                if all(isinstance(a, BaseException) for a in answers):
                    raise LimiterAway(f"{type(answers[0]).__name__}: {answers[0]}")
                _settle(takes, answers[: len(takes)])
            except Exception as error:
                if not isinstance(error, LimiterAway):
                    logger.exception("the limiter failed for a reason nobody foresaw")
                self._failed(since_us, error)
                # Those that still wait were never sent. They fail with the rest, or each would wait its own timeout.
                takes, self._waiting = takes + self._waiting, []
                self._releases += releases  # freeing twice does no harm
                _settle(takes, [error] * len(takes))
                return
            except BaseException as error:  # cancelled with the event loop; nobody may be left waiting
                takes, self._waiting = takes + self._waiting, []
                _settle(takes, [error] * len(takes))
                raise
            self._succeeded()

    def _failed(self, since_us: int, error: Exception) -> None:
        self.counts["limits_redis_failures"] += 1
        self._local.enter(since_us)
        self._breaker.failed(f"{type(error).__name__}: {error}")
        self._to_mend.set()

    def _succeeded(self) -> None:
        self._breaker.succeeded()
        if not self._breaker.is_open:
            self._local.leave()

    async def run(self) -> None:
        """For ever: while Redis is away, ask whether it is back; then enter there what was decided without it."""
        while True:
            await self._to_mend.wait()
            await asyncio.sleep(_PROBE_EVERY_S)
            await self.mend()

    async def mend(self) -> None:
        """One try: ask Redis something, and if it is not away, enter all that is owed, unless it refuses to."""
        while await self._mended():
            if self._breaker.is_open:
                return
            if not self._local.owes and not self._releases:
                self._to_mend.clear()
                return

    async def _mended(self) -> bool:
        settlement, releases = [], []
        if not self._breaker.is_open:
            settlement = self._local.settlement(_MAX_BATCH)
            releases, self._releases = self._releases[:_MAX_BATCH], self._releases[_MAX_BATCH:]
        since_us = self._clock()
        try:
            answers = await self._script.run([self._probe_call, *(s.call for s in settlement), *releases])
            if isinstance(answers[0], BaseException):
                raise LimiterAway(f"{type(answers[0]).__name__}: {answers[0]}")
        except LimiterAway as error:
            self._local.restore(settlement)
            self._releases += releases
            self._failed(since_us, error)
            return False
        self._succeeded()
        # A server without memory for writes, say, answers the question and enters nothing.
        refused = [(s, a) for s, a in zip(settlement, answers[1:], strict=False) if isinstance(a, BaseException)]
        if refused and not self._is_refusing:
            logger.warning("Redis does not enter what was decided without it", extra={"fields": {"why": refused[0][1]}})
        self._is_refusing = bool(refused)
        if refused:
            self._local.restore([s for s, _ in refused])
            self.counts["limits_unsettled"] += len(refused)
        return not refused


def _no_share(limit: str, part: str) -> Unavailable:
    return Unavailable(
        f"limits cannot be checked now: Redis does not answer, and this gateway's part of {limit} ({part}) is too "
        "small for this call",
        code="limiter_away",
        retry_after_s=_SHARE_RETRY_S,
    )


def _settle(batch: Sequence[tuple[LuaCall, asyncio.Future[Sequence[int]]]], answers: Sequence[Any]) -> None:
    for (_, decided), answer in zip(batch, answers, strict=True):
        if decided.done():
            continue  # its caller has left
        if isinstance(answer, BaseException):
            decided.set_exception(LimiterAway(f"{type(answer).__name__}: {answer}"))
        else:
            decided.set_result(answer)
