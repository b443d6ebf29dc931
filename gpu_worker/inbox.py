"""Where requests come from: a consumer of the pool's topic that never stops polling, and commits what is done.

    poll -> decode -> take() … claim() … done() -> committed, as a low watermark per partition
              \\-> not a request: dead letter, acknowledged -> done

A partition with too much in flight is paused and polled on, so that the group never thinks this worker dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from gpu_worker.dead_letters import DeadLetters
from gpu_worker.offsets import Watermark
from gpu_worker.worker import Delivery
from infra.kafka import (
    AIOKafkaConsumer,
    ConsumerRebalanceListener,
    KafkaError,
    Producer,
    TopicPartition,
    open_consumer,
)
from infra.settings import KafkaSettings
from schemas.codec import DecodeError, decode
from schemas.keys import worker_group
from schemas.records import InferenceRequested
from schemas.topics import DEAD_LETTERS, requests_topic

log = logging.getLogger(__name__)

_POLL_MS = 200
_COMMIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much may be in flight, and how long things take.

    `revoke_wait_s` must be below the group's rebalance timeout: past that this worker is out anyway.
    """

    records_per_partition: int = 1000
    bytes_in_all: int = 128 * 1024 * 1024
    commit_every_s: float = 0.1
    revoke_wait_s: float = 5.0


@dataclass(slots=True)
class _Held:
    """A partition while it is this worker's."""

    generation: int
    watermark: Watermark = field(default_factory=Watermark)
    claimed: int = 0
    size_bytes: int = 0
    paused: bool = False


class Inbox(ConsumerRebalanceListener):  # type: ignore[misc]  # the library has no types
    """The worker's Inbox on Kafka. Made by `open_inbox`."""

    def __init__(self, consumer: AIOKafkaConsumer, dead_letters: DeadLetters, *, topic: str, bounds: Bounds) -> None:
        self._consumer = consumer
        self._topic = topic
        self._dead_letters = dead_letters
        self._bounds = bounds
        self._held: dict[int, _Held] = {}
        self._generation = 0
        self._revoking = False
        self._released = asyncio.Event()
        self._setting_aside: set[asyncio.Task[None]] = set()
        self.joined = False
        self.polled_at_s = 0.0
        self.set_aside = 0

    async def take(self) -> list[Delivery]:
        """What arrived within a fifth of a second; pauses and resumes partitions on the way."""
        self._apply_bounds()
        found = await self._consumer.getmany(timeout_ms=_POLL_MS)
        self.polled_at_s = asyncio.get_running_loop().time()
        arrived: list[Delivery] = []
        for place, records in found.items():
            held = self._held.get(place.partition)
            if held is not None and not self._revoking:  # else it comes again, to whoever owns the partition then
                arrived += self._deliveries(held, records)
        return arrived

    def claim(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Those of partitions that were not taken away since they arrived."""
        if self._revoking:
            return []
        mine = []
        for delivery in deliveries:
            held = self._held.get(delivery.partition)
            if held is not None and held.generation == delivery.generation:
                held.claimed += 1
                mine.append(delivery)
        return mine

    def done(self, deliveries: Sequence[Delivery]) -> None:
        """Let their offsets be committed; for a partition lost meanwhile nothing happens, its owner redoes them."""
        for delivery in deliveries:
            held = self._held.get(delivery.partition)
            if held is not None and held.generation == delivery.generation:
                held.watermark.done(delivery.offset)
                held.claimed -= 1
                held.size_bytes -= delivery.size_bytes
        self._released.set()

    async def commit_regularly(self) -> None:
        """Commit what is done, ten times a second, for ever."""
        while True:
            await asyncio.sleep(self._bounds.commit_every_s)
            await self.commit()

    async def commit(self) -> None:
        """Commit every partition's low watermark. A refusal is not an error: the records are redone, ids collapse."""
        positions = {p: at for p, held in self._held.items() if (at := held.watermark.to_commit()) is not None}
        if not positions:
            return
        offsets = {TopicPartition(self._topic, p): at for p, at in positions.items()}
        try:
            # The client itself would try for ever, and a rebalance or a stop must not wait for that.
            await asyncio.wait_for(self._consumer.commit(offsets), _COMMIT_TIMEOUT_S)
        except (KafkaError, asyncio.TimeoutError) as error:
            log.warning("offsets not committed", extra={"fields": {"reason": repr(error)}})
            return
        for partition, at in positions.items():
            if partition in self._held:
                self._held[partition].watermark.committed(at)

    async def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
        """Before partitions go: let what runs end, within a bound, and commit it. What only waits is dropped."""
        self._revoking = True
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self._bounds.revoke_wait_s
        while any(held.claimed for held in self._held.values()) and loop.time() < ends_s:
            self._released.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._released.wait(), max(0.0, ends_s - loop.time()))
        unfinished = sum(held.claimed for held in self._held.values())
        await self.commit()
        self._held.clear()
        if unfinished:
            log.warning("partitions left while requests ran", extra={"fields": {"requests": unfinished}})

    async def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
        """Start anew with these partitions, from the group's committed positions."""
        self._generation += 1
        self._held = {place.partition: _Held(generation=self._generation) for place in assigned}
        self._revoking = False
        self.joined = True
        log.info("partitions assigned", extra={"fields": {"partitions": sorted(self._held)}})

    async def reach_broker(self) -> None:
        """One real question to the broker. Raises KafkaError."""
        await self._consumer.end_offsets([TopicPartition(self._topic, 0)])

    async def close(self) -> None:
        """Commit for the last time."""
        for task in self._setting_aside:
            task.cancel()
        await asyncio.gather(*self._setting_aside, return_exceptions=True)
        await self.commit()

    def _deliveries(self, held: _Held, records: Sequence[Any]) -> list[Delivery]:
        found = []
        for record in records:
            held.watermark.read(record.offset)
            size_bytes = len(record.value or b"")
            held.size_bytes += size_bytes
            try:
                request = decode(record.value, InferenceRequested)
            except DecodeError as error:
                task = asyncio.create_task(self._set_aside(held, record, str(error)))
                self._setting_aside.add(task)
                task.add_done_callback(self._setting_aside.discard)
                continue
            found.append(
                Delivery(
                    request=request,
                    partition=record.partition,
                    offset=record.offset,
                    generation=held.generation,
                    size_bytes=size_bytes,
                )
            )
        return found

    async def _set_aside(self, held: _Held, record: Any, reason: str) -> None:
        """1 dead letter, acknowledged. 2 Its offset counts as done. Die between: the same letter is written again."""
        await self._dead_letters.put(record, reason)
        self.set_aside += 1
        if self._held.get(record.partition) is held:
            held.watermark.done(record.offset)
            held.size_bytes -= len(record.value or b"")

    def _apply_bounds(self) -> None:
        """Pause partitions with too much in flight; resume them at half of it, so that they do not flutter."""
        crowded = sum(held.size_bytes for held in self._held.values()) > self._bounds.bytes_in_all
        for partition, held in self._held.items():
            records = len(held.watermark)
            if not held.paused and (crowded or records >= self._bounds.records_per_partition):
                held.paused = self._try(self._consumer.pause, partition)
            elif held.paused and not crowded and records <= self._bounds.records_per_partition // 2:
                held.paused = not self._try(self._consumer.resume, partition)

    def _try(self, action: Any, partition: int) -> bool:
        """False when the partition has gone this very moment; the listener is about to say so."""
        try:
            action(TopicPartition(self._topic, partition))
        except KafkaError:
            return False
        return True


@asynccontextmanager
async def open_inbox(
    settings: KafkaSettings, producer: Producer, *, pool: str, bounds: Bounds | None = None
) -> AsyncIterator[Inbox]:
    """A member of the pool's group; on exit it commits what is done and leaves. Raises BusUnavailable."""
    topic = requests_topic(pool).in_namespace(settings.namespace).name
    async with open_consumer(
        settings,
        group=worker_group(settings.namespace, pool),
        max_poll_records=256,
        # A worker killed is noticed, and its partitions move, within a request's usual deadline.
        session_timeout_ms=6_000,
        heartbeat_interval_ms=1_500,
        rebalance_timeout_ms=15_000,
    ) as consumer:
        dead_letters = DeadLetters(producer, topic=DEAD_LETTERS.in_namespace(settings.namespace).name)
        inbox = Inbox(consumer, dead_letters, topic=topic, bounds=bounds or Bounds())
        consumer.subscribe([topic], listener=inbox)
        committing = asyncio.create_task(inbox.commit_regularly(), name="commit")
        try:
            yield inbox
        finally:
            committing.cancel()
            await asyncio.gather(committing, return_exceptions=True)
            await inbox.close()
