"""Finds results on the log for callers whose result Redis does not have; asleep while nobody needs it.

While a result is needed the end of its partition is followed, and what is awaited there is found as it comes. What may
have come before is looked for from the time inside the request's id.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing

from api.results.log import Entry, Log, Schemas, size_bytes
from api.results.sought import Awaited, Deliver, Sought
from infra.kafka import BusUnavailable, partition_of_key
from infra.kafka_lookups import Lookups
from infra.pause import Pause
from schemas.first_results import SLACK_MS, Recorded

logger = logging.getLogger(__name__)

#: The most that one look reads: some 60,000 small results. What is further on is only found if it is still to come.
LOOK_BYTES = 32 * 1024 * 1024
_LOOK_WITHIN_S = 10.0
_NEWS_WITHIN_S = 0.05
#: A partition is followed for a while after nobody needs it: what is awaited next is then found as it comes.
_LINGER_S = 30.0
_PROBE_S = 1.0
#: Requests admitted within this much of each other are looked for together.
_TOGETHER_MS = 30_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class ResultLog:
    """The results topic as the waiting calls of this process need it. `follow` and `look` run for ever beside them.

    `counts` says what was read, found and survived since the start.
    """

    def __init__(
        self,
        open_log: Callable[[], AbstractAsyncContextManager[Log]],
        lookups: Lookups[Log],
        *,
        topic: str,
        schemas: Schemas | None = None,
    ) -> None:
        self._open_log = open_log
        self._lookups = lookups
        self._topic = topic
        self._told: Deliver = lambda key, found, is_needed: None
        self._awaited = Awaited(self._deliver, schemas)
        self._unplaced: list[Sought] = []  # needed, and not known yet whether to be looked for
        self._to_look: deque[Sought] = deque()
        self._partitions = 0
        self._followed: dict[int, int] = {}  # partition to the number of its following
        self._heads: dict[int, int] = {}  # partition to the offset before which everything was taken
        self._used_s: dict[int, float] = {}
        self._numbers = itertools.count()
        self._wanted, self._due = asyncio.Event(), asyncio.Event()
        self._failing_since_s: float | None = None
        self._why = ""
        self.counts: Counter[str] = Counter(
            results_from_log=0, result_log_looks=0, result_log_bytes=0, result_log_failures=0, result_log_given_up=0
        )

    def deliver_to(self, deliver: Deliver) -> None:
        """Whom to tell of results that are found."""
        self._told = deliver

    def trouble(self) -> str | None:
        """Why results that are needed cannot be found on the log now; None when they can, or none is needed."""
        return None if self._failing_since_s is None else self._why

    def away_s(self) -> float:
        """For how long the log has not answered; 0 while it does, or is not asked."""
        return 0.0 if self._failing_since_s is None else time.monotonic() - self._failing_since_s

    def expect(self, key: bytes, *, since_ms: int, is_new: bool) -> None:
        """An id is awaited that was admitted at `since_ms` (Unix); `is_new` when no record of it is on the log yet."""
        watched = self._followed.get(self._place_of(key)) if is_new and self._followed else None
        self._awaited.expect(key, since_ms=since_ms, watched=watched)

    def forget(self, key: bytes) -> None:
        """It is not awaited any more."""
        self._awaited.forget(key)

    def need(self, key: bytes) -> None:
        """An awaited id is not in Redis though it might be: find it here. Again is once."""
        if (sought := self._awaited.need(key)) is not None:
            self._unplaced.append(sought)
            self._wanted.set()

    async def follow(self) -> None:
        """Follow the partitions of what is needed, for ever."""
        pause = Pause(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            await self._wanted.wait()
            try:
                async with self._open_log() as log:
                    await self._follow_needed(log)
                pause = Pause(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            except (BusUnavailable, asyncio.TimeoutError) as error:
                self._failed(error)
                await pause.wait()
            finally:
                self._heads, self._followed, self._unplaced = {}, {}, []  # at the next start all that is needed is new

    async def _follow_needed(self, log: Log) -> None:
        """Until nobody has needed anything for a while. Raises BusUnavailable."""
        self._partitions = await log.partitions(self._topic)
        if not self._partitions:
            raise BusUnavailable(f"topic {self._topic} is missing; run 'inferlog provision'")
        self._used_s, self._unplaced = {}, list(self._awaited.needed.values())
        heard_s = time.monotonic()
        while used := self._used():
            if used != self._heads.keys():
                await self._turn_to(log, used)
            self._place()
            records, self._heads = await log.news(within_s=_NEWS_WITHIN_S)
            self._take(records)
            if records:
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > _PROBE_S:  # it may be quiet, or away
                await log.ends(self._topic, used)
                heard_s = time.monotonic()
            self._answered()
            self._awaited.learn()
        self._wanted.clear()
        self._answered()

    def _used(self) -> set[int]:
        """The partitions to be followed now."""
        now_s = time.monotonic()
        self._used_s.update((self._place_of(key), now_s) for key in self._awaited.needed)
        return {p for p, used_s in self._used_s.items() if now_s - used_s < _LINGER_S}

    async def _turn_to(self, log: Log, used: set[int]) -> None:
        """Follow these partitions: those that are new from their end, the others on from where they are."""
        ends = await log.ends(self._topic, used - self._heads.keys())
        self._heads = {p: self._heads[p] if p in self._heads else ends[p] for p in used}
        self._followed = {p: self._followed.get(p, next(self._numbers)) for p in used}
        log.follow(self._topic, self._heads)

    def _place(self) -> None:
        """What is needed and may have come before its partition was followed is to be looked for."""
        unplaced, self._unplaced = self._unplaced, []
        for sought in unplaced:
            number = self._followed.get(self._place_of(sought.key))
            if number is None:
                self._unplaced.append(sought)
            elif sought.watched != number:
                self._to_look.append(sought)
                self._due.set()

    def _take(self, records: Sequence[Entry]) -> None:
        self.counts["result_log_bytes"] += size_bytes(records)
        for record in records:
            sought = self._awaited[record.key]
            if sought is not None and sought.watched == self._followed[record.partition]:
                self._awaited.offer(sought, record.value)

    async def look(self) -> None:
        """Look for what may have come before its partition was followed, for ever. Several of these may run."""
        pause = Pause(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            await self._due.wait()
            group = self._next_group()
            if not group:
                continue
            try:
                await asyncio.wait_for(self._look_for(group), _LOOK_WITHIN_S)
                pause = Pause(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            except (BusUnavailable, asyncio.TimeoutError) as error:
                self._failed(error)
                self._unplaced += self._still(group)
                await pause.wait()

    def _next_group(self) -> list[Sought]:
        """Of what is to be looked for the oldest, and what lies near it in the same partition."""
        waiting = self._still(self._to_look)
        self._to_look.clear()
        if not waiting:
            self._due.clear()
            return []
        oldest, group = min(waiting, key=lambda s: s.since_ms), []
        for sought in waiting:
            is_near = sought.since_ms - oldest.since_ms <= _TOGETHER_MS
            if is_near and self._place_of(sought.key) == self._place_of(oldest.key):
                group.append(sought)
            else:
                self._to_look.append(sought)
        return group

    async def _look_for(self, group: Sequence[Sought]) -> None:
        """Read from the time of the oldest up to where their partition is followed. Raises BusUnavailable."""
        partition, keys = self._place_of(group[0].key), {sought.key for sought in group}
        since_ms, left_bytes = min(s.since_ms for s in group) - SLACK_MS, LOOK_BYTES
        self.counts["result_log_looks"] += 1
        async with self._lookups.one() as log:
            at = (await log.between(self._topic, [partition], since_ms=since_ms))[partition].start
            while self._still(group):
                number, head = self._followed.get(partition), self._heads.get(partition)
                if number is None or head is None:  # the following broke off, and starts again
                    self._unplaced += self._still(group)
                    return
                if at >= head or left_bytes <= 0:
                    for sought in group:
                        sought.watched = number
                    self.counts["result_log_given_up"] += len(self._still(group)) if at < head else 0
                    return
                async with aclosing(log.read(self._topic, {partition: range(at, head)})) as batches:
                    async for records in batches:
                        left_bytes -= (read_bytes := size_bytes(records))
                        self.counts["result_log_bytes"] += read_bytes
                        for record in records:
                            if record.key in keys and (found := self._awaited[record.key]) is not None:
                                self._awaited.offer(found, record.value)
                        if left_bytes <= 0 or not self._still(group):
                            break
                    else:
                        at = head

    def _still(self, group: Sequence[Sought]) -> list[Sought]:
        """Those that are still needed."""
        return [sought for sought in group if self._awaited.needed.get(sought.key) is sought]

    def _place_of(self, key: bytes) -> int:
        return partition_of_key(key, self._partitions)

    def _deliver(self, key: bytes, found: Recorded, is_needed: bool) -> None:
        self.counts["results_from_log"] += 1
        self._told(key, found, is_needed)

    def _answered(self) -> None:
        if self._failing_since_s is not None:
            logger.info("results are read from the log again")
        self._failing_since_s = None

    def _failed(self, error: Exception) -> None:
        self._why = f"{type(error).__name__}: {error}"
        self.counts["result_log_failures"] += 1
        if self._failing_since_s is None:
            logger.warning("results cannot be read from the log", extra={"fields": {"why": self._why}})
            self._failing_since_s = time.monotonic()
        if not self._awaited.needed:  # nobody asks any more: it sleeps, and is in no trouble
            self._wanted.clear()
            self._failing_since_s = None
