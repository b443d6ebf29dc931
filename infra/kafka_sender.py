"""A producer whose records are acknowledged in time, or taken back, or honestly unknown.

An idempotent producer retries for ever, and would deliver records long after their senders were told that they failed.
This one gives itself up when an acknowledgement is overdue, and tells records that never reached the network from
those that may be on the log. Built on internals of aiokafka's producer, which keeps no such account.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, NodeNotReadyError

from infra.kafka import BusUnavailable, RecordTooLarge, open_producer
from infra.settings import KafkaSettings
from schemas.headers import Headers

_END_WITHIN_S = 1.0


class NotSent(BusUnavailable):
    """The record never reached the network and never will: it is not on the log."""


class Sender:
    """Sends records one by one. After an overdue acknowledgement every further `send` fails: open another one."""

    def __init__(self, client: AIOKafkaProducer) -> None:
        self._client = client
        self._queue = client._message_accumulator
        self._recalled = False
        # Attempts that found no connection, by the identity of a batch's buffer. The buffer is kept with the count, so
        # that its identity is not given to another one meanwhile.
        self._unconnected: dict[int, tuple[Any, int]] = {}
        self._reach = client.client.send
        client.client.send = self._attempt

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
        """Send one record and wait for its acknowledgement.

        Raises NotSent (it is not on the log), BusUnavailable (it may be), RecordTooLarge (it is not). A timer per call
        and no task; finding the topic's layout and room in the queue is bounded by the client's own request timeout.
        """
        try:
            future = await self._client.send(topic, value, key=key, partition=partition, headers=headers)
        except MessageSizeTooLargeError as error:
            raise RecordTooLarge(f"{topic}: a record of {len(value)} bytes is too large") from error
        except (KafkaError, NotSent) as error:
            raise NotSent(f"{topic}: {type(error).__name__}: {error}") from error
        timer = asyncio.get_running_loop().call_later(
            timeout_s, self._overdue, future, f"{topic}: a record was not acknowledged in {timeout_s:g} s"
        )
        try:
            await future
        except MessageSizeTooLargeError as error:
            raise RecordTooLarge(f"{topic}: a record of {len(value)} bytes is too large") from error
        except KafkaError as error:
            raise BusUnavailable(f"{topic}: {type(error).__name__}: {error}") from error
        finally:
            timer.cancel()

    async def partitions(self, topic: str, *, timeout_s: float) -> int:
        """Number of partitions of a topic. Raises BusUnavailable."""
        try:
            return len(await asyncio.wait_for(self._client.partitions_for(topic), timeout_s))
        except (KafkaError, asyncio.TimeoutError) as error:
            raise BusUnavailable(f"{topic}: {type(error).__name__}: {error}") from error

    async def abandon(self) -> None:
        """Close without flushing: what has not reached the network never will. Takes a few seconds at most."""
        self._recall("given up by the sender")
        self._client._closed = True
        task = self._client._sender.sender_task
        await asyncio.wait({task}, timeout=_END_WITHIN_S)
        await self._client.client.close()  # ends what still waits for an answer
        await asyncio.wait({task}, timeout=_END_WITHIN_S)

    async def _attempt(self, node_id: int, request: Any, **options: Any) -> Any:
        """Stands before the client's own `send`, which fails with NodeNotReadyError before anything is written."""
        try:
            answer = await self._reach(node_id, request, **options)
        except NodeNotReadyError:
            for buffer in _buffers(request):
                self._unconnected[id(buffer)] = (buffer, self._unconnected.get(id(buffer), (buffer, 0))[1] + 1)
            raise
        if self._unconnected:
            for buffer in _buffers(request):
                self._unconnected.pop(id(buffer), None)
        return answer

    def _overdue(self, future: asyncio.Future[Any], why: str) -> None:
        if not future.done():
            self._recall(why)
        if not future.done():
            future.set_exception(BusUnavailable(why))

    def _recall(self, why: str) -> None:
        """Take back what can be, and fail every waiting record as what it is. In one step of the event loop: what is
        told to be unsent cannot be sent in between."""
        if self._recalled:
            return
        self._recalled = True
        self._client._sender.sender_task.cancel()  # takes nothing more from the queue; attempts in hand go on
        self._queue.reenqueue = lambda batch: None  # and none of them comes back to it
        self._client.client._maybe_wait_metadata = _at_once
        self._queue._exception = NotSent(why)
        for batches in (*self._queue._batches.values(), self._queue._pending_batches):
            for batch in batches:
                batch.failure(NotSent(why) if self._is_unsent(batch) else BusUnavailable(why))
                if not batch._drain_waiter.cancelled():
                    batch._drain_waiter.exception()  # seen: hardly anybody waits for it

    def _is_unsent(self, batch: Any) -> bool:
        _, unconnected = self._unconnected.get(id(batch._builder._buffer), (None, 0))
        return bool(unconnected == batch.retry_count)  # aiokafka counts attempts, the first one included


def _buffers(request: Any) -> list[Any]:
    """The batches inside a ProduceRequest; none in any other request."""
    topics = getattr(request, "_topics", None)
    if not isinstance(topics, list) or not hasattr(request, "required_acks"):
        return []
    return [buffer for _, partitions in topics for _, buffer in partitions]


async def _at_once() -> None:
    return


@asynccontextmanager
async def open_sender(settings: KafkaSettings, *, request_timeout_ms: int) -> AsyncIterator[Sender]:
    """A started sender; unless abandoned it flushes on exit, within `request_timeout_ms`. Raises BusUnavailable."""
    async with open_producer(settings, request_timeout_ms=request_timeout_ms) as producer:
        yield Sender(producer._client)
