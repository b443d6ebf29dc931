"""Faust's consumer with the three things changed that lose usage: what it commits, where it begins, what it skips.

Faust commits what its streams acknowledged, and a stream that ends for whatever reason acknowledges what it has in
hand. It begins again at the group's offset, and where there is none it just reads on, past what it dropped in a
rebalance; and it may drop records without a word. So only what the ledger's COMMIT covered is committed here, every
assignment begins at an explicit offset, and each record says where its reader stood: the ledger refuses what does not
follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
from inspect import iscoroutine
from typing import Any

from faust.exceptions import ConsumerNotStarted
from faust.transport.drivers import aiokafka as kafka_driver
from faust.types import TP
from mode.services import WaitResults

from infra.kafka import KafkaError, read_every_batch
from infra.kafka_group import is_member, refusal
from streams.in_hand import InHand
from streams.ledger.footing import Followed, Footing
from streams.ledger.membership import LOOK_S, Membership
from streams.ledger.stretches import Stretch

Offsets = Mapping[TP, int]
_FULL_PAUSE_S = 0.1


class LedgerThread(kafka_driver.AIOKafkaConsumerThread):
    """The thread that fetches: committed records only, each with the position that it follows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.footing = Footing()

    def _create_worker_consumer(self, transport: Any) -> Any:
        read_every_batch()
        consumer = super()._create_worker_consumer(transport)
        if consumer._isolation_level not in ("read_uncommitted", "read_committed"):
            raise RuntimeError("this aiokafka keeps its isolation level elsewhere; committed reads cannot be set")
        # Read when the consumer starts, which is later. Faust sets it only under `exactly_once`, with all that brings.
        consumer._isolation_level = "read_committed"
        return consumer

    async def seek_to_committed(self) -> Offsets:
        """Seek every assigned partition to the group's offset, or to the log's first where the group has none."""
        found: Offsets = await self.call_thread(self._begin)
        return found

    async def _begin(self) -> Offsets:
        consumer = self._ensure_consumer()
        begun = await self.footing.begin(consumer, consumer.assignment())
        return {TP(tp.topic, tp.partition): offset for tp, offset in begun.items()}

    async def answer(self) -> tuple[KafkaError | None, bool]:
        """With what error the group has refused this consumer since the last time, and whether it is a member."""
        found: tuple[KafkaError | None, bool] = await self.call_thread(self._answer)
        return found

    async def _answer(self) -> tuple[KafkaError | None, bool]:
        consumer = self._ensure_consumer()
        return refusal(consumer), is_member(consumer)

    async def _fetch_records(self, *args: Any, **kwargs: Any) -> Any:
        """A Fetch per partition."""
        fetched = await super()._fetch_records(*args, **kwargs)
        return await self.footing.follow(self._ensure_consumer(), fetched)


class LedgerConsumer(kafka_driver.Consumer):
    """A consumer on that thread. `cover` is the only way to have an offset committed."""

    _thread: LedgerThread

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._covered: dict[TP, int] = {}
        self._epochs: dict[TP, int | None] = {}  # of what is being handed over
        self.in_hand = InHand()

    def _new_consumer_thread(self) -> LedgerThread:
        return LedgerThread(self, loop=self.loop, beacon=self.beacon)

    async def watch_group(self, membership: Membership) -> None:
        """Tell what the group answers, again and again: Faust does not ask. Raises Refused."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                error, member = await self._thread.answer()
            except ConsumerNotStarted:
                continue
            membership.heard(error, member=member)

    def cover(self, stretches: Sequence[Stretch]) -> None:
        """The ledger holds everything below these ends: they may be committed, and will be within the interval."""
        mine = self.assignment()
        for stretch in stretches:
            place = TP(stretch.topic, stretch.partition)
            if place in mine:
                self._covered[place] = stretch.end
                self.in_hand.cover(place, stretch.end)

    def present(self, events: Sequence[Any]) -> list[Any]:
        """Those of these events that were read since their partitions were last begun; nobody may count the others.

        Faust drops what waits for a stream when a partition is taken away, but not what the stream has gathered for its
        next batch. Such a record comes again to whoever reads the partition next. If that is this process, beside what
        it reads then, the batch would have a hole where another reader was meanwhile.
        """
        epoch = self._thread.footing.epoch
        return [e for e in events if e.message.epoch == epoch(e.message.tp)]

    async def _getmany(self, active_partitions: set[TP] | None, timeout: float) -> Any:
        """What was fetched, or nothing for a moment while too much is in hand."""
        if self.in_hand.full:
            await asyncio.sleep(min(timeout, _FULL_PAUSE_S))
            return {}
        fetched: Mapping[TP, Any] = await super()._getmany(active_partitions, timeout)  # of Fetch
        handed: dict[TP, Followed] = {}
        for place, fetch in fetched.items():
            # What a beginning overtook on the way from that thread would have Faust drop what comes after it.
            if fetch.epoch == self._thread.footing.epoch(place):
                self._epochs[place] = fetch.epoch
                self.in_hand.take(place, [record for _, record in fetch.records])
                handed[place] = fetch.records
        return handed

    async def perform_seek(self) -> None:
        """Begin anew. What was fetched before is dropped or comes again, and must not be waited for."""
        await super().perform_seek()
        self.in_hand.forget(self.assignment())

    async def wait_first(self, *waits: Any, timeout: Any = None) -> Any:
        """The same, without four tasks and three turns of the event loop for every record.

        Faust hands each record to its stream in a race with an order to pause. Nearly always there is room and the
        record is handed over before anything is waited for; then the race is over before it needs a task.
        """
        if len(waits) != 2 or timeout is not None or not iscoroutine(waits[0]) or self._is_pausing:
            return await super().wait_first(*waits, timeout=timeout)
        handing_over, order = waits
        try:
            waits_for = handing_over.send(None)
        except StopIteration as done:
            order.close()
            return WaitResults([handing_over], [done.value], False)
        except BaseException:
            order.close()
            raise
        return await super().wait_first(_Begun(handing_over, waits_for), order)

    @property
    def _is_pausing(self) -> bool:
        return self.suspend_flow.is_set() or self._stopped.is_set() or self._crashed.is_set()

    def _to_message(self, tp: TP, record: Any) -> Any:
        follows, fetched = record
        message: Any = super()._to_message(tp, fetched)
        message.follows = follows
        message.epoch = self._epochs[tp]
        return message

    def _filter_tps_with_pending_acks(self, topics: Any = None) -> Iterator[TP]:
        return (tp for tp in list(self._covered) if topics is None or tp in topics or tp.topic in topics)

    def _new_offset(self, tp: TP) -> int | None:
        return self._covered.get(tp)

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        """Forget what was covered of partitions that are taken away, once Faust has committed it."""
        await super().on_partitions_revoked(revoked)
        self._thread.footing.forget(revoked)
        self.in_hand.forget(revoked)
        for tp in revoked:
            self._covered.pop(tp, None)

    async def _add_gap(self, tp: TP, offset_from: int, offset_to: int) -> None:
        """Nothing: gaps matter to Faust's own way of finding what to commit, and would pile up."""


class _Begun:
    """The rest of a coroutine that has run up to its first wait, which is for `waits_for`."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, waits_for = self._coroutine, self._waits_for
        try:
            while True:
                try:
                    told = yield waits_for
                except BaseException as error:  # noqa: BLE001 (thrown by the task that awaits; the coroutine's to handle)
                    waits_for = coroutine.throw(error)
                else:
                    waits_for = coroutine.send(told)
        except StopIteration as done:
            return done.value


class LedgerTransport(kafka_driver.Transport):
    """A transport of such consumers."""

    Consumer = LedgerConsumer
