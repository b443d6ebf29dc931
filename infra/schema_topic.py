"""The schemas topic, read from any offset to its end of the moment, without a group, and never held as a whole.

One reader serves one task at a time. Every wait has a deadline: a broker that stops answering raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

from infra.kafka import AIOKafkaConsumer, BusUnavailable, KafkaError, TopicPartition, open_consumer
from infra.kafka_spans import read_spans, span_from
from infra.settings import KafkaSettings
from schemas.codec import Placed
from schemas.topics import SCHEMAS

_ANSWER_MS = 5_000
_END_WITHIN_S = 15.0
#: What is read is there already: no fetch needs to wait for more.
_FETCH_WAIT_MS = 20


Take = Callable[[Placed], None]


class SchemaLog(Protocol):
    """The schemas topic as whoever learns from it needs it (SchemaTopic fits)."""

    async def read(self, start: int, take: Take) -> int:
        """Hand over each record from offset `start` to the present end, in order, and return that end.

        Raises BusUnavailable; what was taken until then need not be read again.
        """


class SchemaTopic:
    """Implements SchemaLog."""

    def __init__(self, consumer: AIOKafkaConsumer, topic: str) -> None:
        self._consumer = consumer
        self._place = TopicPartition(topic, 0)

    async def read(self, start: int, take: Take) -> int:
        """See SchemaLog. A topic that is shorter than `start` was made anew: it is read whole."""
        try:
            ends = await asyncio.wait_for(self._consumer.end_offsets([self._place]), _END_WITHIN_S)
            end: int = ends[self._place]
            if span := span_from(start, first=0, end=end):
                async with aclosing(read_spans(self._consumer, {self._place: span})) as reading:
                    async for records in reading:
                        for record in records:
                            take(record)
                # Until the next reading nothing is fetched: a fetch that waits for news holds up the question for the
                # end.
                self._consumer.pause(self._place)
        except (BusUnavailable, KafkaError, asyncio.TimeoutError) as error:
            raise BusUnavailable(f"{self._place.topic}: {type(error).__name__}: {error}") from error
        return end


@asynccontextmanager
async def open_schema_topic(settings: KafkaSettings) -> AsyncIterator[SchemaTopic]:
    """A reader of this installation's schemas. Raises BusUnavailable, also when the topic was never made."""
    topic = SCHEMAS.in_namespace(settings.namespace).name
    async with open_consumer(
        settings, group=None, request_timeout_ms=_ANSWER_MS, fetch_max_wait_ms=_FETCH_WAIT_MS
    ) as consumer:
        try:
            known = await asyncio.wait_for(consumer.topics(), _ANSWER_MS / 1000)
        except (KafkaError, asyncio.TimeoutError) as error:
            raise BusUnavailable(f"{settings.bootstrap}: {type(error).__name__}: {error}") from error
        if topic not in known:
            raise BusUnavailable(f"topic {topic} is missing; run 'inferlog provision'")
        yield SchemaTopic(consumer, topic)
