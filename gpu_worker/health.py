"""Whether this worker makes progress, and whether it can be given work: each answer is a list of reasons why not.

Progress is measured where it matters, at the loop and at the poll; a process that answers HTTP may still be stuck.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from gpu_worker.cancellations import Cancellations
from gpu_worker.inbox import Inbox
from gpu_worker.outcomes import KafkaRedisOutcomes
from gpu_worker.worker import Worker
from infra.blobs import ClaimCheck
from infra.kafka import KafkaError
from infra.redis import Redis, RedisError

#: The loop turns at least once a second; only one batch that runs this long, or a fault, keeps it from that.
STUCK_AFTER_S = 60.0
_ASK_TIMEOUT_S = 2.0


class Health:
    """Answers before anything is started too: alive, not ready."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._inbox: Inbox | None = None
        self._outcomes: KafkaRedisOutcomes | None = None
        self._redis: Redis | None = None
        self._check: ClaimCheck | None = None
        self._cancellations = Cancellations()

    def watch(
        self,
        *,
        worker: Worker,
        inbox: Inbox,
        outcomes: KafkaRedisOutcomes,
        redis: Redis,
        check: ClaimCheck,
        cancellations: Cancellations,
    ) -> None:
        """From now on answer for these."""
        self._cancellations = cancellations
        self._worker, self._inbox, self._outcomes, self._redis, self._check = worker, inbox, outcomes, redis, check

    async def alive(self) -> list[str]:
        """Why the process should be restarted; empty while it makes progress or waits for Kafka to start with."""
        if self._worker is None or self._inbox is None:
            return []
        reasons = []
        turned_s = time.time() - self._worker.turned_at_s
        if turned_s > STUCK_AFTER_S:
            reasons.append(f"the loop has not turned for {turned_s:.0f} s")
        polled_s = asyncio.get_running_loop().time() - self._inbox.polled_at_s
        if self._inbox.joined and polled_s > STUCK_AFTER_S:
            reasons.append(f"Kafka was not polled for {polled_s:.0f} s")
        return reasons

    async def ready(self) -> list[str]:
        """Why the worker cannot be given work now."""
        if self._inbox is None or self._redis is None:
            return ["Kafka was not reached yet"]
        reasons = await self.alive()
        if not self._inbox.joined:
            reasons.append("the group has not assigned partitions yet")
        try:
            await asyncio.wait_for(self._inbox.reach_broker(), _ASK_TIMEOUT_S)
        except (KafkaError, asyncio.TimeoutError) as error:
            reasons.append(f"Kafka: {error!r}")
        try:
            await asyncio.wait_for(self._redis.ping(), _ASK_TIMEOUT_S)
        except (RedisError, asyncio.TimeoutError) as error:
            reasons.append(f"Redis: {error!r}")
        return reasons

    def figures(self) -> dict[str, Any]:
        """Counters since the start, and what is amiss that small requests do not notice."""
        if self._worker is None or self._outcomes is None or self._inbox is None or self._check is None:
            return {}
        degraded = {"S3": self._check.trouble(), "cancellations": self._cancellations.trouble()}
        counts = {**self._worker.counts, **self._outcomes.counts, **self._check.counts}
        return {
            "counts": {**counts, **self._cancellations.counts, "set_aside": self._inbox.set_aside},
            "degraded": [f"{part}: {why}" for part, why in degraded.items() if why is not None],
        }
