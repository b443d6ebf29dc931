"""Publishes what was admitted to the pool's request topic, acknowledged by the log or refused within 1.5 s.

When an acknowledgement is overdue the sender is given up and another one opened. Its other requests fail with it, each
as what it is: not accepted when it never reached the network, else possibly accepted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Protocol

from api.errors import AcceptanceUnknown, TooLarge, Unavailable
from infra.kafka import BusUnavailable, RecordTooLarge
from infra.kafka_sender import NotSent
from schemas.codec import encode
from schemas.headers import Headers, Stamp
from schemas.keys import prefixed
from schemas.records import InferenceRequested
from schemas.topics import DEFAULT_POOL, partition_for, requests_topic

logger = logging.getLogger(__name__)

ACK_WITHIN_S = 1.5
_OPEN_WITHIN_S = 5.0
_REOPEN_PAUSE_S = 0.5
_STAMP = Stamp("api")


class Sender(Protocol):
    """A started producer (infra.kafka_sender.Sender fits)."""

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
        """Send and wait for the acknowledgement. Raises NotSent, BusUnavailable (may be sent), RecordTooLarge."""

    async def partitions(self, topic: str, *, timeout_s: float) -> int:
        """Number of partitions of a topic. Raises BusUnavailable."""

    async def abandon(self) -> None:
        """Close without sending what waits."""


class RequestLog:
    """The request topics, as this process writes them."""

    def __init__(self, open_sender: Callable[[], AbstractAsyncContextManager[Sender]], *, namespace: str) -> None:
        self._open_sender = open_sender
        self._namespace = namespace
        self._topics: dict[str, str] = {}
        self._partitions: dict[str, int] = {}
        self._sender: Sender | None = None
        self._given_up = asyncio.Event()
        self._why = "not connected yet"

    def trouble(self) -> str | None:
        """Why nothing can be published now, None when it can."""
        return None if self._sender is not None else self._why

    async def publish(self, record: InferenceRequested, *, pool: str, spread: int) -> None:
        """Write one request and return once the log has acknowledged it.

        Raises Unavailable and TooLarge, and then the record is not on the log; AcceptanceUnknown, and then it may be.
        """
        sender = self._sender
        if sender is None:
            raise _not_accepted(record)
        topic = self._topics.get(pool)
        if topic is None:
            topic = self._topics[pool] = prefixed(self._namespace, requests_topic(pool).name)
        partitions = self._partitions.get(topic)
        if partitions is None:
            try:
                partitions = await sender.partitions(topic, timeout_s=ACK_WITHIN_S)
            except BusUnavailable as error:  # of one topic: no reason to give up the sender of all
                raise _not_accepted(record) from error
            self._partitions[topic] = partitions
        try:
            await sender.send(
                topic,
                encode(record),
                key=record.request_id.bytes,
                partition=partition_for(
                    record.version, record.request_id.int, partitions=partitions, spread=min(spread, partitions)
                ),
                headers=_STAMP.headers(InferenceRequested, record.traceparent),
                timeout_s=ACK_WITHIN_S,
            )
        except RecordTooLarge as error:
            raise TooLarge(f"the request is too large for the log: {error}") from error
        except NotSent as error:
            self._give_up(sender, str(error))
            raise _not_accepted(record) from error
        except BusUnavailable as error:
            self._give_up(sender, str(error))
            raise AcceptanceUnknown(
                "the request log did not confirm in time: the call may have been accepted; it runs at most once and is "
                f"billed at most once as request {record.request_id}"
            ) from error

    def _give_up(self, sender: Sender, why: str) -> None:
        if self._sender is sender:
            self._sender = None
            self._why = why
            self._given_up.set()

    async def run(self) -> None:
        """Keep a sender open for ever; says once when Kafka goes away and once when it is back."""
        failures = 0
        while True:
            try:
                await self._serve_one_sender()
                failures = 0
            except (BusUnavailable, OSError, asyncio.TimeoutError) as error:
                self._why = f"{type(error).__name__}: {error}"
            failures += 1
            if failures == 1:
                logger.warning("the request log is away", extra={"fields": {"why": self._why}})
            await asyncio.sleep(_REOPEN_PAUSE_S)

    async def _serve_one_sender(self) -> None:
        """Open a sender and hand it out until it is given up."""
        async with AsyncExitStack() as stack:
            opening = stack.enter_async_context(self._open_sender())
            sender = await asyncio.wait_for(opening, _OPEN_WITHIN_S)
            # The layout of the topic most requests go to, so that the first request does not wait for it.
            topic = prefixed(self._namespace, requests_topic(DEFAULT_POOL).name)
            self._partitions = {}
            with suppress(BusUnavailable):  # an installation may have no default pool
                self._partitions[topic] = await sender.partitions(topic, timeout_s=_OPEN_WITHIN_S)
            self._given_up.clear()
            self._sender = sender
            logger.info("the request log is open")
            try:
                await self._given_up.wait()
                await sender.abandon()
            finally:
                self._sender = None


def _not_accepted(record: InferenceRequested) -> Unavailable:
    return Unavailable(
        f"request {record.request_id} was not accepted: the request log does not answer", code="log_away"
    )
