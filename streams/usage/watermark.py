"""Says in Postgres up to which time the ledger is complete, for whoever reads usage and cannot ask the log.

A moment is passed in two steps, each told by offsets: the workers have committed every request that was on the log by
then, so its usage is on the log; and the ledger has read what was there after that. Without a ledger it stands still.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Final

from infra.kafka import AIOKafkaConsumer, BusUnavailable, KafkaError, TopicPartition, open_consumer
from infra.kafka_admin import Admin, open_admin
from infra.kafka_spans import spans_kept
from infra.pause import Pause
from infra.postgres import Connection, is_outage, is_unusable, open_connection, queries
from infra.settings import KafkaSettings, PostgresSettings
from schemas.keys import ledger_group, prefixed, worker_group
from schemas.topics import USAGE, requests_topic
from streams.log import LogReader, open_log
from streams.usage.progress import Progress, settled_until

log = logging.getLogger(__name__)

INTERVAL_S: Final = 2.0
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 10.0
_LOOK_WITHIN_S: Final = 45.0
_REQUEST_MS: Final = 5_000


class Watermark:
    """Keeps the rows of those partitions of the usage topic that `assigned` names at the moment."""

    def __init__(
        self,
        kafka: KafkaSettings,
        postgres: PostgresSettings,
        *,
        assigned: Callable[[], Set[int]],
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._kafka = kafka
        self._postgres = postgres
        self._assigned = assigned
        self._now = now
        self._sleep = sleep
        #: Why it stands still; None while it does not.
        self.why: str | None = "not looked yet"

    async def run(self) -> None:
        """Look again and again until cancelled. No failure ends it: it is said once, and it tries again."""
        pause = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                async with self.open() as look:
                    while True:
                        await asyncio.wait_for(look.once(), _LOOK_WITHIN_S)
                        if self.why is not None:
                            log.info("the usage watermark is kept")
                        self.why, pause = None, Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
                        await self._sleep(INTERVAL_S)
            except Exception as error:  # noqa: BLE001 (none may end the ledger, which counts without it)
                self._stand_still(error)
            await self._sleep(pause.next_s())

    def _stand_still(self, error: Exception) -> None:
        away = isinstance(error, (BusUnavailable, KafkaError)) or is_outage(error) or is_unusable(error)
        if not away:
            log.error("the usage watermark failed and tries again", exc_info=error)
        elif self.why is None or self.why == "not looked yet":
            log.warning("the usage watermark stands still: %s: %s", type(error).__name__, error)
        self.why = f"{type(error).__name__}: {error}"

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Look]:
        """Connections of its own, and nothing remembered: what was seen before may be of another log or database."""
        async with (
            open_admin(self._kafka, request_timeout_ms=_REQUEST_MS) as admin,
            # Of uncommitted records, too: what lies behind a stranger's open transaction is on the log, and not read.
            open_consumer(self._kafka, group=None, committed=False, request_timeout_ms=_REQUEST_MS) as ends,
            open_log(self._kafka, decodes=False) as reader,
            open_connection(self._postgres, command_timeout_s=10) as connection,
        ):
            yield Look(
                admin=admin,
                ends=ends,
                reader=reader,
                connection=connection,
                namespace=self._kafka.namespace,
                assigned=self._assigned,
                now=self._now,
            )


@dataclass(slots=True, kw_only=True)
class Look:
    """What is seen and remembered over one set of connections."""

    admin: Admin
    ends: AIOKafkaConsumer
    reader: LogReader
    connection: Connection
    namespace: str
    assigned: Callable[[], Set[int]]
    now: Callable[[], datetime]
    _requests: Progress[TopicPartition] = field(default_factory=Progress)
    _usage: dict[int, Progress[int]] = field(default_factory=dict)
    _positions: dict[int, int] = field(default_factory=dict)
    _waits_at: dict[int, int] = field(default_factory=dict)
    _replaced: set[int] = field(default_factory=set)

    async def once(self) -> None:
        """Look at everything once and move the rows. Raises what the servers' homes raise."""
        # The order is what makes it true; each step is read after the one before.
        # 1  the clock, then where the requests end
        # 2  what the workers have committed: once that is past 1, their usage is on the log
        # 3  where usage ends: the usage of 1 lies below
        # 4  what the ledger has read: once that is past 3, its sums are whole
        now = self.now()
        settled = settled_until(await self._worked_off(now), now=now)
        topic = USAGE.in_namespace(self.namespace)
        places = [TopicPartition(topic.name, p) for p in range(topic.partitions)]
        ends = {place.partition: span.stop for place, span in (await spans_kept(self.ends, places)).items()}
        group = ledger_group(self.namespace)
        found = await self.connection.fetch(queries("streams.ledger")["positions"], group, topic.name)
        positions = {r["partition"]: r["next_offset"] for r in found}
        mine = sorted(self.assigned() & ends.keys())
        for partition in mine:
            progress = self._usage.setdefault(partition, Progress())
            if self._positions.get(partition, 0) > ends[partition]:
                # What was read before lies past the end now: this is another topic of that name.
                if partition not in self._replaced:
                    log.error("%s partition %d ends before what was counted: was it deleted?", topic.name, partition)
                self._replaced.add(partition)
                continue
            progress.note(settled, {partition: ends[partition]})
            at = await self._past_marks(topic.name, partition, positions.get(partition, 0), ends[partition])
            progress.read_up_to({partition: at})
        self._positions = positions
        if mine:
            moments = [self._usage[partition].reached for partition in mine]
            await self.connection.execute(queries("streams.usage")["move_watermarks"], group, topic.name, mine, moments)

    async def _worked_off(self, now: datetime) -> datetime | None:
        """The latest moment all of whose requests, of all pools, the workers have committed."""
        before, _, after = prefixed(self.namespace, requests_topic("*").name).partition("*")
        pools: dict[str, list[TopicPartition]] = {}
        for topic, partitions in (await self.admin.partition_counts()).items():
            if topic.startswith(before) and topic.endswith(after):
                pool = topic[len(before) : len(topic) - len(after)]
                pools[pool] = [TopicPartition(topic, p) for p in range(partitions)]
        places = [place for of_pool in pools.values() for place in of_pool]
        kept = await spans_kept(self.ends, places) if places else {}
        self._requests.note(now, {place: span.stop for place, span in kept.items()})
        # A group that has committed nothing will begin at the oldest record that is kept.
        positions = {place: span.start for place, span in kept.items()}
        for pool in pools:
            positions |= await self.admin.committed(worker_group(self.namespace, pool))
        return self._requests.read_up_to(positions)

    async def _past_marks(self, topic: str, partition: int, at: int, end: int) -> int:
        """The ledger's position, or the end where only marks of ended transactions are left, which nobody can read."""
        if at >= end or self._positions.get(partition, 0) != at or self._waits_at.get(partition) == at:
            return at  # all is read, or the ledger is at it, or a record waits there
        span = (await self.reader.freeze(topic, partition + 1))[partition]
        begin = max(at, span.first)
        if span.end != end:  # a transaction is open, or more has come
            return at
        if begin < end and await self.reader.first(topic, partition, begin=begin, end=end) is not None:
            self._waits_at[partition] = at
            return at
        return end
