"""Progress, not liveness: a worker that has records to read and does not move ends itself, with the reason.

Consumers have been seen to log on for days without reading anything. Lag is measured with a connection of the
watchdog's own, and movement by the ledger's position in Postgres, so neither depends on the consumer it watches.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, field
from uuid import UUID

from infra.kafka import BusUnavailable
from infra.postgres import is_outage
from infra.settings import KafkaSettings
from streams.log import LogReader, open_log

log = logging.getLogger(__name__)

#: How long an orderly end may take once a stall is certain; a consumer that hangs may hang in its stop, too.
LAST_RESORT_S = 10.0


class Stalled(RuntimeError):
    """Records wait, nothing moves, and nothing known (a held batch, a server that is away) explains it; or the topic is
    another one by now.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One partition: the ledger's next offset and the end of the log."""

    next_offset: int
    end: int


@dataclass(slots=True, kw_only=True)
class StallDetector:
    """Remembers when each partition last moved or had nothing to do. Pure apart from that memory."""

    stall_s: float
    _since: dict[int, tuple[int, float]] = field(default_factory=dict)

    def observe(self, standings: Mapping[int, Standing], *, now_s: float) -> dict[int, float]:
        """Partitions that have had lag without movement for `stall_s` seconds or more, and for how long."""
        stalled = {}
        known = {}
        for partition, s in standings.items():
            offset, since = self._since.get(partition, (s.next_offset, now_s))
            if s.end <= s.next_offset or offset != s.next_offset:
                since = now_s
            known[partition] = (s.next_offset, since)
            if now_s - since >= self.stall_s:
                stalled[partition] = now_s - since
        self._since = known
        return stalled

    def forget(self) -> None:
        """Start all clocks anew: what was seen so far had an explanation."""
        self._since = {}


class Watchdog:
    """Watches one topic's partitions on behalf of one worker.

    `positions` gives the ledger's next offsets, `assigned` this worker's partitions (all are watched while it has
    none: a group that nobody serves is a stall, too), `holding` why a batch is held right now, or None.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        topic: str,
        partitions: int,
        stall_s: float,
        positions: Callable[[], Awaitable[dict[int, int]]],
        assigned: Callable[[], Set[int]],
        holding: Callable[[], str | None],
    ) -> None:
        self._settings = settings
        self._topic = topic
        self._partitions = partitions
        self._positions = positions
        self._assigned = assigned
        self._holding = holding
        self._detector = StallDetector(stall_s=stall_s)
        self._pause_s = min(stall_s / 4, 2.0)
        #: Which topic the positions are of; None: not known.
        self.topic_id: UUID | None = None
        self.lag: int | None = None
        self.stalled: str | None = None

    async def run(self) -> None:
        """Look again and again. Raises Stalled; a server that is away only restarts the clocks."""
        while True:
            try:
                async with open_log(self._settings, decodes=False) as reader:
                    while True:
                        await self.look(reader)
                        await asyncio.sleep(self._pause_s)
            except Exception as error:
                if not (isinstance(error, BusUnavailable) or is_outage(error)):
                    raise
                self.lag = None
                self._detector.forget()
                log.warning("the watchdog cannot look: %s: %s", type(error).__name__, error)
                await asyncio.sleep(self._pause_s)

    async def look(self, reader: LogReader) -> None:
        """One look. Raises Stalled, BusUnavailable."""
        found = await reader.topic_id(self._topic)
        if None not in (found, self.topic_id) and found != self.topic_id:
            # A consumer goes on in it by offset, past its first records.
            self.stalled = f"{self._topic} was deleted and made anew; a new start reads it from its beginning"
            raise Stalled(self.stalled)
        spans = await reader.freeze(self._topic, self._partitions)
        if self._holding() is not None:
            # Delivery knows what it waits for, says so, and is bounded by its own deadline.
            self._detector.forget()
            return
        positions = await self._positions()
        standings = {p: Standing(next_offset=max(positions.get(p, 0), s.first), end=s.end) for p, s in spans.items()}
        self.lag = sum(s.end - s.next_offset for s in standings.values() if s.end > s.next_offset)
        mine = self._assigned() or set(standings)
        suspects = self._detector.observe({p: s for p, s in standings.items() if p in mine}, now_s=time.monotonic())
        for partition, seconds in suspects.items():
            at = standings[partition]
            waiting = await reader.first(self._topic, partition, begin=at.next_offset, end=at.end)
            if waiting is not None:  # else only transaction markers lie ahead, which nobody can read
                self.stalled = (
                    f"{self._topic} partition {partition}: the record at offset {waiting.offset} has waited "
                    f"{seconds:.0f} s, and the ledger has not moved from {at.next_offset} (end {at.end})"
                )
                raise Stalled(self.stalled)


def end_for_certain(after_s: float = LAST_RESORT_S) -> None:
    """End the process with status 1 after a while, even if its orderly stop hangs."""
    timer = threading.Timer(after_s, os._exit, args=(1,))
    timer.daemon = True
    timer.start()
