"""The second way to read the usage topic: a plain consumer's loop, hosted by the Faust worker, into the same ledger.

Several times as fast as an agent, whose events cost Faust some 80 µs each. While Postgres writes one batch the next is
fetched and decoded; batches are written one after the other, in the order in which they were read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any

from mode import Service

from infra.kafka import (
    AIOKafkaConsumer,
    ConsumerRebalanceListener,
    KafkaError,
    RoundRobinPartitionAssignor,
    TopicPartition,
    open_consumer,
)
from infra.kafka_group import is_member, refusal
from infra.settings import StreamsSettings
from streams.garbage import collect_seldom
from streams.ledger.delivery import Delivery
from streams.ledger.footing import Fetch, Footing
from streams.ledger.membership import LOOK_S, Membership
from streams.ledger.raw import RawRecord
from streams.ledger.sorting import SortedBatch
from streams.ledger.stretches import Stretch

log = logging.getLogger(__name__)

_COMMIT_INTERVAL_S = 0.5
_END_S = 5.0
#: How often it is asked for more while a batch is gathered.
_LOOKS = 4
#: Past it the broker thinks a member dead that does not ask for records; a batch is held for less (`give_up_s`).
_MAX_POLL_S = 1000.0


class UsageLoop(Service, ConsumerRebalanceListener):  # type: ignore[misc]  # the libraries have no types
    """A member of the ledger's group. Whatever `delivery` raises ends the process, with nothing of it committed."""

    def __init__(
        self,
        settings: StreamsSettings,
        *,
        topic: str,
        group: str,
        delivery: Delivery,
        membership: Membership,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._settings = settings
        self._topic = topic
        self._group = group
        self._delivery = delivery
        self._membership = membership
        self._footing = Footing()
        self._covered: dict[TopicPartition, int] = {}
        self._gathered: list[RawRecord] = []
        self._writing: asyncio.Task[None] | None = None
        self._fault: KafkaError | None = None
        self._consumer: AIOKafkaConsumer | None = None
        self._committed_at_s = 0.0
        self.rebalancing = True

    def assigned(self) -> set[int]:
        """The partitions that are read here."""
        return set() if self._consumer is None else {tp.partition for tp in self._consumer.assignment()}

    @Service.task
    async def _read(self) -> None:
        s = self._settings
        collect_seldom()
        async with open_consumer(
            s.kafka,
            group=self._group,
            max_poll_records=s.batch_records,
            partition_assignment_strategy=(RoundRobinPartitionAssignor,),  # Faust's, so that agents may share the group
            session_timeout_ms=int(s.session_s * 1000),
            heartbeat_interval_ms=int(s.session_s * 200),
            rebalance_timeout_ms=int(s.session_s * 600),
            max_poll_interval_ms=int(_MAX_POLL_S * 1000),
            request_timeout_ms=30_000,
        ) as consumer:
            self._consumer = consumer
            consumer.subscribe([self._topic], listener=self)
            try:
                while not self.should_stop:
                    await self._step(consumer)
            finally:
                if self._writing is not None:
                    self._writing.cancel()
                    await asyncio.wait({self._writing}, timeout=_END_S)
                self._consumer = None

    async def _step(self, consumer: AIOKafkaConsumer) -> None:
        """Fetch and decode a batch while the one before is written, then have this one written."""
        records = await self._gather(consumer)
        if self._fault is not None:
            raise self._fault  # an assignment did not begin where it should; a new process will
        batch = await self._delivery.prepare(records) if records else None
        await self._written()
        if batch is not None:
            self._writing = asyncio.create_task(self._write(batch))
        if asyncio.get_running_loop().time() - self._committed_at_s >= _COMMIT_INTERVAL_S:
            await self._commit(consumer)

    async def _gather(self, consumer: AIOKafkaConsumer) -> list[RawRecord]:
        """What there is, if that is a whole batch or more is on the log; else what comes within `batch_wait_s`.

        A transaction costs the same for many. It takes several looks, because the client fetches nothing more of a
        partition while it has something of it that nobody took.
        """
        s = self._settings
        await self._fetch(consumer, wait_s=s.batch_wait_s)
        for _ in range(_LOOKS if self._gathered else 0):
            if len(self._gathered) >= s.batch_records or self._footing.behind(consumer) >= s.batch_records:
                break
            await asyncio.sleep(s.batch_wait_s / _LOOKS)
            await self._fetch(consumer, wait_s=0)
        gathered, self._gathered = self._gathered, []
        return gathered

    async def _fetch(self, consumer: AIOKafkaConsumer, *, wait_s: float) -> None:
        room = self._settings.batch_records - len(self._gathered)
        # Whoever asks for records is told that the group refuses; ending at once would leave nobody time to mend that.
        refused = refusal(consumer)
        if refused is None:
            try:
                fetched = await consumer.getmany(timeout_ms=int(wait_s * 1000), max_records=room)
            except KafkaError:
                refused = refusal(consumer)
                if refused is None:
                    raise
            else:
                told = await self._footing.follow(consumer, fetched)
                # In a statement of its own: a revocation meanwhile replaces the list, which must not be put back.
                self._gathered += _raw(told)
        self._membership.heard(refused, member=is_member(consumer))
        if refused is not None:
            await asyncio.sleep(LOOK_S)

    async def _write(self, batch: SortedBatch) -> None:
        self._cover(await self._delivery.write(batch))

    async def _written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    def _cover(self, stretches: Sequence[Stretch]) -> None:
        mine = set() if self._consumer is None else self._consumer.assignment()
        for stretch in stretches:
            tp = TopicPartition(stretch.topic, stretch.partition)
            if tp in mine:
                self._covered[tp] = stretch.end

    async def _commit(self, consumer: AIOKafkaConsumer) -> None:
        """Commit what the ledger covered; whoever reads it again because that failed counts nothing twice."""
        self._committed_at_s = asyncio.get_running_loop().time()
        # One offset of a partition that was taken away, and the client refuses them all.
        covered = {tp: end for tp, end in self._covered.items() if tp in consumer.assignment()}
        self._covered = {}
        if not covered:
            return
        try:
            await consumer.commit(covered)
        except KafkaError as error:
            log.warning("offsets not committed: %s: %s", type(error).__name__, error)
            self._covered = covered | self._covered

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """Finish the batch in hand, so that its successor need not read it again; give up when that takes too long."""
        self.rebalancing = True
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=self._settings.session_s * 0.3)
        if self._consumer is not None:
            await self._commit(self._consumer)
        self._footing.forget(revoked)
        # They come again to whoever reads the partition next; to us perhaps from further on, if another was quick.
        self._gathered = [r for r in self._gathered if TopicPartition(r.topic, r.partition) not in revoked]
        for tp in revoked:
            self._covered.pop(tp, None)

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """Begin at explicit offsets. The client would only log what this raises, so it is kept for the reading task."""
        try:
            if self._consumer is not None:
                await self._footing.begin(self._consumer, assigned)
        except KafkaError as error:
            self._fault = error
        self.rebalancing = False


def _raw(fetched: dict[TopicPartition, Fetch]) -> list[RawRecord]:
    return [
        RawRecord(topic=r.topic, partition=r.partition, offset=r.offset, follows=follows, key=r.key, value=r.value)
        for fetch in fetched.values()
        for follows, r in fetch.records
    ]
