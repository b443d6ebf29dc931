"""Records that are no requests: set aside on a topic of their own, with the evidence to judge and redrive them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from infra.kafka import BusUnavailable, Producer, RecordTooLarge
from schemas.codec import encode
from schemas.headers import Stamp
from schemas.ids import dead_letter_id
from schemas.records import DeadLetter

log = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 10.0
_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 5.0
_STAMP = Stamp("gpu_worker")


class DeadLetters:
    """The dead-letter topic."""

    def __init__(self, producer: Producer, *, topic: str) -> None:
        self._producer = producer
        self._topic = topic

    async def put(self, record: Any, reason: str) -> None:
        """Returns once the letter for this record of Kafka is acknowledged; while Kafka is away it waits."""
        letter = DeadLetter(
            event_id=dead_letter_id(record.topic, record.partition, record.offset),
            occurred_at=datetime.now(timezone.utc),
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            key=record.key,
            value=record.value,
            reason=reason,
            attempts=1,
        )
        where = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
        log.error("record set aside", extra={"fields": {**where, "reason": reason}})
        wait_s = _FIRST_RETRY_S
        while not await self._sent(letter):
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)

    async def _sent(self, letter: DeadLetter) -> bool:
        try:
            try:
                await self._send(letter)
            except RecordTooLarge:
                # The evidence stays where it is; the letter says where and what it was.
                await self._send(_without_value(letter))
        except BusUnavailable as error:
            log.warning("dead letter not acknowledged yet", extra={"fields": {"reason": error}})
            return False
        return True

    async def _send(self, letter: DeadLetter) -> None:
        key = letter.topic.encode()
        await self._producer.send(
            self._topic, encode(letter), key=key, headers=_STAMP.headers(DeadLetter), timeout_s=_SEND_TIMEOUT_S
        )


def _without_value(letter: DeadLetter) -> DeadLetter:
    value = letter.value or b""
    digest = hashlib.sha256(value).hexdigest()
    reason = f"{letter.reason} (value of {len(value)} bytes left out, sha256 {digest})"
    return replace(letter, key=None, value=None, reason=reason)
