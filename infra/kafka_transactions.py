"""Records published all or none, by one publisher at a time: opening one fences every earlier one of the same id.

Kafka keeps an epoch per transactional id. Opening a publisher raises it, ends whatever its predecessor left open, and
from then on refuses the predecessor's records and commits, however late they come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final
from uuid import UUID

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    BrokerNotAvailableError,
    BrokerResponseError,
    ClusterAuthorizationFailedError,
    ConcurrentTransactions,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTxnState,
    KafkaError,
    OutOfOrderSequenceNumber,
    ProducerFenced,
    ReplicaNotAvailableError,
    TransactionalIdAuthorizationFailed,
    TransactionCoordinatorFenced,
    UnknownProducerId,
)

from infra.kafka import BusUnavailable, KeyedRecord
from infra.kafka_topic_ids import Position, topic_ids
from infra.settings import KafkaSettings

#: Nothing that has an order may be spread over several partitions.
PARTITION: Final = 0
_START_S: Final = 20.0
_END_S: Final = 0.5
# Answers that are final, though none is about the records: the broker is not ready, or this producer is of no more use.
# aiokafka calls an answer that it has no name for UnknownError; that one is about the records, as far as can be told.
_ABOUT_THE_PRODUCER: Final = (
    BrokerNotAvailableError,
    ClusterAuthorizationFailedError,
    ConcurrentTransactions,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTxnState,
    OutOfOrderSequenceNumber,
    ReplicaNotAvailableError,
    TransactionalIdAuthorizationFailed,
    TransactionCoordinatorFenced,
    UnknownProducerId,
)


class Fenced(BusUnavailable):
    """Another publisher of the same id was opened since, or a transaction took longer than it may."""


class Refused(ValueError):
    """Kafka will not take one of the records, now or until a person changes something; none of them was published.

    `topic` is the one that takes no record at all; None when some record is to blame, and which is not known.
    """

    def __init__(self, reason: str, *, topic: str | None = None) -> None:
        super().__init__(reason)
        self.topic = topic


def is_refusal(error: KafkaError) -> bool:
    """Whether this answer to records stays the same, and is about one of them, its topic or a permission for it."""
    return isinstance(error, BrokerResponseError) and not error.retriable and not isinstance(error, _ABOUT_THE_PRODUCER)


class Publisher:
    """Publishes in transactions. After any exception of `publish` it is of no more use: open another one."""

    def __init__(self, client: AIOKafkaProducer) -> None:
        self._client = client
        self._ids: dict[str, UUID | None] = {}

    async def topic_ids(self, topics: Sequence[str]) -> dict[str, UUID | None]:
        """The ids of those of these topics that exist, as the broker knows them now. Raises BusUnavailable."""
        found = await topic_ids(self._client.client, topics)
        self._ids.update(found)
        return found

    async def publish(self, records: Sequence[KeyedRecord], *, timeout_s: float) -> dict[str, Position]:
        """Put all of these records, or none, on the first partition of their topics, in order.

        Returns the offset after the last one per topic, where the broker told it, with the id that the topic had when
        it was asked for before: one that is made anew meanwhile has another, so that the position holds for neither.
        Raises Refused (none is published), Fenced and BusUnavailable (all or none are; the next publisher's opening
        decides it for good).
        """
        try:
            return await asyncio.wait_for(self._publish(records), timeout_s)
        except ProducerFenced as error:
            raise Fenced(str(error)) from error
        except KafkaError as error:
            said = f"{type(error).__name__}: {error}"
            raise (Refused(said) if is_refusal(error) else BusUnavailable(said)) from error
        except asyncio.TimeoutError as error:
            raise BusUnavailable(f"{len(records)} records were not committed in {timeout_s:g} s") from error

    async def _publish(self, records: Sequence[KeyedRecord]) -> dict[str, Position]:
        topics = list(dict.fromkeys(r.topic for r in records))
        if new := [t for t in topics if t not in self._ids]:
            await self.topic_ids(new)
        for topic in new:
            if topic not in self._ids:
                raise Refused(f"there is no topic {topic} (create it: inferlog provision)", topic=topic)
        await self._client.begin_transaction()
        sent: list[asyncio.Future[Any]] = []
        for r in records:
            future = await self._client.send(
                r.topic, r.value, key=r.key, partition=PARTITION, headers=list(r.headers or ())
            )
            # When an earlier record fails nobody asks after this one.
            future.add_done_callback(lambda f: None if f.cancelled() else f.exception())
            sent.append(future)
        done = await asyncio.gather(*sent)
        await self._client.commit_transaction()
        return {d.topic: Position(self._ids[d.topic], d.offset + 1) for d in done if d.offset >= 0}


@asynccontextmanager
async def open_publisher(
    settings: KafkaSettings, transactional_id: str, *, transaction_timeout_s: float, request_timeout_ms: int = 10_000
) -> AsyncIterator[Publisher]:
    """The one publisher of this id from now on: what earlier ones left open is ended, what they still send is refused.

    An open transaction of a publisher that died is ended by the broker after `transaction_timeout_s`, if not by a
    successor before; until then readers of committed records wait. Raises BusUnavailable.
    """
    client = AIOKafkaProducer(
        bootstrap_servers=settings.bootstrap,
        transactional_id=transactional_id,
        transaction_timeout_ms=int(transaction_timeout_s * 1000),
        request_timeout_ms=request_timeout_ms,
        max_batch_size=256 * 1024,
        max_request_size=8 * 1024 * 1024,
        metadata_max_age_ms=60_000,
    )
    try:
        try:
            await asyncio.wait_for(client.start(), _START_S)
        except KafkaError as error:
            raise BusUnavailable(f"{settings.bootstrap}: {type(error).__name__}: {error}") from error
        except asyncio.TimeoutError as error:
            raise BusUnavailable(
                f"{settings.bootstrap}: no producer id for {transactional_id} in {_START_S:g} s"
            ) from error
        yield Publisher(client)
    finally:
        await _end(client)


async def _end(client: AIOKafkaProducer) -> None:
    """Close within about two seconds, whatever the broker does, and send nothing more.

    aiokafka's own `stop` waits for the broker as long as a transaction is open (0.14.0). An open one is left to the
    successor.
    """
    client._closed = True
    task = client._sender.sender_task
    client.client._maybe_wait_metadata = _at_once  # an attempt in hand would wait for a layout that no longer comes
    for _ in range(2):  # the first cancellation waits for attempts in hand, the second ends them
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_END_S)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(client.client.close(), _END_S)
    waiter = client._txn_manager._transaction_waiter
    if waiter is not None and waiter.done() and not waiter.cancelled():
        waiter.exception()  # seen: nobody waits for a transaction that was given up


async def _at_once() -> None:
    return
