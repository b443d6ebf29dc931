"""Where requests come from: a consumer of the pool's topic that never stops polling, and commits what is done.

    poll -> decode -> take() … claim() … done() -> committed, as a low watermark per partition
              \\-> not a request: dead letter, acknowledged -> done

What an earlier owner of a partition may have ended waits until its results were looked up. A partition with too much
in flight is paused and polled on, so that the group never thinks this worker dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from gpu_worker.dead_letters import DeadLetters
from gpu_worker.held import Bounds, Held
from gpu_worker.inheritance import Inheritance
from gpu_worker.ports import Delivery
from gpu_worker.unlearnt import Unlearnt
from infra.kafka import (
    AIOKafkaConsumer,
    ConsumerRebalanceListener,
    KafkaError,
    Producer,
    TopicPartition,
    open_consumer,
)
from infra.schema_feed import learn_nothing
from infra.settings import KafkaSettings
from schemas.codec import DecodeError, UnknownSchema, decode_at
from schemas.keys import worker_group
from schemas.records import InferenceRequested
from schemas.topics import DEAD_LETTERS, RESULTS, requests_topic

log = logging.getLogger(__name__)

_POLL_MS = 200
#: While records wait for what is looked up, they must not wait for the poll too.
_RECOVERY_POLL_MS = 20
_COMMIT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 5.0


class Predecessors(Protocol):
    """What earlier owners of partitions left on the log (gpu_worker.inheritance.Inheritance fits)."""

    async def settle(self, parts: Mapping[int, Held]) -> None:
        """Find out what they ended and tell each of these partitions, by number; waits while Kafka is away."""


class Inbox(ConsumerRebalanceListener):  # type: ignore[misc]  # the library has no types
    """The worker's Inbox on Kafka. Made by `open_inbox`."""

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        dead_letters: DeadLetters,
        predecessors: Predecessors,
        *,
        topic: str,
        bounds: Bounds,
        unlearnt: Unlearnt | None = None,
    ) -> None:
        self._consumer = consumer
        self._topic = topic
        self._dead_letters = dead_letters
        self._predecessors = predecessors
        self._bounds = bounds
        self._unlearnt = unlearnt or Unlearnt()
        self._held: dict[int, Held] = {}
        self._generation = 0
        self._revoking = False
        self._released = asyncio.Event()
        self._recovery: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        self.joined = False
        self.polled_at_s = 0.0
        self.set_aside = 0

    async def take(self) -> list[Delivery]:
        """What arrived within a fifth of a second; pauses and resumes partitions on the way.

        Raises what ended one of the inbox's own tasks, because nobody else waits for those.
        """
        if self._fault is not None:
            raise self._fault
        self._apply_bounds()
        arrived: list[Delivery] = []
        recovering = any(held.recovering for held in self._held.values())
        found = await self._consumer.getmany(timeout_ms=_RECOVERY_POLL_MS if recovering else _POLL_MS)
        self.polled_at_s = asyncio.get_running_loop().time()
        if self._revoking:
            return []  # it comes again, to whoever owns the partitions then
        for partition, held in self._held.items():
            records = found.get(TopicPartition(self._topic, partition), ())
            arrived += held.admit(self._deliveries(held, records))
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

    def start(self) -> None:
        """From now on commit what is done, ten times a second."""
        self._spawn(self._commit_regularly())

    async def _commit_regularly(self) -> None:
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
        self._abandon_recovery()
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
        self._abandon_recovery()
        self._generation += 1
        self._held = {place.partition: Held(generation=self._generation) for place in assigned}
        if self._held:
            # Beside the polls: the client is not asked for positions from inside its own rebalance.
            self._recovery = self._spawn(self._predecessors.settle(self._held))
        self._revoking = False
        self.joined = True
        log.info("partitions assigned", extra={"fields": {"partitions": sorted(self._held)}})

    async def reach_broker(self) -> None:
        """One real question to the broker. Raises KafkaError."""
        await self._consumer.end_offsets([TopicPartition(self._topic, 0)])

    async def close(self) -> None:
        """End the inbox's own tasks and commit for the last time."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT_S)
        await self.commit()

    def _abandon_recovery(self) -> None:
        if self._recovery is not None:
            self._recovery.cancel()
            self._recovery = None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose unexpected end is raised by the next `take`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and self._fault is None:
            self._fault = task.exception()

    def _deliveries(self, held: Held, records: Sequence[Any]) -> list[Delivery]:
        found = []
        for record in records:
            held.watermark.read(record.offset)
            held.size_bytes += len(record.value or b"")
            try:
                found.append(held.delivery(record, decode_at(record, InferenceRequested)))
            except UnknownSchema:
                self._spawn(self._look_again(held, record))
            except DecodeError as error:
                self._spawn(self._set_aside(held, record, error.reason))
        return found

    async def _look_again(self, held: Held, record: Any) -> None:
        """Its writer may just be newer than this process."""
        try:
            held.add(held.delivery(record, await self._unlearnt.decode(record)))
        except DecodeError as error:
            await self._set_aside(held, record, error.reason)

    async def _set_aside(self, held: Held, record: Any, reason: str) -> None:
        """1 dead letter, acknowledged. 2 Its offset counts as done. Die between: the same letter is written again."""
        await self._dead_letters.put(record, reason)
        self.set_aside += 1
        if self._held.get(record.partition) is held:
            held.watermark.done(record.offset)
            held.size_bytes -= len(record.value or b"")

    def _apply_bounds(self) -> None:
        """Pause partitions with too much in flight, and resume them when little is left of it."""
        crowded = sum(held.size_bytes for held in self._held.values()) > self._bounds.bytes_in_all
        for partition, held in self._held.items():
            if not held.paused and (crowded or held.too_much(self._bounds)):
                held.paused = self._try(self._consumer.pause, partition)
            elif held.paused and not crowded and held.little_enough(self._bounds):
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
    settings: KafkaSettings,
    producer: Producer,
    *,
    pool: str,
    bounds: Bounds | None = None,
    learn_schemas: Callable[[], Awaitable[None]] = learn_nothing,
) -> AsyncIterator[Inbox]:
    """A member of the pool's group; on exit it commits what is done and leaves. Raises BusUnavailable.

    `learn_schemas` is asked about schema ids that are unknown here: see `gpu_worker.unlearnt`.
    """
    topic = requests_topic(pool).in_namespace(settings.namespace).name
    bounds = bounds or Bounds()
    async with open_consumer(
        settings,
        group=worker_group(settings.namespace, pool),
        max_poll_records=bounds.records_per_poll,
        # A worker killed is noticed, and its partitions move, within a request's usual deadline.
        session_timeout_ms=6_000,
        heartbeat_interval_ms=1_500,
        rebalance_timeout_ms=15_000,
        # A topic that has grown is noticed within a request's usual deadline too.
        metadata_max_age_ms=5_000,
    ) as consumer:
        dead_letters = DeadLetters(producer, topic=DEAD_LETTERS.in_namespace(settings.namespace).name)
        results = RESULTS.in_namespace(settings.namespace).name
        predecessors = Inheritance(
            settings,
            consumer,
            producer,
            requests=topic,
            results=results,
            reach=bounds.reach,
            learn_schemas=learn_schemas,
        )
        unlearnt = Unlearnt(learn_schemas)
        inbox = Inbox(consumer, dead_letters, predecessors, topic=topic, bounds=bounds, unlearnt=unlearnt)
        consumer.subscribe([topic], listener=inbox)
        inbox.start()
        try:
            yield inbox
        finally:
            await inbox.close()
