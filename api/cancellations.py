"""Requests whose callers have gone, told to the workers: what nobody waits for need not be run.

It saves work and promises nothing. What cannot be told, because there is too much of it or Kafka is away, is dropped,
and the request runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timezone
from uuid import UUID

from api.request_log import ACK_WITHIN_S, Sender
from infra.kafka import BusUnavailable, RecordTooLarge
from schemas.codec import encode
from schemas.headers import Stamp
from schemas.ids import cancelled_id
from schemas.keys import prefixed
from schemas.records import RequestCancelled
from schemas.topics import CANCELLATIONS

logger = logging.getLogger(__name__)

REASON = "caller gone"
#: What waits to be told, and how much is told at once.
_MOST, _AT_ONCE = 1000, 64
_OPEN_WITHIN_S = 5.0
_REOPEN_PAUSE_S = 1.0
_STAMP = Stamp("api")


class Cancellations:
    """The cancellations topic, as this process writes it. `counts` are since the start."""

    def __init__(
        self,
        open_sender: Callable[[], AbstractAsyncContextManager[Sender]],
        *,
        namespace: str,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._open_sender = open_sender
        self._topic = prefixed(namespace, CANCELLATIONS.name)
        self._now = now
        self._waiting: deque[RequestCancelled] = deque()
        self._wanted = asyncio.Event()
        self.counts: Counter[str] = Counter(callers_gone=0, cancellations_dropped=0)

    def gone(self, request_id: UUID, customer_id: str) -> None:
        """The caller of this request hung up before its answer. Returns at once, whatever becomes of it."""
        self.counts["callers_gone"] += 1
        if len(self._waiting) >= _MOST:
            self._waiting.popleft()  # the oldest is the likeliest to have started
            self.counts["cancellations_dropped"] += 1
        self._waiting.append(
            RequestCancelled(
                event_id=cancelled_id(request_id),
                occurred_at=self._now(),
                request_id=request_id,
                customer_id=customer_id,
                reason=REASON,
            )
        )
        self._wanted.set()

    async def run(self) -> None:
        """Tell them, for ever. A sender is opened when there is something to tell."""
        while True:
            await self._wanted.wait()
            try:
                async with self._open_sender() as sender:
                    try:
                        while True:
                            await self._wanted.wait()
                            await self._tell(sender)
                    except BaseException:
                        await sender.abandon()
                        raise
            except (BusUnavailable, OSError, asyncio.TimeoutError) as error:
                logger.warning("workers are not told that callers have gone", extra={"fields": {"why": error}})
            await asyncio.sleep(_REOPEN_PAUSE_S)

    async def _tell(self, sender: Sender) -> None:
        told = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
        if not self._waiting:
            self._wanted.clear()
        sends = [self._send(sender, record) for record in told]
        failed = [end for end in await asyncio.gather(*sends, return_exceptions=True) if end is not None]
        self.counts["cancellations_dropped"] += len(failed)
        for error in failed:
            if not isinstance(error, RecordTooLarge):
                raise error

    async def _send(self, sender: Sender, record: RequestCancelled) -> None:
        await sender.send(
            self._topic,
            encode(record),
            key=record.request_id.bytes,
            headers=_STAMP.headers(RequestCancelled),
            timeout_s=ACK_WITHIN_S,
        )
