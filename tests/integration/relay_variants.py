"""Relays that freeze themselves (SIGSTOP) at a moment that a test needs, or lack one mechanism.

python -m tests.integration.relay_variants freezes_before_publishing
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from infra.kafka import KeyedRecord
from infra.kafka_topic_ids import Position
from infra.kafka_transactions import Publisher, open_publisher
from infra.outbox import WaitingFact
from infra.postgres import Connection
from infra.settings import replay_settings
from infra.telemetry import configure_logging
from streams.outbox.relay import Relay


class FreezesBeforePublishing(Relay):
    """Has read the facts and has published none of them. It keeps the others out for two seconds only."""

    async def _publish_first(self, connection: Connection, publisher: Publisher, rows: Sequence[WaitingFact]) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        await super()._publish_first(connection, publisher, rows)


class FreezesBeforeRemoving(Relay):
    """Has published facts and has removed none of them."""

    async def _publish_first(self, connection: Connection, publisher: Publisher, rows: Sequence[WaitingFact]) -> None:
        await super()._publish_first(connection, _FreezesAfterwards(publisher), rows)  # type: ignore[arg-type]


class _FreezesAfterwards:
    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    async def publish(self, records: Sequence[KeyedRecord], *, timeout_s: float) -> dict[str, Position]:
        reached = await self._publisher.publish(records, timeout_s=timeout_s)
        os.kill(os.getpid(), signal.SIGSTOP)
        return reached


class NeverFenced(FreezesBeforePublishing):
    """Without the fence: no other relay shares its transactional id."""

    def open_publisher(self) -> AbstractAsyncContextManager[Publisher]:
        return open_publisher(self._kafka, f"alone-{os.getpid()}", transaction_timeout_s=20)


VARIANTS = {
    "freezes_before_publishing": FreezesBeforePublishing,
    "freezes_before_removing": FreezesBeforeRemoving,
    "never_fenced": NeverFenced,
}

if __name__ == "__main__":
    configure_logging()
    settings = replay_settings()
    asyncio.run(VARIANTS[sys.argv[1]](settings.kafka, settings.postgres, lease_s=2.0).run())
