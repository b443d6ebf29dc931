"""How Kafka is reached: an idempotent producer, and consumers that read committed records.

With the other `kafka_` modules the only home of aiokafka (Faust makes its own consumer). Its errors become two of ours:
the log is away, or the record is too large for it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.errors import KafkaError, MessageSizeTooLargeError
from aiokafka.partitioner import murmur2

from infra.kafka_fetched import read_every_batch
from infra.settings import KafkaSettings
from schemas.headers import Headers

__all__ = [
    "AIOKafkaConsumer",
    "BusUnavailable",
    "ConsumerRebalanceListener",
    "ConsumerRecord",
    "HandedOver",
    "KafkaError",
    "KeyedRecord",
    "Producer",
    "RecordTooLarge",
    "RoundRobinPartitionAssignor",
    "TopicPartition",
    "open_consumer",
    "open_producer",
    "partition_of_key",
    "read_every_batch",
]


_STOP_S = 10.0


class BusUnavailable(RuntimeError):
    """Kafka did not acknowledge in time. The record may or may not be on the log."""


class RecordTooLarge(ValueError):
    """The record is larger than the topic takes; it is not on the log."""


class KeyedRecord(NamedTuple):
    """A record to be sent to the partition of its key."""

    topic: str
    key: bytes
    value: bytes
    headers: Headers | None = None


#: The future of an acknowledgement, and the records that it acknowledges.
HandedOver = tuple["asyncio.Future[Any]", list[KeyedRecord]]


def partition_of_key(key: bytes, partitions: int) -> int:
    """The partition every Kafka client picks for a key."""
    found: int = (murmur2(key) & 0x7FFFFFFF) % partitions
    return found


#: For keys that come again and again, such as customers; ids of requests would only push those out.
_partition_of_repeated_key = lru_cache(maxsize=8192)(partition_of_key)


class Producer:
    """Sends records and waits for all in-sync replicas; duplicates from its own retries are removed by the broker."""

    def __init__(self, client: AIOKafkaProducer) -> None:
        self._client = client

    async def enqueue(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers | None = None,
        timeout_s: float,
    ) -> asyncio.Future[Any]:
        """Hand a record to the sender and return the future of its acknowledgement.

        Raises BusUnavailable when not even the topic's layout can be learnt in time, RecordTooLarge.
        """
        try:
            future: asyncio.Future[Any] = await asyncio.wait_for(
                self._client.send(topic, value, key=key, partition=partition, headers=headers), timeout_s
            )
        except MessageSizeTooLargeError as error:
            raise RecordTooLarge(f"{topic}: a record of {len(value)} bytes is too large") from error
        except (KafkaError, asyncio.TimeoutError) as error:
            raise BusUnavailable(f"{topic}: {type(error).__name__}: {error}") from error
        return future

    async def enqueue_all(
        self, records: Sequence[KeyedRecord], *, timeout_s: float, keys_repeat: bool = False
    ) -> tuple[list[HandedOver], list[KeyedRecord]]:
        """Hand many records to the sender, and return what was handed over and what was not.

        Records of one partition go as ready-made batches, because a future and a call per record would cost more than
        the record. A record that was not handed over in time is certainly not on its way. `keys_repeat` says that
        most keys were seen before. Raises BusUnavailable when nothing was handed over, RecordTooLarge; then some of
        the records may be on their way.
        """
        sent: list[HandedOver] = []
        try:
            await asyncio.wait_for(self._enqueue_all(records, sent, keys_repeat=keys_repeat), timeout_s)
        except MessageSizeTooLargeError as error:
            raise RecordTooLarge(str(error)) from error
        except (KafkaError, asyncio.TimeoutError) as error:
            if not sent:
                raise BusUnavailable(f"{type(error).__name__}: {error}") from error
            handed = {id(record) for _, members in sent for record in members}
            return sent, [record for record in records if id(record) not in handed]
        return sent, []

    async def _enqueue_all(self, records: Sequence[KeyedRecord], sent: list[HandedOver], *, keys_repeat: bool) -> None:
        """Add to `sent` as it goes: the client queues a batch and returns without a wait in between."""
        pick = _partition_of_repeated_key if keys_repeat else partition_of_key
        counts = {topic: len(await self._client.partitions_for(topic)) for topic in {r.topic for r in records}}
        groups: defaultdict[tuple[str, int], list[KeyedRecord]] = defaultdict(list)
        for record in records:
            groups[record.topic, pick(record.key, counts[record.topic])].append(record)
        for (topic, partition), members in groups.items():
            at = 0
            while at < len(members):
                batch, first = self._client.create_batch(), at
                while at < len(members) and _fits(batch, members[at]):
                    at += 1
                if at == first:
                    raise RecordTooLarge(f"{topic}: a record of {len(members[at].value)} bytes is too large")
                batch.close()
                sent.append((await self._client.send_batch(batch, topic, partition=partition), members[first:at]))

    async def send(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers | None = None,
        timeout_s: float,
    ) -> None:
        """Send one record and wait for its acknowledgement. Raises BusUnavailable, RecordTooLarge.

        The way for single records on a hot path: a timer each, no task. Finding the topic's layout and room in its
        buffer is bounded by the client's own request timeout.
        """
        try:
            future = await self._client.send(topic, value, key=key, partition=partition, headers=headers)
            timer = asyncio.get_running_loop().call_later(timeout_s, _expire, future, topic, timeout_s)
            try:
                await future
            finally:
                timer.cancel()
        except MessageSizeTooLargeError as error:
            raise RecordTooLarge(f"{topic}: a record of {len(value)} bytes is too large") from error
        except KafkaError as error:
            raise BusUnavailable(f"{topic}: {type(error).__name__}: {error}") from error

    async def acknowledged(self, futures: Sequence[asyncio.Future[Any]], *, timeout_s: float) -> None:
        """Wait until every one of these records is acknowledged. Raises BusUnavailable, RecordTooLarge."""
        if not futures:
            return
        done, pending = await asyncio.wait(futures, timeout=timeout_s)
        errors = [e for e in (f.exception() for f in done) if e is not None]
        for future in pending:
            # Still on its way; nobody will ask again, so its late failure must not be reported as forgotten.
            future.add_done_callback(lambda f: None if f.cancelled() else f.exception())
        if errors:
            if isinstance(errors[0], MessageSizeTooLargeError):
                raise RecordTooLarge(str(errors[0])) from errors[0]
            raise BusUnavailable(f"{type(errors[0]).__name__}: {errors[0]}") from errors[0]
        if pending:
            raise BusUnavailable(f"{len(pending)} of {len(futures)} records were not acknowledged in {timeout_s:g} s")

    async def partitions(self, topic: str, *, timeout_s: float) -> int:
        """Number of partitions of a topic. Raises BusUnavailable."""
        try:
            return len(await asyncio.wait_for(self._client.partitions_for(topic), timeout_s))
        except (KafkaError, asyncio.TimeoutError) as error:
            raise BusUnavailable(f"{topic}: {type(error).__name__}: {error}") from error


def _fits(batch: Any, record: KeyedRecord) -> bool:
    """Append a record to a batch, unless the batch is full."""
    added = batch.append(timestamp=None, key=record.key, value=record.value, headers=record.headers or [])
    return added is not None


def _expire(future: asyncio.Future[Any], topic: str, timeout_s: float) -> None:
    if not future.done():
        future.set_exception(BusUnavailable(f"{topic}: a record was not acknowledged in {timeout_s:g} s"))


@asynccontextmanager
async def open_producer(
    settings: KafkaSettings, *, linger_ms: int = 0, request_timeout_ms: int = 10_000
) -> AsyncIterator[Producer]:
    """A started producer; on exit it flushes for at most `request_timeout_ms`. Raises BusUnavailable."""
    client = AIOKafkaProducer(
        bootstrap_servers=settings.bootstrap,
        acks="all",
        enable_idempotence=True,
        linger_ms=linger_ms,
        request_timeout_ms=request_timeout_ms,
        max_batch_size=256 * 1024,
        max_request_size=8 * 1024 * 1024,
        metadata_max_age_ms=60_000,
    )
    try:
        await client.start()
    except BaseException as error:
        await client.stop()  # also when the caller's deadline cancelled the start
        if isinstance(error, KafkaError):
            raise BusUnavailable(f"{settings.bootstrap}: {type(error).__name__}: {error}") from error
        raise
    try:
        yield Producer(client)
    finally:
        # Past the bound the broker is away; what was not acknowledged was never reported as sent.
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(client.stop(), request_timeout_ms / 1000)


@asynccontextmanager
async def open_consumer(
    settings: KafkaSettings, *, group: str | None, max_poll_records: int = 500, committed: bool = True, **options: Any
) -> AsyncIterator[AIOKafkaConsumer]:
    """A started consumer of committed records, with manual commits; `group=None` for readers that use `assign`.

    Without `committed` it also sees records of transactions that are open or were given up. What cannot be read of the
    log is a record with a value that no decoder takes (`infra.kafka_fetched`). Raises BusUnavailable when the broker
    cannot be reached.
    """
    read_every_batch()
    client = AIOKafkaConsumer(
        bootstrap_servers=settings.bootstrap,
        group_id=group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed" if committed else "read_uncommitted",
        max_poll_records=max_poll_records,
        **options,
    )
    try:
        await client.start()
    except BaseException as error:
        await client.stop()  # also when the caller's deadline cancelled the start
        if isinstance(error, KafkaError):
            raise BusUnavailable(f"{settings.bootstrap}: {type(error).__name__}: {error}") from error
        raise
    try:
        yield client
    finally:
        # aiokafka's fetcher swallows a first cancellation while it changes assignments, and stop() then waits for
        # ever (seen with 0.14.0); the cancellation at the deadline is a second one, which ends it.
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(client.stop(), _STOP_S)
