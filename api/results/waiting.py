"""Waits for results: the publish is a hint, the Redis key a copy, the results topic the truth.

One subscription serves every waiting call of this process. Hints can be lost, so whatever is still awaited is read
again after each reconnect and twice a second; what Redis does not have then, or cannot tell, is looked for on the log.
A result is only ever handed to the customer it belongs to.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from api.errors import NO_RETRY, AnswerLost, ApiError, DeadlinePassed
from api.results.cache import Cache, CacheAway
from api.results.log import Schemas
from api.results.result_log import ResultLog
from schemas.codec import DecodeError, UnknownSchema, decode
from schemas.first_results import Recorded
from schemas.keys import RedisKeys
from schemas.records import InferenceFinished

logger = logging.getLogger(__name__)

#: Redis, or the log, counts as away after this long without an answer; with a call's own bound, waiters hear of it
#: within 2 s.
UNREACHABLE_S = 1.0
#: What was not read for this long is read again, and if it is not there, it is looked for on the log.
_AGAIN_S = 0.5
_SWEEP_S = 0.1
_PROBE_S = 0.5
_RETRY_S = 0.1
_HINT_WAIT_S = 5.0
_READ_AT_ONCE = 256
#: What was found on the log and is to be put back into Redis, at most; the rest is found there again.
_BACK_BYTES = 16 * 1024 * 1024


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter:
    """One waiting call; `read_s` is when the key of its request was last read.

    `admitted_s` (Unix) is when the request was admitted before, None when it is this call's own. `asked` is set while
    its result is there and its schema unknown here: the question for newer schemas.
    """

    request_id: UUID
    customer_id: str
    key: str
    finished: asyncio.Future[InferenceFinished]
    read_s: float
    admitted_s: float | None = None
    asked: int | None = None

    def refuse(self, error: ApiError) -> None:
        """End the wait with an error, unless it has ended."""
        if not self.finished.done():
            self.finished.set_exception(error)


class Results:
    """The results this process waits for. `listen` and `sweep` run beside the handlers for ever."""

    def __init__(
        self, cache: Cache, keys: RedisKeys, log: ResultLog, *, instance: str, schemas: Schemas | None = None
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._log = log
        self._instance = instance
        self._schemas = schemas
        #: Several calls may wait for one request: those that repeat it.
        self._waiting: dict[bytes, list[Waiter]] = {}
        self._unreachable_since: float | None = None
        self._probed_s = 0.0
        self._subscribed = False
        self._why = "not asked yet"
        self._back: dict[str, bytes] = {}
        self._back_bytes = 0
        self.counts: Counter[str] = Counter(results_put_back=0, results_not_put_back=0)
        log.deliver_to(self._from_log)

    @property
    def waiting(self) -> int:
        """Calls that wait now."""
        return sum(map(len, self._waiting.values()))

    def trouble(self) -> str | None:
        """Why results cannot be told now, None when they can, if only from the log."""
        slow = self.slowness()
        return None if slow is None or self._log.trouble() is None else slow

    def slowness(self) -> str | None:
        """Why results do not arrive promptly now, None when they do."""
        return None if self._subscribed and self._unreachable_since is None else self._why

    def expect(self, request_id: UUID, customer_id: str, *, admitted_at: datetime | None = None) -> Waiter:
        """Start waiting. Call it before publishing, or the hint may come first; `forget` must follow.

        `admitted_at` is for a request that was admitted before, for another call: its result may be there already.
        """
        waiter = Waiter(
            request_id=request_id,
            customer_id=customer_id,
            key=self._keys.result(request_id),
            finished=asyncio.get_running_loop().create_future(),
            read_s=time.monotonic(),
            admitted_s=None if admitted_at is None else admitted_at.timestamp(),
        )
        self._waiting.setdefault(request_id.bytes, []).append(waiter)
        since_s = time.time() if waiter.admitted_s is None else waiter.admitted_s
        self._log.expect(request_id.bytes, since_ms=int(1000 * since_s), is_new=waiter.admitted_s is None)
        return waiter

    async def look(self, waiter: Waiter) -> None:
        """Read at once: of a request that was published earlier the hint may be past. Never raises for an outage."""
        try:
            await self._read([waiter])
        except CacheAway:
            self._log.need(waiter.request_id.bytes)
        if waiter.admitted_s is not None and time.time() - waiter.admitted_s > _AGAIN_S:
            self._log.need(waiter.request_id.bytes)

    def forget(self, waiter: Waiter) -> None:
        """Stop waiting."""
        waiters = self._waiting.get(waiter.request_id.bytes, [])
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            self._waiting.pop(waiter.request_id.bytes, None)
            self._log.forget(waiter.request_id.bytes)
        if not waiter.finished.cancel() and not waiter.finished.cancelled():
            waiter.finished.exception()  # seen, also when the caller was told something else

    async def wait(self, waiter: Waiter, *, within_s: float) -> InferenceFinished:
        """The result. Raises DeadlinePassed after `within_s`, AnswerLost when neither Redis nor the log answers; both
        name its id."""
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
                    await self._read(self._awaited())
                    self._subscribed = True
                    while True:
                        hint = await hints.next(_HINT_WAIT_S)
                        if hint:
                            ids = (hint[i : i + 16] for i in range(0, len(hint), 16))
                            await self._read([w for i in ids for w in self._waiting.get(i, ())])
            except CacheAway as error:
                self._why = str(error)
                if self._subscribed:
                    logger.warning("the results subscription broke", extra={"fields": {"why": error}})
                self._subscribed = False
                await asyncio.sleep(_RETRY_S)

    async def sweep(self) -> None:
        """For ever: read again what has waited for long, and have the log searched for what Redis does not tell.

        Calls are failed once neither has answered for too long.
        """
        while True:
            await asyncio.sleep(_SWEEP_S if self._unreachable_since is None else _RETRY_S)
            began_s = time.monotonic()
            late = [w for w in self._awaited() if began_s - w.read_s >= _AGAIN_S and not w.finished.done()]
            try:
                await self._read(late, probe=began_s - self._probed_s >= _PROBE_S)
                await self._put_back()
            except CacheAway as error:
                self._unreachable(began_s, str(error))
            else:
                if self._unreachable_since is not None:
                    logger.info("the results cache answers again")
                self._unreachable_since = None
                for w in late:
                    if w.asked is None:
                        self._log.need(w.request_id.bytes)

    def _unreachable(self, began_s: float, why: str) -> None:
        self._why = why
        if self._unreachable_since is None:
            self._unreachable_since = began_s
            logger.warning("the results cache is away", extra={"fields": {"why": why}})
        self._back.clear()  # they would be old news when it is back
        self._back_bytes = 0
        for key in self._waiting:
            self._log.need(key)
        if min(time.monotonic() - self._unreachable_since, self._log.away_s()) >= UNREACHABLE_S:
            for w in self._awaited():
                words = "its result cannot be read now: neither Redis nor the log answers"
                w.refuse(AnswerLost(f"request {w.request_id} was accepted; {words}", code="results_away"))

    async def drain(self, *, within_s: float) -> None:
        """Before the process ends: let waiting requests finish, then tell the rest which request they lost sight of."""
        if self._waiting:
            await asyncio.wait([w.finished for w in self._awaited()], timeout=within_s)
        for w in self._awaited():
            w.refuse(AnswerLost(f"request {w.request_id} was accepted, but this gateway is stopping", code="stopping"))

    def _awaited(self) -> list[Waiter]:
        return [w for waiters in self._waiting.values() for w in waiters]

    async def _read(self, waiters: Sequence[Waiter], *, probe: bool = False) -> None:
        """Hand out the results that are there. With `probe`, ask the cache even when nothing is awaited."""
        for at in range(0, len(waiters) or int(probe), _READ_AT_ONCE):
            chunk = waiters[at : at + _READ_AT_ONCE]
            values = await self._cache.read([w.key for w in chunk])
            self._probed_s = now_s = time.monotonic()
            for w, value in zip(chunk, values, strict=True):
                w.read_s = now_s
                if value is not None and not w.finished.done():
                    self._read_out(w, value)

    def _read_out(self, waiter: Waiter, value: bytes) -> None:
        try:
            finished = decode(value, InferenceFinished)
        except DecodeError as error:
            if isinstance(error, UnknownSchema) and self._may_be_learnt(waiter):
                return  # the sweep reads it again
            fields = {"request_id": waiter.request_id, "why": error}
            logger.error("a result cannot be read", extra={"fields": fields})
            words = f"the result of request {waiter.request_id} cannot be read"
            waiter.refuse(ApiError(words, code="result_unreadable", headers=NO_RETRY))
            return
        _hand_out(waiter, finished)

    def _may_be_learnt(self, waiter: Waiter) -> bool:
        """Whether the schema of this result may still come: its worker may just be newer than this process."""
        if self._schemas is None:
            return False
        if waiter.asked is None:
            waiter.asked = self._schemas.ask()
        return not self._schemas.answered(waiter.asked)

    def _from_log(self, key: bytes, found: Recorded, is_needed: bool) -> None:
        waiters = self._waiting.get(key, [])
        for w in waiters:
            if not w.finished.done():
                _hand_out(w, found.finished)
        # What was only seen on the way is just being put there by its worker.
        if is_needed and waiters and self._unreachable_since is None:
            if self._back_bytes + len(found.framed) > _BACK_BYTES:
                self.counts["results_not_put_back"] += 1
                return
            self._back[waiters[0].key] = found.framed
            self._back_bytes += len(found.framed)

    async def _put_back(self) -> None:
        if self._back:
            back, self._back, self._back_bytes = self._back, {}, 0
            try:
                await self._cache.put_back(back)
            except CacheAway:
                self.counts["results_not_put_back"] += len(back)
                raise
            self.counts["results_put_back"] += len(back)


def _hand_out(waiter: Waiter, finished: InferenceFinished) -> None:
    if finished.request_id != waiter.request_id or finished.customer_id != waiter.customer_id:
        # Never shown: for this caller there is no such result, and the wait goes on to its deadline.
        fields = {"request_id": waiter.request_id}
        logger.error("a result belongs to another request or customer", extra={"fields": fields})
        return
    waiter.finished.set_result(finished)


def _expire(waiter: Waiter) -> None:
    words = f"request {waiter.request_id} was not answered before its deadline"
    waiter.refuse(DeadlinePassed(words, headers=NO_RETRY))  # it may have run all the same
