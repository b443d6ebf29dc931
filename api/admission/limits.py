"""A caller's limits: one Lua call takes from every bucket or from none, by Redis' own clock, in whole microseconds.

Calls that arrive together share a round trip, each still decided by its own run of the script. A call that timed out is
never repeated, because it may have taken its tokens; the caller is told to come back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Protocol

from api.admission.buckets import Limit
from api.admission.demand import Demand
from api.errors import RateLimited, Unauthorized, Unavailable, retry_after
from infra.redis import LuaCall, Redis, RedisError, lua
from schemas.ids import EPOCH
from schemas.keys import RedisKeys
from schemas.records import BucketCharge, LimiterMode

logger = logging.getLogger(__name__)

TIMEOUT_S = 0.25
_LATE_S = 0.05
_COST = 1
_MAX_BATCH = 256
_MAX_PREPARED = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What was taken: the evidence for the log, and the headers that tell the caller what is left."""

    at: datetime
    buckets: tuple[BucketCharge, ...]
    headers: Mapping[str, str]
    mode: LimiterMode = LimiterMode.SHARED


class LimiterAway(RuntimeError):
    """Redis did not decide in time. Tokens may or may not have been taken."""


class Script(Protocol):
    """Runs the limiter's script."""

    def prepare(self, keys: Sequence[str], args: Sequence[str | int]) -> LuaCall:
        """One run, ready to be sent any number of times."""

    async def run(self, calls: Sequence[LuaCall]) -> Sequence[Any]:
        """One answer, or one exception as a value, per call. Raises LimiterAway."""


class RedisScript:
    """Runs `limits.lua` on a Redis server; a round trip is over after `TIMEOUT_S`, connecting included."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._lua = lua("api.admission", "limits")

    def prepare(self, keys: Sequence[str], args: Sequence[str | int]) -> LuaCall:
        """See Script."""
        return self._lua.prepare(keys, args)

    async def run(self, calls: Sequence[LuaCall]) -> Sequence[Any]:
        """See Script."""
        trip = asyncio.ensure_future(self._lua.each(self._client, calls))
        try:
            done, _ = await asyncio.wait((trip,), timeout=TIMEOUT_S)
            if not done:
                # Perhaps the event loop was held up and not Redis: an answer that has arrived is still read.
                done, _ = await asyncio.wait((trip,), timeout=_LATE_S)
            if not done:
                raise LimiterAway(f"no answer in {TIMEOUT_S:g} s")
            return trip.result()
        except (RedisError, OSError) as error:
            raise LimiterAway(f"{type(error).__name__}: {error}") from error
        finally:
            if not trip.done():
                trip.add_done_callback(lambda t: t.cancelled() or t.exception())  # nobody asks any more
                trip.cancel()


def script_call(
    keys: RedisKeys, customer_id: str, key_id: str, limits: Sequence[Limit], *, cost: int = _COST
) -> tuple[list[str], list[str | int]]:
    """Keys and arguments of one run of `limits.lua`."""
    names = [keys.bucket(customer_id, b.name) for b in limits]
    names.append(keys.revoked_keys(customer_id))
    args: list[str | int] = [key_id]
    for b in limits:
        args += (b.interval_us, b.burst, cost)
    return names, args


def judge(answer: Sequence[int], limits: Sequence[Limit]) -> Charge:
    """The script's answer as a Charge. Raises RateLimited with the headers of the tightest bucket, Unauthorized."""
    state, now_us = answer[0], answer[1]
    if state == -1:
        raise Unauthorized("this key was revoked", code="revoked_api_key")
    remaining, reset_us = answer[3::2], answer[4::2]
    if state == 0:
        # The bucket that is furthest over is the one to wait for.
        tightest = max(range(len(limits)), key=lambda i: reset_us[i] - limits[i].burst * limits[i].interval_us)
        wait_s = answer[2] / 1_000_000
        name = limits[tightest].kind
        raise RateLimited(
            f"the {name}'s limit of {limits[tightest].burst} requests per {limits[tightest].window_s} s is used up; "
            f"retry in {wait_s:.3f} s",
            headers={**_headers(limits, tightest, 0, reset_us[tightest]), **retry_after(wait_s)},
        )
    tightest = min(range(len(limits)), key=lambda i: remaining[i])
    return Charge(
        at=EPOCH + timedelta(microseconds=now_us),
        buckets=tuple(
            BucketCharge(bucket=b.name, interval_us=b.interval_us, burst=b.burst, cost=_COST, remaining=left)
            for b, left in zip(limits, remaining, strict=True)
        ),
        headers=_headers(limits, tightest, remaining[tightest], reset_us[tightest]),
    )


@lru_cache(maxsize=4096)
def _policy(limits: tuple[Limit, ...]) -> str:
    return ", ".join(f'"{b.kind}";q={b.burst};w={b.window_s}' for b in limits)


def _headers(limits: Sequence[Limit], tightest: int, remaining: int, reset_us: int) -> dict[str, str]:
    b = limits[tightest]
    return {
        "RateLimit-Policy": _policy(tuple(limits)),
        "RateLimit": f'"{b.kind}";r={remaining};t={-(-reset_us // 1_000_000)}',
        "x-ratelimit-limit-requests": str(b.burst),
        "x-ratelimit-remaining-requests": str(remaining),
        "x-ratelimit-reset-requests": f"{-(-reset_us // 1000)}ms",
    }


class Limiter:
    """Takes tokens. Calls that wait while a round trip is on its way go together in the next one."""

    def __init__(self, script: Script, keys: RedisKeys) -> None:
        self._script = script
        self._keys = keys
        self._prepared: dict[str, tuple[Sequence[Limit], LuaCall]] = {}
        self._waiting: list[tuple[LuaCall, asyncio.Future[Sequence[int]]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def take(self, demand: Demand) -> Charge:
        """Take one request. Raises RateLimited, Unauthorized (revoked key), Unavailable (Redis away)."""
        customer_id, key_id, limits = demand.caller.customer_id, demand.caller.key_id, demand.caller.limits
        decided: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._call(customer_id, key_id, limits), decided))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.ensure_future(self._send())
        try:
            answer = await decided
        except LimiterAway as error:
            raise Unavailable("limits cannot be checked now: Redis does not answer", code="limiter_away") from error
        return judge(answer, limits)

    def release(self, demand: Demand) -> None:
        """The call is over: its place among the unfinished is free."""

    def _call(self, customer_id: str, key_id: str, limits: Sequence[Limit]) -> LuaCall:
        known = self._prepared.get(key_id)
        if known is not None and known[0] is limits:  # the same object until the key is looked up again
            return known[1]
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        call = self._script.prepare(*script_call(self._keys, customer_id, key_id, limits))
        self._prepared[key_id] = (limits, call)
        return call

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_MAX_BATCH], self._waiting[_MAX_BATCH:]
            try:
                _settle(batch, await self._script.run([call for call, _ in batch]))
            except Exception as error:
                if not isinstance(error, LimiterAway):
                    logger.exception("the limiter failed for a reason nobody foresaw")
                # Those that still wait were never sent. They fail with the rest, or each would wait its own timeout.
                batch, self._waiting = batch + self._waiting, []
                _settle(batch, [error] * len(batch))
            except BaseException as error:  # cancelled with the event loop; nobody may be left waiting
                batch, self._waiting = batch + self._waiting, []
                _settle(batch, [error] * len(batch))
                raise


def _settle(batch: Sequence[tuple[LuaCall, asyncio.Future[Sequence[int]]]], answers: Sequence[Any]) -> None:
    for (_, decided), answer in zip(batch, answers, strict=True):
        if decided.done():
            continue  # its caller has left
        if isinstance(answer, BaseException):
            decided.set_exception(LimiterAway(f"{type(answer).__name__}: {answer}"))
        else:
            decided.set_result(answer)
