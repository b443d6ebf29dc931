"""Puts a stream's records on the usage topic, each until Kafka has acknowledged it: whatever is lost, not here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

from infra.kafka import KeyedRecord, open_producer
from infra.settings import KafkaSettings
from schemas.codec import encode
from schemas.records import UsageRecorded
from schemas.topics import USAGE
from tests.conditions import eventually
from tests.storms.usage_stream import UsageStream

_TICK_S = 0.05
_BATCH = 2000
_WITHIN_S = 300.0


class Sender:
    """`sent` records were acknowledged; of those `resent` perhaps lie on the topic more often than once.

    With `scatter`, a customer's records and a request's repetitions go to any partition, so that all workers have the
    same customers in hand; otherwise to the customer's own, as the product's do.
    """

    def __init__(self, producer: Any, stream: UsageStream, *, topic: str, scatter: bool = False) -> None:
        self._producer = producer
        self._stream = stream
        self._source = stream.records()
        self._topic = topic
        self._scatter = scatter
        self.sent = 0
        self.resent = 0

    async def pour(self, seconds: float) -> None:
        """All of the stream, evenly over the time."""
        total = self._stream.mix.events * (1 + self._stream.mix.repeated)
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            passed = (loop.time() - began) / seconds
            due = int(passed * total) + 1 - self.sent if passed < 1 else _BATCH  # how many repeat is only about known
            if due <= 0:
                await asyncio.sleep(_TICK_S)
            elif not await self._send(min(due, _BATCH)):
                return

    async def feed(self, seconds: float, *, ahead: int, reached: Callable[[], Awaitable[int]]) -> None:
        """For that long as much as is taken: never more than so many records ahead of what was `reached`."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        while loop.time() < ends:
            if self.sent - await reached() >= ahead or not await self._send(_BATCH):
                await asyncio.sleep(_TICK_S)

    async def _send(self, count: int) -> bool:
        """The next records; False when there are none."""
        records = [self._keyed(record, n) for n, record in enumerate(islice(self._source, count), start=self.sent)]
        left = records

        async def all_are() -> bool:
            nonlocal left
            handed, left = await self._producer.enqueue_all(left, timeout_s=20, keys_repeat=True)
            if handed:
                await asyncio.wait([future for future, _ in handed])
            for future, members in handed:
                if future.exception() is not None:
                    self.resent += len(members)  # perhaps written, perhaps not: one more repetition
                    left += members
            return not left

        if records:
            await eventually(all_are, timeout_s=_WITHIN_S, what="Kafka to take all records")
        self.sent += len(records)
        return bool(records)

    def _keyed(self, record: UsageRecorded, number: int) -> KeyedRecord:
        key = b"%d" % (number % 61) if self._scatter else record.customer_id.encode()
        return KeyedRecord(self._topic, key, encode(record))


@asynccontextmanager
async def open_sender(kafka: KafkaSettings, stream: UsageStream, *, scatter: bool = False) -> AsyncIterator[Sender]:
    """A sender with a producer of its own, which bears a broker that is away for a while."""
    topic = USAGE.in_namespace(kafka.namespace).name
    async with open_producer(kafka, linger_ms=5, request_timeout_ms=30_000) as producer:
        yield Sender(producer, stream, topic=topic, scatter=scatter)
