"""Every topic: its name, key, record, partitions and retention, and the rule that picks a request's partition.

The one place where a topic's name is spelled.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache

from schemas.keys import prefixed
from schemas.records import DeadLetter, InferenceFinished, InferenceRequested, Record, UsageRecorded

_DAY_MS = 24 * 3600 * 1000

DEFAULT_POOL = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic as it must exist on the broker; `why` justifies key, partitions and retention."""

    name: str
    key: str
    record: type[Record]
    partitions: int
    retention_ms: int
    cleanup_policy: str = "delete"
    max_message_bytes: int = 8 * 1024 * 1024
    why: str

    def in_namespace(self, namespace: str) -> Topic:
        """The same topic under a namespace's prefix."""
        return replace(self, name=prefixed(namespace, self.name))

    def config(self) -> dict[str, str]:
        """Broker-side settings."""
        return {
            "cleanup.policy": self.cleanup_policy,
            "retention.ms": str(self.retention_ms),
            "max.message.bytes": str(self.max_message_bytes),
        }


def requests_topic(pool: str = DEFAULT_POOL) -> Topic:
    """The queue of one pool."""
    return Topic(
        name=f"inference.requests.{pool}.v1",
        key="request_id",
        record=InferenceRequested,
        partitions=8,
        retention_ms=40 * _DAY_MS,
        why="Partition is chosen by version (see partition_for), so that few workers hold a version's weights; limits "
        "and conservation are proved from it, and so only as far back as it is kept.",
    )


RESULTS = Topic(
    name="inference.results.v1",
    key="request_id",
    record=InferenceFinished,
    partitions=8,
    retention_ms=40 * _DAY_MS,
    why="Keyed by request, so that all records of a request share a partition and the first can be told.",
)
USAGE = Topic(
    name="inference.usage.v1",
    key="customer_id",
    record=UsageRecorded,
    partitions=8,
    retention_ms=400 * _DAY_MS,
    why="Keyed by customer, so that one customer's usage is in order; kept past a year for disputes over invoices.",
)
DEAD_LETTERS = Topic(
    name="inference.dead-letters.v1",
    key="source topic",
    record=DeadLetter,
    partitions=1,
    retention_ms=400 * _DAY_MS,
    why="Rare and read by people; one partition keeps them in order.",
)


def all_topics(pools: tuple[str, ...] = (DEFAULT_POOL,)) -> tuple[Topic, ...]:
    """Every topic an installation with these pools needs."""
    return (*(requests_topic(pool) for pool in pools), RESULTS, USAGE, DEAD_LETTERS)


@lru_cache(maxsize=4096)
def partitions_for_version(version: str, *, partitions: int, spread: int) -> tuple[int, ...]:
    """The `spread` partitions that carry a version, best first (rendezvous hashing, Thaler and Ravishankar 1998).

    Adding partitions or raising `spread` moves as few versions as possible.
    """
    if not 1 <= spread <= partitions:
        raise ValueError(f"spread: expected 1 to {partitions} (the topic's partitions), got {spread}")

    def score(partition: int) -> bytes:
        return hashlib.blake2b(f"{version}/{partition}".encode(), digest_size=8).digest()

    return tuple(sorted(range(partitions), key=score, reverse=True)[:spread])


def partition_for(version: str, request_number: int, *, partitions: int, spread: int) -> int:
    """Partition of a request: its version's partitions in turn, by any number that varies between requests."""
    chosen = partitions_for_version(version, partitions=partitions, spread=spread)
    return chosen[request_number % len(chosen)]
