"""Requests that nobody waits for any more, read from the log while the worker runs: what has not started need not.

It saves work and promises nothing. A worker that cannot read them runs everything, and says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from uuid import UUID

from infra.kafka import AIOKafkaConsumer, BusUnavailable, KafkaError, TopicPartition, open_consumer
from infra.kafka_spans import spans_kept, spans_since
from infra.settings import KafkaSettings
from infra.tasks import end
from schemas.codec import DecodeError, Placed, decode_at
from schemas.records import InferenceRequested, RequestCancelled
from schemas.topics import CANCELLATIONS

log = logging.getLogger(__name__)

#: No request has a deadline further away than this (the bound of INFERLOG_DEADLINE_S).
LONGEST_DEADLINE_S = 600.0
MOST = 100_000
_POLL_MS = 1_000
#: However little comes, Kafka is asked this often whether it is there, and has so long to answer.
_ASK_EVERY_S, _ANSWER_WITHIN_S = 5.0, 5.0
_PAUSE_S, _CLOSE_WITHIN_S = 1.0, 2.0


class Cancellations:
    """What was read of the cancellations: whose request is no longer wanted, at most `most` of them, for as long as one
    of them may wait in a queue. `clock` gives Unix seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.time, most: int = MOST) -> None:
        self._clock = clock
        self._most = most
        # By request and whose word it is: until when it matters. In the order of the log, nearly that of times.
        self._ends_s: OrderedDict[tuple[UUID, str], float] = OrderedDict()
        self._why: str | None = "not read yet"
        self.counts: Counter[str] = Counter(cancellations_read=0, cancellations_unreadable=0)

    def __len__(self) -> int:
        return len(self._ends_s)

    def trouble(self) -> str | None:
        """Why they are not read now, None when they are."""
        return self._why

    def includes(self, request: InferenceRequested) -> bool:
        """Whether its own customer, or the gateway for it, no longer wants this request."""
        return (request.request_id, request.customer_id) in self._ends_s

    def take(self, record: Placed) -> None:
        """Take note of a record of the topic; one that cannot be read is only counted."""
        try:
            cancelled = decode_at(record, RequestCancelled)
        except DecodeError:
            self.counts["cancellations_unreadable"] += 1
            return
        now_s = self._clock()
        ends_s = min(cancelled.occurred_at.timestamp(), now_s) + LONGEST_DEADLINE_S
        if ends_s > now_s:
            self.counts["cancellations_read"] += 1
            self._ends_s.setdefault((cancelled.request_id, cancelled.customer_id), ends_s)
        self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        while self._ends_s:
            oldest = next(iter(self._ends_s))
            if len(self._ends_s) <= self._most and self._ends_s[oldest] > now_s:
                break
            del self._ends_s[oldest]

    async def follow(self, settings: KafkaSettings) -> None:
        """Read the topic for ever: what may still matter of the past, then what comes. Faults are waited out."""
        while True:
            try:
                async with open_consumer(settings, group=None) as consumer:
                    await self._read(consumer, CANCELLATIONS.in_namespace(settings.namespace).name)
            except (BusUnavailable, KafkaError, OSError, asyncio.TimeoutError) as error:
                self._fault(f"{type(error).__name__}: {error}")
            except Exception as error:
                log.exception("reading cancellations failed and starts again")
                self._fault(f"{type(error).__name__}: {error}")
            await asyncio.sleep(_PAUSE_S)

    async def _read(self, consumer: AIOKafkaConsumer, topic: str) -> None:
        if topic not in await asyncio.wait_for(consumer.topics(), _ANSWER_WITHIN_S):
            raise BusUnavailable(f"topic {topic} is missing; run 'inferlog provision'")
        place = TopicPartition(topic, 0)
        kept = await asyncio.wait_for(spans_kept(consumer, [place]), _ANSWER_WITHIN_S)
        since_ms = round((self._clock() - LONGEST_DEADLINE_S) * 1000)
        spans = await asyncio.wait_for(spans_since(consumer, kept, since_ms=since_ms), _ANSWER_WITHIN_S)
        consumer.assign([place])
        consumer.seek(place, spans[place].start)
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        while True:
            for record in (await consumer.getmany(place, timeout_ms=_POLL_MS)).get(place, ()):
                self.take(record)
            if loop.time() - asked_s > _ASK_EVERY_S or self._why is not None:
                await asyncio.wait_for(consumer.end_offsets([place]), _ANSWER_WITHIN_S)
                asked_s = loop.time()
                if self._why is not None:
                    log.info("cancellations are read")
                self._why = None

    def _fault(self, why: str) -> None:
        if self._why is None:
            log.warning("cancellations are not read now: every request is run", extra={"fields": {"reason": why}})
        self._why = why


@asynccontextmanager
async def open_cancellations(settings: KafkaSettings) -> AsyncIterator[Cancellations]:
    """Cancellations, followed while the block runs. Opening them waits for nothing and never fails."""
    found = Cancellations()
    following = asyncio.ensure_future(found.follow(settings))
    try:
        yield found
    finally:
        await end([following], within_s=_CLOSE_WITHIN_S)
