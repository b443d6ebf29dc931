"""A topic read from its beginning to ends that were frozen before, without a group, committed records only.

Live offsets are never touched. Every wait has a deadline: a broker that stops answering raises, nothing hangs.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from uuid import UUID

from infra.kafka import AIOKafkaConsumer, BusUnavailable, TopicPartition, open_consumer
from infra.kafka_spans import read_spans, spans_kept, spans_since
from infra.kafka_topic_ids import topic_ids
from infra.schema_feed import learn_once
from infra.settings import KafkaSettings
from schemas.ids import EPOCH

log = logging.getLogger(__name__)

_FIRST, _LAST = datetime.min.replace(tzinfo=timezone.utc), datetime.max.replace(tzinfo=timezone.utc)

#: Told (topic, records read, records in range) after each step; the second may end below the third, which counts
#: offsets, and some offsets hold transaction markers.
Progress = Callable[[str, int, int], None]


def no_progress(_topic: str, _done: int, _total: int) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """One record as it lies on the log; `time` is the broker's timestamp, UTC."""

    topic: str
    partition: int
    offset: int
    time: datetime
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What of a partition is to be read: offsets in [begin, end). `first` is the oldest that is still kept."""

    first: int
    begin: int
    end: int

    @property
    def trimmed(self) -> bool:
        """True when retention has removed records that this span would begin with."""
        return self.first > 0 and self.begin <= self.first


def moment(timestamp_ms: int) -> datetime:
    """A record's timestamp, Unix milliseconds, as a time; one that no calendar has is the first or the last there is.

    Producers choose it, so it may be anything, and reading must go on past it.
    """
    try:
        return EPOCH + timedelta(milliseconds=timestamp_ms)
    except OverflowError:
        return _LAST if timestamp_ms > 0 else _FIRST


class LogReader:
    """Reads topics by place. One reader serves one task at a time."""

    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        self._consumer = consumer

    async def freeze(self, topic: str, partitions: int, *, since: datetime | None = None) -> dict[int, Span]:
        """The span of each partition as of now; with `since`, beginning at the first record written then or later.

        Raises BusUnavailable.
        """
        places = [TopicPartition(topic, p) for p in range(partitions)]
        try:
            kept = spans = await spans_kept(self._consumer, places)
            if since is not None:
                # Kafka knows no time before 1970.
                spans = await spans_since(self._consumer, kept, since_ms=max(0, int(since.timestamp() * 1000)))
        except BusUnavailable as error:
            raise BusUnavailable(f"{topic}: {error}") from error
        return {p.partition: Span(first=kept[p].start, begin=spans[p].start, end=spans[p].stop) for p in places}

    async def read(
        self, topic: str, spans: Mapping[int, Span], *, progress: Progress = no_progress
    ) -> AsyncGenerator[LogRecord, None]:
        """Every committed record of these spans, in order of offset within each partition.

        Holds one fetch in memory at a time. Raises BusUnavailable when nothing comes for half a minute.
        """
        ahead = {TopicPartition(topic, p): range(s.begin, s.end) for p, s in spans.items()}
        total = sum(s.end - s.begin for s in spans.values())
        done = 0
        progress(topic, done, total)
        # Left assigned at the end: the next reading replaces it.
        async with aclosing(read_spans(self._consumer, ahead)) as batches:
            async for records in batches:
                for r in records:
                    done += 1
                    yield LogRecord(
                        topic=topic,
                        partition=r.partition,
                        offset=r.offset,
                        time=moment(r.timestamp),
                        key=r.key,
                        value=r.value,
                    )
                progress(topic, done, total)

    async def topic_id(self, topic: str) -> UUID | None:
        """Which topic the name stands for now; None when there is none, or the broker tells no ids.

        Raises BusUnavailable.
        """
        return (await topic_ids(self._consumer._client, [topic])).get(topic)

    async def first(self, topic: str, partition: int, *, begin: int, end: int) -> LogRecord | None:
        """The first committed record in [begin, end) of a partition; None when only markers lie there."""
        span = Span(first=0, begin=begin, end=end)
        async with aclosing(self.read(topic, {partition: span})) as reading:
            async for record in reading:
                return record
        return None


@asynccontextmanager
async def open_log(settings: KafkaSettings, *, decodes: bool = True) -> AsyncIterator[LogReader]:
    """A reader of the log; raises BusUnavailable when the broker cannot be reached.

    Unless the caller never decodes a record, this process then knows the schemas of newer writers.
    """
    async with open_consumer(settings, group=None, max_poll_records=2000, request_timeout_ms=10_000) as consumer:
        if decodes:
            await _learn_schemas(settings)
        yield LogReader(consumer)


async def _learn_schemas(settings: KafkaSettings) -> None:
    try:
        await learn_once(settings)
    except BusUnavailable as error:  # records of newer writers then count as undecodable, which every report tells
        log.warning("schemas of newer writers are not known here", extra={"fields": {"reason": error}})
