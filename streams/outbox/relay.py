"""Publishes the outbox: every fact on its topic exactly once, in the order of the changes, by one relay at a time.

Whatever goes wrong ends the round, and a new round begins with the lock, the fence and the look at the topics; so there
is one way to go on after a crash, an outage and a bug alike (docs/decisions/0008-facts-by-outbox.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Final
from uuid import UUID

from infra.kafka import BusUnavailable, ConsumerRecord, KeyedRecord, TopicPartition, open_consumer
from infra.kafka_spans import read_spans, span_from, spans_kept
from infra.kafka_topic_ids import Position, trusted
from infra.kafka_transactions import PARTITION, Publisher, Refused, open_publisher
from infra.outbox import (
    Seen,
    WaitingFact,
    first_waiting,
    settle,
    take_relay_lock,
    topics_waiting,
)
from infra.pause import Pause
from infra.postgres import Connection, connect, is_outage, is_unusable
from infra.settings import KafkaSettings, PostgresSettings
from schemas.headers import EVENT_ID
from schemas.keys import prefixed
from streams.outbox.backfill import tell_old_rows, untold
from streams.outbox.standing import Standing, next_stride

log = logging.getLogger(__name__)

#: A fact is published at most this long after its COMMIT, plus one transaction.
POLL_S: Final = 0.2
STANDBY_POLL_S: Final = 1.0
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 10.0
MAX_ROWS: Final = 500
MAX_BYTES: Final = 8 * 1024 * 1024
# In this order: a publication is given up, then the broker ends its transaction, then Postgres frees the lock.
PUBLISH_S: Final = 15.0
TRANSACTION_S: Final = 20.0
LEASE_S: Final = 30.0
_ID_BYTES: Final = 36


class Relay:
    """The relay of one installation. `lease_s` is how long a frozen relay keeps the others out."""

    def __init__(
        self,
        kafka: KafkaSettings,
        postgres: PostgresSettings,
        *,
        lease_s: float = LEASE_S,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._kafka = kafka
        self._postgres = postgres
        self._lease_s = lease_s
        self._sleep = sleep
        self._stride = MAX_ROWS
        self.standing = Standing()

    async def run(self) -> None:
        """Relay until cancelled. No failure ends it: it is said once, and the next round comes after a pause."""
        pause = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                await self.round()
            except Exception as error:  # noqa: BLE001 (all are said by the standing, and none may end the ledger)
                if self.standing.state != "away":
                    pause = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
                known = isinstance(error, BusUnavailable) or is_outage(error) or is_unusable(error)
                self.standing.away(f"{type(error).__name__}: {error}", bug=None if known else error)
            await self._sleep(pause.next_s())

    async def round(self) -> None:
        """Wait to be the one relay, then publish until something fails. Raises whatever that is."""
        # 1  take the lock           dying after it: Postgres frees it with the session, after lease_s at the latest
        # 2  tell old rows           dying in between: the next relay goes on after the last slice; see _tell_slice
        # 3  fence                   from here no earlier relay can publish; a transaction it left open is void
        # 4  look at the topics      what earlier relays published is removed; dying anywhere: the next one looks again.
        #                            Where others keep a transaction open the look is not over, and the topic is held
        # 5  publish what waits      see _publish_first
        async with _open_connection(self._postgres) as connection:
            while not await take_relay_lock(connection, lease_s=self._lease_s):
                self.standing.standby()
                await self._sleep(STANDBY_POLL_S)
            told = await tell_old_rows(connection, progress=self.standing.telling)
            if told:
                log.info("%d facts about rows older than the outbox wait to be published", told)
            self.standing.passed_over(await untold(connection))
            while True:
                async with self.open_publisher() as publisher:
                    unseen = await self._look(connection, publisher, await self._ends(connection, publisher))
                    self.standing.active()
                    await self._publish(connection, publisher, unseen)

    def open_publisher(self) -> AbstractAsyncContextManager[Publisher]:
        """The one publisher of this installation's facts from now on."""
        transactional_id = prefixed(self._kafka.namespace, "outbox-relay")
        return open_publisher(self._kafka, transactional_id, transaction_timeout_s=TRANSACTION_S)

    def _place(self, topic: str) -> TopicPartition:
        return TopicPartition(prefixed(self._kafka.namespace, topic), PARTITION)

    async def _there(self, publisher: Publisher, topics: Iterable[str]) -> dict[str, UUID | None]:
        """The ids of those of these topics that exist; both are without the namespace."""
        names = {self._place(topic).topic: topic for topic in topics}
        return {names[name]: found for name, found in (await publisher.topic_ids(list(names))).items()} if names else {}

    async def _ends(self, connection: Connection, publisher: Publisher) -> dict[str, Position]:
        """The topics that facts wait for, each with an offset below which all lies that earlier relays published."""
        ids = await self._there(publisher, await topics_waiting(connection))
        if not ids:
            return {}
        # To a reader of committed records a topic ends where the oldest open transaction begins, whoever opened it.
        async with open_consumer(self._kafka, group=None, committed=False) as consumer:
            kept = await spans_kept(consumer, [self._place(topic) for topic in ids])
        return {topic: Position(ids[topic], kept[self._place(topic)].stop) for topic in ids}

    async def _look(
        self, connection: Connection, publisher: Publisher, ends: Mapping[str, Position]
    ) -> dict[str, Position]:
        """Remove from the outbox what is on its topic, whoever published it and whether or not it learnt that.

        Returns those of the topics that could not be read up to their ends, because others have a transaction open.
        """
        noted = {topic: at for topic, at in (await topics_waiting(connection)).items() if topic in ends}
        # Asked for before anything is read: a topic that is made anew after this is not taken for the one noted below.
        ids = await self._there(publisher, noted)
        bare = {self._place(topic): topic for topic in ids}
        reached: dict[str, Position] = {}
        if bare:
            found = 0
            for topic in (t for t in ids if noted[t].topic_id not in (None, ids[t])):
                log.warning("the topic %s is another one than before: it lacks the facts told until then", topic)
            async with open_consumer(self._kafka, group=None, max_poll_records=2000) as consumer:
                kept = await spans_kept(consumer, list(bare))
                known = {place: trusted(noted[topic], ids[topic]) for place, topic in bare.items()}
                spans = {p: span_from(known[p], first=s.start, end=s.stop) for p, s in kept.items()}
                async with aclosing(read_spans(consumer, spans)) as batches:
                    async for records in batches:
                        # Also a sign of life: the session, and with it the lock, would end if it were silent for long.
                        found += await settle(connection, facts_in(records, bare), {})
            reached = {bare[place]: Position(ids[bare[place]], span.stop) for place, span in spans.items()}
            found += await settle(connection, [], reached)
            if found:
                log.info("%d facts of the outbox were on their topics already", found)
        # What was made anew since the ends were asked for holds nothing of earlier relays.
        same = [topic for topic in reached if ids[topic] == ends[topic].topic_id]
        unseen = {topic: ends[topic] for topic in same if reached[topic].next_offset < ends[topic].next_offset}
        why = "a transaction of another writer is open there since offset {}"
        self.standing.hold({topic: why.format(reached[topic].next_offset) for topic in unseen})
        return unseen

    async def _publish(self, connection: Connection, publisher: Publisher, unseen: Mapping[str, Position]) -> None:
        """Publish until a record is refused, then return: the publisher is of no more use.

        Nothing is published to a topic in `unseen` before it was looked at up to the offset given.
        """
        while True:
            if self.standing.must_look():
                unseen = await self._look(connection, publisher, unseen)
            if self.standing.retry_blocked():
                self._stride = 1  # what is refused again costs one attempt
            apart_from = [*unseen, *self.standing.blocked_topics()]
            rows = await first_waiting(connection, rows=self._stride, size_bytes=MAX_BYTES, apart_from=apart_from)
            if not rows:
                self.standing.nothing_waits()
                await self._sleep(POLL_S)
                continue
            try:
                await self._publish_first(connection, publisher, rows)
            except Refused as error:
                if error.topic is not None or len(rows) == 1:
                    first = next(r for r in rows if error.topic in (None, prefixed(self._kafka.namespace, r.topic)))
                    self.standing.block(first, str(error))
                self._stride = next_stride(self._stride, tried=len(rows), refused=True, most=MAX_ROWS)
                return
            self._stride = next_stride(self._stride, tried=len(rows), refused=False, most=MAX_ROWS)
            self.standing.did_publish(rows)

    async def _publish_first(self, connection: Connection, publisher: Publisher, rows: Sequence[WaitingFact]) -> None:
        # 1  publish the rows in one Kafka transaction    dying before its commit: no reader ever sees them; they wait
        # 2  its commit    dying after it: they are on the topic and in the outbox; the next look finds and removes them
        # 3  remove them and note how far the topics are known, in one statement    dying after it: done
        records = [KeyedRecord(prefixed(self._kafka.namespace, r.topic), r.key, r.value, r.headers) for r in rows]
        reached = await publisher.publish(records, timeout_s=PUBLISH_S)
        names = {prefixed(self._kafka.namespace, r.topic): r.topic for r in rows}
        seen = [Seen(r.event_id, r.topic, r.key, r.value) for r in rows]
        await settle(connection, seen, {names[name]: end for name, end in reached.items()})


def facts_in(records: Iterable[ConsumerRecord], topics: Mapping[TopicPartition, str]) -> list[Seen]:
    """What may be facts among these records, by their ids; those of other writers have none, or no good one."""
    found: list[Seen] = []
    odd: list[ConsumerRecord] = []
    for record in records:
        said = [value for name, value in record.headers if name == EVENT_ID]
        if not said or record.key is None or record.value is None:
            continue
        event_id = _id_of(said)
        if event_id is None:
            odd.append(record)
        else:
            topic = topics[TopicPartition(record.topic, record.partition)]
            found.append(Seen(event_id, topic, record.key, record.value))
    if odd:  # said once for all of them: whoever writes one may write a million
        place = f"{odd[0].topic} partition {odd[0].partition} offset {odd[0].offset}"
        log.warning("no facts, as their headers %s are not one id: %d records, first %s", EVENT_ID, len(odd), place)
    return found


def _id_of(said: Sequence[bytes | None]) -> UUID | None:
    """The id in the one header that every record of a relay has, as a relay writes it; None for anything else."""
    if len(said) != 1 or said[0] is None or len(said[0]) != _ID_BYTES:
        return None
    try:
        found = UUID(said[0].decode())
    except ValueError:
        return None
    return found if str(found).encode() == said[0] else None


@asynccontextmanager
async def _open_connection(settings: PostgresSettings) -> AsyncIterator[Connection]:
    """The session that holds the lock; dropped without a word, so that a server that is stopped delays nobody."""
    connection = await connect(settings, timeout_s=5, command_timeout_s=10)
    try:
        yield connection
    finally:
        connection.terminate()
