"""Whether a request would be served in time: how long each pool's queue is, and whether to shed.

A background loop reads the queues once a second from the log itself: what was written minus what the pool's workers
have committed. Shedding is a 503 with the time after which there should be room; a 429 is only ever the caller's limit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from api.errors import Unavailable
from infra.kafka import BusUnavailable
from infra.lag import Queue
from schemas.keys import prefixed, worker_group
from schemas.topics import DEFAULT_POOL, requests_topic

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
_READ_WITHIN_S = 3.0
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolQueue:
    """A pool's queue as last measured; `served_per_s` is averaged over the last seconds, 0 when nothing was done."""

    partitions: int
    waiting: int
    done: int
    served_per_s: float
    measured_s: float


def measured(before: PoolQueue | None, now: Queue, *, at_s: float) -> PoolQueue:
    """The next measurement of a queue: the service rate is a moving average over about three readings."""
    rate = 0.0
    if before is not None and at_s > before.measured_s:
        latest = max(0, now.done - before.done) / (at_s - before.measured_s)
        rate = latest if before.served_per_s == 0 else before.served_per_s + (latest - before.served_per_s) / 3
    return PoolQueue(partitions=now.partitions, waiting=now.waiting, done=now.done, served_per_s=rate, measured_s=at_s)


def retry_in_s(queue: PoolQueue, *, max_queued: int) -> float:
    """Seconds until the queue should have fallen to half of what is allowed, at the measured service rate."""
    excess = queue.waiting - max_queued / 2
    if queue.served_per_s <= 0:
        return _MAX_RETRY_S
    return min(_MAX_RETRY_S, max(_MIN_RETRY_S, excess / queue.served_per_s))


class Reader(Protocol):
    """Reads queue lengths (infra.lag.LagReader fits)."""

    async def read(self, groups: Mapping[str, str]) -> dict[str, Queue]:
        """The queue of each topic -> group; topics that do not exist are left out. Raises BusUnavailable."""


class Queues:
    """The queues of all pools, kept up to date by `run`."""

    def __init__(self, *, namespace: str, max_queued: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._namespace = namespace
        self._max_queued = max_queued
        self._clock = clock
        self._pools: dict[str, PoolQueue] = {}
        self._absent: frozenset[str] = frozenset()
        self._read_s = float("-inf")
        self._why = "not asked yet"

    def check(self, pool: str, *, within_s: float | None = None) -> PoolQueue | None:
        """Raise Unavailable when the pool has no queue, or too long a one. None: not measured yet, let it through."""
        del within_s
        if pool in self._absent:
            raise Unavailable(
                f"no worker pool '{pool}' exists: its request topic is not there", code="no_such_pool", retry_after_s=5
            )
        queue = self._pools.get(pool)
        if queue is not None and queue.waiting > self._max_queued:
            raise Unavailable(
                f"pool '{pool}' is overloaded: {queue.waiting} requests wait",
                code="overloaded",
                retry_after_s=retry_in_s(queue, max_queued=self._max_queued),
            )
        return queue

    def trouble(self, *, within_s: float = 5.0) -> str | None:
        """Why the queues are not known, None when they were read within `within_s`."""
        return None if self._clock() - self._read_s <= within_s else self._why

    async def measure(self, reader: Reader, pools: Collection[str]) -> None:
        """Read the queues of these pools. Raises BusUnavailable."""
        # The default pool is asked for even when no model is routed to it: the answer shows that Kafka answers.
        names = {prefixed(self._namespace, requests_topic(pool).name): pool for pool in {DEFAULT_POOL, *pools}}
        found = await reader.read({topic: worker_group(self._namespace, pool) for topic, pool in names.items()})
        now_s = self._clock()
        self._absent = frozenset(pool for topic, pool in names.items() if topic not in found)
        self._pools = {
            names[topic]: measured(self._pools.get(names[topic]), queue, at_s=now_s) for topic, queue in found.items()
        }
        self._read_s = now_s

    async def run(
        self, open_reader: Callable[[], AbstractAsyncContextManager[Reader]], pools: Callable[[], Collection[str]]
    ) -> None:
        """Measure for ever, reconnecting after every error; says once when Kafka goes away and once when it is back."""
        away = False
        while True:
            try:
                async with open_reader() as reader:
                    while True:
                        await asyncio.wait_for(self.measure(reader, pools()), _READ_WITHIN_S)
                        if away:
                            logger.info("queue lengths are known again")
                        away = False
                        await asyncio.sleep(INTERVAL_S)
            except (BusUnavailable, OSError, asyncio.TimeoutError) as error:
                self._why = f"{type(error).__name__}: {error}"
                if not away:
                    logger.warning("queue lengths are unknown", extra={"fields": {"why": self._why}})
                away = True
                await asyncio.sleep(INTERVAL_S / 2)
