"""Schemas of newer writers, learnt from the log while the process runs.

    run()         reads the schemas topic to its end, again and again, and teaches the codec what it finds
    catch_up()    waits for a reading that began after the call: ask it before a record's schema is called unknown

While Kafka is away the feed waits for it and the process goes on with what it knows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from infra.kafka import BusUnavailable
from infra.schema_topic import SchemaLog, open_schema_topic
from infra.settings import KafkaSettings
from infra.tasks import end
from schemas.codec import DecodeError, Placed, decode_at
from schemas.codec import learn as learn_here
from schemas.facts import SchemaPublished
from schemas.lockfile import LockfileError

log = logging.getLogger(__name__)

_FOLLOW_EVERY_S = 5.0
#: However many ask, readings begin at least this far apart; one that finds nothing new is a single small question.
_APART_S = 0.25
_LONGEST_PAUSE_S = 5.0
_CATCH_UP_S = 10.0
_CLOSE_WITHIN_S = 2.0

Learn = Callable[[SchemaPublished], bool]


def teach(records: Iterable[Placed], learn: Learn = learn_here) -> Counter[str]:
    """Give each record's schema to the codec; returns how many were learnt, known, in conflict and unreadable.

    A conflict is an id that means something else here: the meaning that this process has stays.
    """
    counts: Counter[str] = Counter()
    for record in records:
        try:
            published = decode_at(record, SchemaPublished)
            new = learn(published)
        except DecodeError as error:
            counts["unreadable"] += 1
            log.error("no schema can be read here: %s", error)
        except LockfileError as error:
            counts["conflicts"] += 1
            log.error("the schema at offset %d is not taken: %s", record.offset, error)
        else:
            counts["learnt" if new else "known"] += 1
            if new:
                fields = {"id": published.schema_id, "record": published.record, "version": published.version}
                log.info("learnt the schema of a newer writer", extra={"fields": fields})
    return counts


class SchemaFeed:
    """One process's view of the schemas topic; `counts` is the sum of what `teach` found.

    `open_log` opens a reader; it and the reader raise BusUnavailable while Kafka is away.
    """

    def __init__(
        self,
        open_log: Callable[[], AbstractAsyncContextManager[SchemaLog]],
        *,
        learn: Learn = learn_here,
        follow_every_s: float = _FOLLOW_EVERY_S,
        apart_s: float = _APART_S,
    ) -> None:
        self._open_log = open_log
        self._learn = learn
        self._follow_every_s = follow_every_s
        self._apart_s = apart_s
        self._next = 0  # offset of the first record that was not read
        self._began = 0  # readings begun
        self._done = 0  # number of the newest reading that came to the end
        self._read = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._why: str | None = None
        self._away = False
        self.counts: Counter[str] = Counter()

    def ask(self) -> int:
        """Have the topic read soon, without waiting for it; `answered` tells by this number when that was done."""
        self._wanted.set()
        return self._began + 1

    def answered(self, number: int) -> bool:
        """Whether all that was on the topic when `ask` gave this number is learnt."""
        return self._done >= number

    def trouble(self) -> str | None:
        """Why the topic cannot be followed now, None when it can."""
        return self._why

    def figures(self) -> dict[str, object]:
        """What the feed found since the process started, and why it stands still, for a health page."""
        return {"learnt": self.counts["learnt"], "conflicts": self.counts["conflicts"], "trouble": self._why}

    async def catch_up(self, timeout_s: float = _CATCH_UP_S) -> None:
        """Return once all that was on the schemas topic at the time of the call is learnt. Raises BusUnavailable.

        Calls at the same time share one reading.
        """
        wanted = self.ask()

        async def read() -> None:
            async with self._read:
                await self._read.wait_for(lambda: self.answered(wanted))

        try:
            await asyncio.wait_for(read(), timeout_s)
        except asyncio.TimeoutError as error:
            raise BusUnavailable(
                f"the schemas topic was not read to its end in {timeout_s:g} s; last: {self._why or 'no answer'}"
            ) from error

    async def run(self) -> None:
        """Follow the topic for ever. Faults of the server are waited out, anything unforeseen is logged and retried."""
        pause_s = self._apart_s
        while True:
            done = self._done
            try:
                async with self._open_log() as topic:
                    while True:
                        began_s = time.monotonic()
                        await self._read_on(topic)
                        await self._until_next(began_s)
            except (BusUnavailable, OSError, asyncio.TimeoutError) as error:
                self._why = f"{type(error).__name__}: {error}"
                if not self._away:
                    log.warning("schemas are not followed now", extra={"fields": {"reason": self._why}})
                self._away = True
            except Exception as error:
                log.exception("following the schemas topic failed and starts again")
                self._why = f"{type(error).__name__}: {error}"
            pause_s = self._apart_s if self._done > done else min(2 * pause_s, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _read_on(self, topic: SchemaLog) -> None:
        self._began = number = self._began + 1
        self._wanted.clear()
        self._next, self._why = await topic.read(self._next, self._take), None
        if self._away:
            log.info("schemas are followed again")
        self._away = False
        async with self._read:
            self._done = number
            self._read.notify_all()

    def _take(self, record: Placed) -> None:
        self.counts += teach((record,), self._learn)
        self._next = record.offset + 1  # a reading that breaks off goes on from here

    async def _until_next(self, began_s: float) -> None:
        """Until somebody asks or it is time, and not before `_apart_s` have passed."""
        with suppress(asyncio.TimeoutError):
            left_s = began_s + self._follow_every_s - time.monotonic()
            await asyncio.wait_for(self._wanted.wait(), max(0.0, left_s))
        await asyncio.sleep(max(0.0, began_s + self._apart_s - time.monotonic()))


@asynccontextmanager
async def open_schema_feed(settings: KafkaSettings, *, learn: Learn = learn_here) -> AsyncIterator[SchemaFeed]:
    """The feed of a process, followed while the block runs. Opening it waits for nothing and never fails."""
    feed = SchemaFeed(lambda: open_schema_topic(settings), learn=learn)
    following = asyncio.ensure_future(feed.run())
    try:
        yield feed
    finally:
        await end([following], within_s=_CLOSE_WITHIN_S)


async def learn_nothing() -> None:
    """In the place of `catch_up`, for a process that knows all schemas it will ever know."""


async def learn_once(settings: KafkaSettings) -> Counter[str]:
    """Learn what is on the log now, for a process that reads and ends. Raises BusUnavailable."""
    counts: Counter[str] = Counter()
    async with open_schema_topic(settings) as topic:
        await topic.read(0, lambda record: counts.update(teach((record,))))
    return counts
