"""Records that are no requests: set aside on a topic of their own, with the evidence to judge and redrive them."""

from __future__ import annotations

import logging
from datetime import datetime, timezone

from infra.kafka import BusUnavailable, Producer, RecordTooLarge
from infra.pause import Pause
from schemas.codec import encode
from schemas.evidence import KeyedRecord, dead_letter, without_value
from schemas.headers import Stamp
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

    async def put(self, record: KeyedRecord, reason: str) -> None:
        """Returns once the letter for this record of Kafka is acknowledged; while Kafka is away it waits."""
        letter = dead_letter(record, reason, occurred_at=datetime.now(timezone.utc))
        where = {"topic": letter.topic, "partition": letter.partition, "offset": letter.offset}
        log.error("record set aside", extra={"fields": {**where, "reason": letter.reason}})
        pause = Pause(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while not await self._sent(letter):
            await pause.wait()

    async def _sent(self, letter: DeadLetter) -> bool:
        try:
            try:
                await self._send(letter)
            except RecordTooLarge:
                # Somebody has lowered the topic's limit. The evidence stays where it is, the letter says what it was.
                await self._send(without_value(letter))
        except BusUnavailable as error:
            log.warning("dead letter not acknowledged yet", extra={"fields": {"reason": error}})
            return False
        return True

    async def _send(self, letter: DeadLetter) -> None:
        key = letter.topic.encode()
        await self._producer.send(
            self._topic, encode(letter), key=key, headers=_STAMP.headers(DeadLetter), timeout_s=_SEND_TIMEOUT_S
        )
