"""What became of a request, by its id: read from Redis, then from the log, and from nothing else.

    1 its result in Redis
    2 its result on the log, among those stamped around the time inside its id
    3 the request itself on the log of its pool: without it, it was never accepted, and there is nothing to be told
    4 its result further on, up to the end of the log: without one, it is accepted and not finished

Each look-up has a deadline and a bound on what it reads; one that meets it goes on where it was when it is asked again.
A customer's look-ups come one after the other, so that customers take turns with the readers of the log.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from api.errors import NotFound, Unavailable
from api.results.cache import Cache, CacheAway
from api.results.log import Entry, Log, size_bytes
from api.results.readers import Readers
from infra.kafka import BusUnavailable, partition_of_key
from infra.schema_feed import learn_nothing
from schemas.codec import DecodeError, UnknownSchema, decode
from schemas.first_results import SLACK_MS, FirstResults, Recorded
from schemas.ids import request_time
from schemas.keys import RedisKeys, prefixed
from schemas.records import InferenceFinished, InferenceRequested
from schemas.topics import RESULTS, requests_topic

#: The most that one look-up reads of results, and of requests.
LOOK_BYTES = 32 * 1024 * 1024
#: How long it reads, once it has a reader. It stops by itself then, so that its reader can be used again; where the
#: broker says nothing it cannot, and somewhat later the reader is thrown away.
WITHIN_S = 2.0
_SILENCE_S = 1.0
_LATE = f"not found within {WITHIN_S:g} s"
#: From when an id is made, at the head of its call, until the call has its deadline: its body is read meanwhile.
_HEAD_S = 20.0
#: Unfinished requests that were found, and how far their results' partition was searched.
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A request that is on the log and has no result yet."""

    request_id: UUID
    customer_id: str
    model: str
    version: str
    admitted_at: datetime
    deadline_at: datetime


@dataclass(slots=True, eq=False, kw_only=True)
class _Search:
    """Where the search for one result stands: its first records so far, and the offset to read on from.

    `left_bytes` is what the call at hand may still read of results.
    """

    partition: int
    at: int
    first: FirstResults
    left_bytes: int = 0
    accepted: Accepted | None = None


class _Unclear(Exception):
    """It cannot be told now, for a reason that is not the reader's: it can be used again."""


class RequestStatus:
    """Answers by id. `pools` names the pools that there are, `deadline_s` is the longest a call waits.

    `counts` says what was read since the start.
    """

    def __init__(
        self,
        cache: Cache,
        keys: RedisKeys,
        readers: Readers,
        *,
        namespace: str,
        pools: Callable[[], Collection[str]],
        deadline_s: float,
        learn_schemas: Callable[[], Awaitable[None]] = learn_nothing,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._readers = readers
        self._namespace = namespace
        self._results = RESULTS.in_namespace(namespace).name
        self._pools = pools
        #: A request is on the log within this time of its id, and its result, unless the queue is long.
        self._soon_ms = round(1000 * (_HEAD_S + deadline_s))
        self._learn_schemas = learn_schemas
        self._clock = clock
        self._unfinished: OrderedDict[UUID, _Search] = OrderedDict()
        self.counts: Counter[str] = Counter(status_looks=0, status_bytes=0, status_unknown=0)

    async def of(self, request_id: UUID, customer_id: str) -> InferenceFinished | Accepted:
        """The result of this customer's request, or the request when it has none yet.

        Raises NotFound, for another customer's request as for none; RateLimited for too many at once; Unavailable
        when it cannot be told now.
        """
        found = await self._copy(request_id) or await self._on_log(request_id, customer_id)
        told = found.finished if isinstance(found, Recorded) else found
        if told is None or told.customer_id != customer_id:
            raise _unknown(request_id)
        if isinstance(found, Recorded):
            await self._put_back(request_id, found)
        return told

    async def _copy(self, request_id: UUID) -> InferenceFinished | None:
        try:
            (value,) = await self._cache.read([self._keys.result(request_id)])
            found = None if value is None else decode(value, InferenceFinished)
        except (CacheAway, DecodeError):  # the log has it, too
            return None
        return found if found is not None and found.request_id == request_id else None

    async def _on_log(self, request_id: UUID, customer_id: str) -> Recorded | Accepted | None:
        made = request_time(request_id)
        if made is None or made.timestamp() > self._clock() + SLACK_MS / 1000:
            return None  # no id of ours
        try:
            return await self._with_a_reader(request_id, customer_id, int(made.timestamp() * 1000))
        except (BusUnavailable, _Unclear) as error:
            self.counts["status_unknown"] += 1
            raise _untold(request_id, str(error)) from error

    async def _with_a_reader(self, request_id: UUID, customer_id: str, made_ms: int) -> Recorded | Accepted | None:
        """Raises BusUnavailable with a reader that is not to be used again, _Unclear once it was given back."""
        async with self._readers.one(customer_id) as log:
            self.counts["status_looks"] += 1
            until_s = asyncio.get_running_loop().time() + WITHIN_S
            try:
                return await asyncio.wait_for(self._look(log, request_id, made_ms, until_s), WITHIN_S + _SILENCE_S)
            except asyncio.TimeoutError as error:
                raise BusUnavailable(_LATE) from error
            except _Unclear as error:
                unclear = error
        raise unclear

    async def _look(self, log: Log, request_id: UUID, made_ms: int, until_s: float) -> Recorded | Accepted | None:
        search = self._unfinished.get(request_id)
        if search is None:
            search = await self._begun(log, request_id)
            # The broker's clock is the writers', and theirs may differ from that of whoever made the id.
            near = await log.between(
                self._results, [search.partition], since_ms=made_ms - SLACK_MS, until_ms=made_ms + self._soon_ms
            )
            search.at = near[search.partition].start
            search.left_bytes = LOOK_BYTES
            if found := await self._result(log, search, request_id, near[search.partition].stop, until_s):
                return found
            search.accepted = await self._request(log, request_id, made_ms, until_s)
            if search.accepted is None:
                return None
            self._remember(request_id, search)
        search.left_bytes = LOOK_BYTES
        end = (await log.ends(self._results, [search.partition]))[search.partition]
        if found := await self._result(log, search, request_id, end, until_s):
            return found
        if search.at < end:
            raise _Unclear("the log has more results since then than one look-up may read")
        return search.accepted

    async def _begun(self, log: Log, request_id: UUID) -> _Search:
        count = await log.partitions(self._results)
        if not count:
            raise BusUnavailable(f"topic {self._results} is missing")
        first = FirstResults()
        first.look_for(request_id.bytes, 0, partition=0)
        return _Search(partition=partition_of_key(request_id.bytes, count), at=0, first=first)

    async def _result(self, log: Log, search: _Search, request_id: UUID, until: int, until_s: float) -> Recorded | None:
        """Read on to `until`, or as far as may be read. Raises BusUnavailable, and _Unclear when the time is up."""
        key = request_id.bytes
        async with aclosing(log.read(self._results, {search.partition: range(search.at, until)})) as batches:
            async for records in batches:
                for record in records:
                    if record.key == key:
                        search.first.offer(key, record.value)
                if records:
                    search.at = records[-1].offset + 1
                search.left_bytes -= self._read(records)
                if search.first.unlearnt:
                    await self._learn_schemas()
                    search.first.look_again()
                if key in search.first.found or search.left_bytes <= 0:
                    return search.first.found.get(key)
                _in_time(until_s)
        search.at = max(search.at, until)
        return None

    async def _request(self, log: Log, request_id: UUID, made_ms: int, until_s: float) -> Accepted | None:
        """The request on the log of any pool. Which partition is decided by its version, which only it tells.

        Raises BusUnavailable, and _Unclear when the time is up or there is more than may be read.
        """
        left_bytes, key = LOOK_BYTES, request_id.bytes
        for pool in sorted(self._pools()):
            topic = prefixed(self._namespace, requests_topic(pool).name)
            count = await log.partitions(topic)
            spans: Mapping[int, range] = {}
            if count:
                spans = await log.between(
                    topic, range(count), since_ms=made_ms - SLACK_MS, until_ms=made_ms + self._soon_ms
                )
            async with aclosing(log.read(topic, spans)) as batches:
                async for records in batches:
                    for record in records:
                        if record.key == key and (found := await self._accepted(record.value)).request_id == request_id:
                            return found
                    left_bytes -= self._read(records)
                    if left_bytes <= 0:
                        raise _Unclear("the log has more requests of that time than one look-up may read")
                    _in_time(until_s)
        return None

    async def _accepted(self, value: bytes | None) -> Accepted:
        """Raises _Unclear for what cannot be read here: nobody can tell whose it is."""
        try:
            try:
                request = decode(value or b"", InferenceRequested)
            except UnknownSchema:
                await self._learn_schemas()
                request = decode(value or b"", InferenceRequested)
        except DecodeError as error:
            raise _Unclear(f"it lies on the log and cannot be read here: {error}") from error
        return Accepted(
            request_id=request.request_id,
            customer_id=request.customer_id,
            model=request.model,
            version=request.version,
            admitted_at=request.occurred_at,
            deadline_at=request.deadline_at,
        )

    async def _put_back(self, request_id: UUID, found: Recorded) -> None:
        """A copy of the result, where Redis is there."""
        self._unfinished.pop(request_id, None)
        try:
            await self._cache.put_back({self._keys.result(request_id): found.framed})
        except CacheAway:
            self.counts["status_not_put_back"] += 1

    def _remember(self, request_id: UUID, search: _Search) -> None:
        self._unfinished[request_id] = search
        while len(self._unfinished) > _REMEMBERED:
            self._unfinished.popitem(last=False)

    def _read(self, records: Sequence[Entry]) -> int:
        """Count what was read; returns how many bytes that is."""
        self.counts["status_bytes"] += (read_bytes := size_bytes(records))
        return read_bytes


def _in_time(until_s: float) -> None:
    """Raises _Unclear when a look-up has read for as long as it may."""
    if asyncio.get_running_loop().time() > until_s:
        raise _Unclear(_LATE)


def _unknown(request_id: UUID) -> NotFound:
    return NotFound(f"there is no request {request_id}", code="request_not_found")


def _untold(request_id: UUID, why: str) -> Unavailable:
    return Unavailable(
        f"what became of request {request_id} cannot be told now: {why}; ask again", code="status_unknown"
    )
