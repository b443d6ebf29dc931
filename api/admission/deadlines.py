"""Whether a request would be served in time: how long each pool's queue takes, and whether to shed.

A background loop reads the queues once a second from the log itself: what was written minus what the pool's workers
have committed (`api.admission.queue_delay`). Shedding is a 503 with the time after which there should be room; a 429
is only ever the caller's limit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Protocol

from api.admission.queue_delay import Own, PoolQueue, delay_s, measured, waiting_now
from api.errors import BadInput, DeadlinePassed, Unavailable
from infra.kafka import BusUnavailable
from infra.lag import Queue
from schemas.keys import prefixed, worker_group
from schemas.topics import DEFAULT_POOL, requests_topic

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
_READ_WITHIN_S = 3.0
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
#: What share of the time that a request has left may go by in the queue. Once requests are shed the lower one holds,
#: until the whole queue is below it: who is told to come back later finds more than a single place.
ENTER, LEAVE = 0.8, 0.6
#: The least time that a call may ask for. With less it could be over before it is admitted, at nobody's cost but ours.
LEAST_S = 0.01


class Reader(Protocol):
    """Reads queue lengths (infra.lag.LagReader fits)."""

    async def read(self, groups: Mapping[str, str]) -> dict[str, Queue]:
        """The queue of each topic -> group; topics that do not exist are left out. Raises BusUnavailable."""


def require_time(timeout_s: float, *, param: str = "timeout") -> None:
    """Raise BadInput, naming `param`, when a call asks for less time than the least."""
    if timeout_s < LEAST_S:
        raise BadInput(
            f"{param}: expected at least {LEAST_S * 1e6:.0f} microseconds, which a request needs to be admitted; "
            "ask for more",
            code="timeout_too_short",
            param=param,
        )


class Queues:
    """The queues of all pools, kept up to date by `run`. `deadline_s` is the longest that a request may take."""

    def __init__(
        self,
        *,
        namespace: str,
        max_queued: int,
        deadline_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespace = namespace
        self._max_queued = max_queued
        self._deadline_s = deadline_s
        self._clock = clock
        self._pools: dict[str, PoolQueue] = {}
        self._own: defaultdict[str, Own] = defaultdict(Own)
        self._shedding: set[str] = set()
        self._absent: frozenset[str] = frozenset()
        self._read_s = float("-inf")
        self._why = "not asked yet"

    def check(self, pool: str, *, within_s: float | None = None) -> PoolQueue | None:
        """Raise Unavailable when the pool has no queue, or one in which `within_s` (the longest deadline) would go by,
        and DeadlinePassed when that has gone by already.

        None: not measured yet, let it through.
        """
        if within_s is not None and within_s <= 0:
            raise DeadlinePassed("the call was not accepted: the time that it has was over before it was admitted")
        if pool in self._absent:
            raise Unavailable(
                f"no worker pool '{pool}' exists: its request topic is not there", code="no_such_pool", retry_after_s=5
            )
        queue = self._pools.get(pool)
        if queue is None:
            return None
        own, now_s = self._own[pool], self._clock()
        if (waiting := waiting_now(queue, own, now_s=now_s)) > self._max_queued:
            excess = waiting - self._max_queued / 2
            rate = queue.served_per_s or queue.shown_per_s
            raise _overloaded(pool, f"{waiting:.0f} requests wait", excess / rate if rate else _MAX_RETRY_S)
        expected_s = delay_s(queue, own, now_s=now_s)
        self._decide(pool, expected_s)
        left_s = self._deadline_s if within_s is None else within_s
        if expected_s > left_s * (LEAVE if pool in self._shedding else ENTER):
            words = f"a request would wait for some {expected_s:.2f} s, and has {left_s:.2f}"
            raise _overloaded(pool, words, expected_s - LEAVE * self._deadline_s)
        return queue

    def _decide(self, pool: str, expected_s: float) -> None:
        """Whether requests are shed is decided by the longest deadline: one that asks for less time is its own case."""
        if expected_s > ENTER * self._deadline_s:
            self._shedding.add(pool)
        elif expected_s <= LEAVE * self._deadline_s:
            self._shedding.discard(pool)

    @contextmanager
    def passing(self, pool: str) -> Iterator[None]:
        """Count a request of this process as one in the queue until the end of the block; it was answered if nothing is
        raised."""
        own, began_s = self._own[pool], self._clock()
        own.outstanding += 1
        own.let_in += 1
        try:
            yield
            own.answered(now_s := self._clock(), now_s - began_s)
        finally:
            own.outstanding -= 1

    def trouble(self, *, within_s: float = 5.0) -> str | None:
        """Why the queues are not known, None when they were read within `within_s`."""
        return None if self._clock() - self._read_s <= within_s else self._why

    async def measure(self, reader: Reader, pools: Collection[str]) -> None:
        """Read the queues of these pools. Raises BusUnavailable."""
        # The default pool is asked for even when no model is routed to it: the answer shows that Kafka answers.
        names = {prefixed(self._namespace, requests_topic(pool).name): pool for pool in {DEFAULT_POOL, *pools}}
        begun = {pool: own.let_in for pool, own in self._own.items()}
        found = await reader.read({topic: worker_group(self._namespace, pool) for topic, pool in names.items()})
        now_s = self._clock()
        self._absent = frozenset(pool for topic, pool in names.items() if topic not in found)
        pools = {
            names[topic]: measured(self._pools.get(names[topic]), queue, at_s=now_s) for topic, queue in found.items()
        }
        for pool, let_in in begun.items():
            own, before, after = self._own[pool], self._pools.get(pool), pools.get(pool)
            if before is not None and after is not None:
                written = after.done + after.waiting - before.done - before.waiting
                own.counted(written=written, mine=let_in)
            own.let_in -= let_in  # those that came meanwhile may be missing in what was read
        self._pools = pools
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


def _overloaded(pool: str, words: str, retry_s: float) -> Unavailable:
    retry_s = min(_MAX_RETRY_S, max(_MIN_RETRY_S, retry_s))
    return Unavailable(f"pool '{pool}' is overloaded: {words}", code="overloaded", retry_after_s=retry_s)
