"""The schemas topic, read from any offset to its end of the moment, without a group.

One reader serves one task at a time. Every wait has a deadline: a broker that stops answering raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from infra.kafka import AIOKafkaConsumer, BusUnavailable, KafkaError, TopicPartition, open_consumer
from infra.kafka_spans import read_spans, span_from
from infra.settings import KafkaSettings
from schemas.codec import Placed
from schemas.topics import SCHEMAS

_ANSWER_MS = 5_000
_READ_WITHIN_S = 15.0
#: What is read is there already: no fetch needs to wait for more.
_FETCH_WAIT_MS = 20


class SchemaLog(Protocol):
    """The schemas topic as whoever learns from it needs it (SchemaTopic fits)."""

    async def read(self, start: int) -> tuple[Sequence[Placed], int]:
        """The records from offset `start` to the present end, in order, and that end. Raises BusUnavailable."""


class SchemaTopic:
    """Implements SchemaLog."""

    def __init__(self, consumer: AIOKafkaConsumer, topic: str) -> None:
        self._consumer = consumer
        self._place = TopicPartition(topic, 0)

    async def read(self, start: int) -> tuple[Sequence[Placed], int]:
        """See SchemaLog; over after 15 s. A topic that is shorter than `start` was made anew: it is read whole."""
        try:
            return await asyncio.wait_for(self._read(start), _READ_WITHIN_S)
        except (KafkaError, asyncio.TimeoutError) as error:
            raise BusUnavailable(f"{self._place.topic}: {type(error).__name__}: {error}") from error

    async def _read(self, start: int) -> tuple[Sequence[Placed], int]:
        end: int = (await self._consumer.end_offsets([self._place]))[self._place]
        span = span_from(start, first=0, end=end)
        found: list[Placed] = []
        if span:
            async for records in read_spans(self._consumer, {self._place: span}):
                found += records
            # Until the next reading nothing is fetched: a fetch that waits for news holds up the question for the end.
            self._consumer.pause(self._place)
        return found, end


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
