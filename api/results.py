"""Waits for results: the publish is a hint, the Redis key a copy, the results topic the truth.

One subscription serves every waiting request of this process. Hints can be lost, so whatever is still awaited is read
again after each reconnect and once a second; a result is only ever handed to the customer it belongs to.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast
from uuid import UUID

from api.errors import NO_RETRY, AnswerLost, ApiError, DeadlinePassed
from infra.redis import PubSub, Redis, RedisError
from schemas.codec import DecodeError, UnknownSchema, decode
from schemas.keys import RedisKeys
from schemas.records import InferenceFinished

logger = logging.getLogger(__name__)

#: Redis counts as away after this long without an answer; with a call's own bound, waiters hear of it within 2 s.
UNREACHABLE_S = 1.0
_SWEEP_S = 0.5
_RETRY_S = 0.1
_CALL_WITHIN_S = 0.5
_HINT_WAIT_S = 5.0
_READ_AT_ONCE = 256


class CacheAway(RuntimeError):
    """The results cache did not answer."""


class Hints(Protocol):
    """A subscription that the server has confirmed."""

    async def next(self, timeout_s: float) -> bytes | None:
        """The next hint, concatenated 16-byte request ids; None when none came in time. Raises CacheAway."""


class Cache(Protocol):
    """Where workers put results."""

    async def read(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """The values of these keys; without keys it only shows that the cache answers. Raises CacheAway."""

    def subscribe(self, channel: str) -> AbstractAsyncContextManager[Hints]:
        """A subscription, entered once the server has confirmed it. Raises CacheAway."""


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter:
    """One awaited request; `read_s` is when its key was last read.

    `asked` is set while its result is there and its schema unknown here: the question for newer schemas.
    """

    request_id: UUID
    customer_id: str
    key: str
    finished: asyncio.Future[InferenceFinished]
    read_s: float
    asked: int | None = None

    def refuse(self, error: ApiError) -> None:
        """End the wait with an error, unless it has ended."""
        if not self.finished.done():
            self.finished.set_exception(error)


class Schemas(Protocol):
    """Where schemas of newer writers are learnt from (infra.schema_feed.SchemaFeed fits)."""

    def ask(self) -> int:
        """Have what is published now learnt soon."""

    def answered(self, number: int) -> bool:
        """Whether that is done, for the number that `ask` gave."""


class Results:
    """The results this process waits for. `listen` and `sweep` run beside the handlers for ever."""

    def __init__(self, cache: Cache, keys: RedisKeys, *, instance: str, schemas: Schemas | None = None) -> None:
        self._cache = cache
        self._keys = keys
        self._instance = instance
        self._schemas = schemas
        self._waiting: dict[bytes, Waiter] = {}
        self._unreachable_since: float | None = None
        self._subscribed = False
        self._why = "not asked yet"

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return len(self._waiting)

    def trouble(self) -> str | None:
        """Why results do not arrive promptly now, None when they do."""
        return None if self._subscribed and self._unreachable_since is None else self._why

    def expect(self, request_id: UUID, customer_id: str) -> Waiter:
        """Start waiting. Call it before publishing, or the hint may come first; `forget` must follow."""
        waiter = Waiter(
            request_id=request_id,
            customer_id=customer_id,
            key=self._keys.result(request_id),
            finished=asyncio.get_running_loop().create_future(),
            read_s=time.monotonic(),
        )
        self._waiting[request_id.bytes] = waiter
        return waiter

    def forget(self, waiter: Waiter) -> None:
        """Stop waiting."""
        self._waiting.pop(waiter.request_id.bytes, None)
        if not waiter.finished.cancel() and not waiter.finished.cancelled():
            waiter.finished.exception()  # seen, also when the caller was told something else

    async def wait(self, waiter: Waiter, *, within_s: float) -> InferenceFinished:
        """The result. Raises DeadlinePassed after `within_s`, AnswerLost when Redis stays away; both name its id."""
        timer = asyncio.get_running_loop().call_later(within_s, _expire, waiter)
        try:
            return await waiter.finished
        finally:
            timer.cancel()

    async def listen(self) -> None:
        """Follow the hints for ever. After each (re)connect everything awaited is read: hints may have been missed."""
        channel = self._keys.results_channel(self._instance)
        while True:
            try:
                async with self._cache.subscribe(channel) as hints:
                    await self._read(list(self._waiting.values()))
                    self._subscribed = True
                    while True:
                        hint = await hints.next(_HINT_WAIT_S)
                        if hint:
                            ids = (hint[i : i + 16] for i in range(0, len(hint), 16))
                            await self._read([w for w in map(self._waiting.get, ids) if w is not None])
            except CacheAway as error:
                self._why = str(error)
                if self._subscribed:
                    logger.warning("the results subscription broke", extra={"fields": {"why": error}})
                self._subscribed = False
                await asyncio.sleep(_RETRY_S)

    async def sweep(self) -> None:
        """For ever: read again what has waited for long, and fail all waiters once Redis has been away too long."""
        pause_s = _SWEEP_S
        while True:
            await asyncio.sleep(pause_s)
            began_s = time.monotonic()
            try:
                await self._read([w for w in self._waiting.values() if began_s - w.read_s >= _SWEEP_S], probe=True)
            except CacheAway as error:
                self._unreachable(began_s, str(error))
                pause_s = _RETRY_S
            else:
                if self._unreachable_since is not None:
                    logger.info("the results cache answers again")
                self._unreachable_since = None
                pause_s = _SWEEP_S

    def _unreachable(self, began_s: float, why: str) -> None:
        self._why = why
        if self._unreachable_since is None:
            self._unreachable_since = began_s
            logger.warning("the results cache is away", extra={"fields": {"why": why}})
        if time.monotonic() - self._unreachable_since >= UNREACHABLE_S:
            for w in self._waiting.values():
                w.refuse(
                    AnswerLost(
                        f"request {w.request_id} was accepted; its result cannot be read now: Redis does not answer",
                        code="results_away",
                    )
                )

    async def drain(self, *, within_s: float) -> None:
        """Before the process ends: let waiting requests finish, then tell the rest which request they lost sight of."""
        if self._waiting:
            await asyncio.wait([w.finished for w in self._waiting.values()], timeout=within_s)
        for w in self._waiting.values():
            w.refuse(AnswerLost(f"request {w.request_id} was accepted, but this gateway is stopping", code="stopping"))

    async def _read(self, waiters: Sequence[Waiter], *, probe: bool = False) -> None:
        """Hand out the results that are there. With `probe`, ask the cache even when nothing is awaited."""
        for at in range(0, len(waiters) or int(probe), _READ_AT_ONCE):
            chunk = waiters[at : at + _READ_AT_ONCE]
            values = await self._cache.read([w.key for w in chunk])
            now_s = time.monotonic()
            for w, value in zip(chunk, values, strict=True):
                w.read_s = now_s
                if value is not None and not w.finished.done():
                    self._hand_out(w, value)

    def _hand_out(self, waiter: Waiter, value: bytes) -> None:
        fields = {"request_id": waiter.request_id}
        try:
            finished = decode(value, InferenceFinished)
        except DecodeError as error:
            if isinstance(error, UnknownSchema) and self._may_be_learnt(waiter):
                return  # the sweep reads it again
            logger.error("a result cannot be read", extra={"fields": {**fields, "why": error}})
            waiter.refuse(
                ApiError(
                    f"the result of request {waiter.request_id} cannot be read",
                    code="result_unreadable",
                    headers=NO_RETRY,
                )
            )
            return
        if finished.request_id != waiter.request_id or finished.customer_id != waiter.customer_id:
            # Never shown: for this caller there is no such result, and the wait goes on to its deadline.
            logger.error("a result belongs to another request or customer", extra={"fields": fields})
            return
        waiter.finished.set_result(finished)

    def _may_be_learnt(self, waiter: Waiter) -> bool:
        """Whether the schema of this result may still come: its worker may just be newer than this process."""
        if self._schemas is None:
            return False
        if waiter.asked is None:
            waiter.asked = self._schemas.ask()
        return not self._schemas.answered(waiter.asked)


def _expire(waiter: Waiter) -> None:
    words = f"request {waiter.request_id} was not answered before its deadline"
    waiter.refuse(DeadlinePassed(words, headers=NO_RETRY))  # it may have run all the same


class RedisCache:
    """Implements the port Cache."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def read(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """See Cache; over after `_CALL_WITHIN_S`, connecting included."""
        try:
            if not keys:
                await asyncio.wait_for(self._client.ping(), _CALL_WITHIN_S)
                return ()
            values: Any = await asyncio.wait_for(self._client.mget(keys), _CALL_WITHIN_S)
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            raise CacheAway(f"{type(error).__name__}: {error}") from error
        return cast(Sequence[bytes | None], values)

    @asynccontextmanager
    async def subscribe(self, channel: str) -> AsyncIterator[Hints]:
        """See Cache."""
        async with self._client.pubsub() as subscription:
            try:
                await subscription.subscribe(channel)
                confirmation = await subscription.get_message(timeout=1.0)
            except (RedisError, OSError, asyncio.TimeoutError) as error:
                raise CacheAway(f"{type(error).__name__}: {error}") from error
            if confirmation is None:
                raise CacheAway("a subscription was not confirmed in 1 s")
            yield _RedisHints(subscription)


class _RedisHints:
    def __init__(self, subscription: PubSub) -> None:
        self._subscription = subscription

    async def next(self, timeout_s: float) -> bytes | None:
        try:
            message = await self._subscription.get_message(ignore_subscribe_messages=True, timeout=timeout_s)
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            raise CacheAway(f"{type(error).__name__}: {error}") from error
        return message["data"] if message is not None else None
