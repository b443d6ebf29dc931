"""Topics searched by time and followed from their end, by a consumer without a group.

For whoever needs few records of a long topic, soon. Every wait has a deadline: a broker that stops answering raises.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import aclosing, asynccontextmanager

from infra.kafka import AIOKafkaConsumer, BusUnavailable, ConsumerRecord, KafkaError, TopicPartition, open_consumer
from infra.kafka_spans import read_spans, spans_kept, spans_since
from infra.settings import KafkaSettings

_OPEN_WITHIN_S = 3.0
_ANSWER_MS = 2_000
#: A fetch that waits for news holds up the questions for offsets, so it waits only this long.
_FETCH_WAIT_MS = 25
#: Of what a look-up fetches it seldom needs more than this.
_FETCH_BYTES = 256 * 1024
_LAYOUT_FOR_S = 10.0


class Lookup:
    """A reader of topics. It serves one task at a time."""

    def __init__(self, consumer: AIOKafkaConsumer) -> None:
        self._consumer = consumer
        self._partitions: dict[str, int] = {}
        self._layout_s = float("-inf")

    async def partitions(self, topic: str) -> int:
        """How many partitions a topic has, 0 where there is no such topic. Raises BusUnavailable."""
        if topic not in self._partitions or time.monotonic() - self._layout_s > _LAYOUT_FOR_S:
            try:
                layout = await asyncio.wait_for(self._consumer._client.fetch_all_metadata(), _ANSWER_MS / 1000)
            except (KafkaError, asyncio.TimeoutError) as error:
                raise BusUnavailable(f"{topic}: {type(error).__name__}: {error}") from error
            self._partitions = {name: len(layout.partitions_for_topic(name) or ()) for name in layout.topics()}
            self._layout_s = time.monotonic()
        return self._partitions.get(topic, 0)

    async def ends(self, topic: str, partitions: Collection[int]) -> dict[int, int]:
        """The offsets behind the last committed records. Raises BusUnavailable."""
        try:
            ends = await self._consumer.end_offsets([TopicPartition(topic, p) for p in partitions])
        except KafkaError as error:
            raise BusUnavailable(f"{topic}: {type(error).__name__}: {error}") from error
        return {place.partition: end for place, end in ends.items()}

    async def between(
        self, topic: str, partitions: Collection[int], *, since_ms: int, until_ms: int | None = None
    ) -> dict[int, range]:
        """Per partition the offsets from the first record stamped `since_ms` (Unix) or later to the present end.

        With `until_ms` they end before the first record stamped then or later. Raises BusUnavailable.
        """
        kept = await spans_kept(self._consumer, [TopicPartition(topic, p) for p in partitions])
        found = await spans_since(self._consumer, kept, since_ms=max(0, since_ms))
        if until_ms is not None:
            rest = await spans_since(self._consumer, kept, since_ms=max(0, until_ms))
            # A record with a time far ahead is the first of both; what is behind it is not left out here.
            found = {place: range(s.start, max(s.start, rest[place].start)) for place, s in found.items()}
        return {place.partition: span for place, span in found.items()}

    async def read(self, topic: str, spans: Mapping[int, range]) -> AsyncGenerator[list[ConsumerRecord], None]:
        """Every committed record of these offsets, some at a time, in order within each partition.

        Raises BusUnavailable.
        """
        ahead = {TopicPartition(topic, p): span for p, span in spans.items()}
        try:
            async with aclosing(read_spans(self._consumer, ahead)) as batches:
                async for records in batches:
                    yield records
        finally:
            self.rest()

    def follow(self, topic: str, heads: Mapping[int, int]) -> None:
        """Have `news` read these partitions and no others, each from this offset on."""
        places = {TopicPartition(topic, partition): head for partition, head in heads.items()}
        self._consumer.assign(list(places))
        for place, head in places.items():
            self._consumer.seek(place, head)

    async def news(self, *, within_s: float) -> tuple[list[ConsumerRecord], dict[int, int]]:
        """What came since the last call, after at most `within_s`, and where each partition is read on.

        A broker that is away is no error here: ask it for `ends`. Raises BusUnavailable for an error of its.
        """
        try:
            fetched = await self._consumer.getmany(timeout_ms=round(within_s * 1000))
            heads = {}
            for place in self._consumer.assignment():
                heads[place.partition] = await asyncio.wait_for(self._consumer.position(place), _ANSWER_MS / 1000)
        except (KafkaError, asyncio.TimeoutError) as error:
            raise BusUnavailable(f"{type(error).__name__}: {error}") from error
        return [record for records in fetched.values() for record in records], heads

    def rest(self) -> None:
        """Fetch nothing until the next reading."""
        self._consumer.pause(*self._consumer.assignment())


@asynccontextmanager
async def open_lookup(settings: KafkaSettings) -> AsyncIterator[Lookup]:
    """A started one. Raises BusUnavailable."""
    opening = open_consumer(
        settings,
        group=None,
        max_poll_records=1000,
        request_timeout_ms=_ANSWER_MS,
        fetch_max_wait_ms=_FETCH_WAIT_MS,
        max_partition_fetch_bytes=_FETCH_BYTES,
    )
    try:
        consumer = await asyncio.wait_for(opening.__aenter__(), _OPEN_WITHIN_S)
    except asyncio.TimeoutError as error:
        raise BusUnavailable(f"{settings.bootstrap}: not connected within {_OPEN_WITHIN_S:g} s") from error
    try:
        yield Lookup(consumer)
    finally:
        await opening.__aexit__(None, None, None)
