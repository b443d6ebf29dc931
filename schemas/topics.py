"""Every topic: its name, key, record, partitions and retention, and the rule that picks a request's partition.

The one place where a topic's name is spelled.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from schemas.facts import (
    BillingAdjusted,
    CustomerChanged,
    KeyChanged,
    ModelPublished,
    PriceBookPublished,
    Record,
    RouteChanged,
    SchemaPublished,
)
from schemas.keys import prefixed
from schemas.records import DeadLetter, InferenceFinished, InferenceRequested, RequestCancelled, UsageRecorded

_DAY_MS = 24 * 3600 * 1000
_FOR_EVER = -1

#: What a topic of one record may be called, without its namespace, as a regular expression.
TOPIC_NAME = r"inference\.[a-z][a-z0-9-]{0,79}\.v[1-9][0-9]{0,3}"

DEFAULT_POOL = "default"
#: What a pool may be called, as a regular expression.
POOL_NAME = "[a-z0-9-]{1,40}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic as it must exist on the broker; `why` justifies key, partitions and retention.

    `retention_ms` is -1 for ever. `may_grow`: partitions may be added, because no key must stay where it is.
    """

    name: str
    key: str
    record: type[Record]
    partitions: int
    retention_ms: int
    cleanup_policy: str = "delete"
    may_grow: bool = False
    max_message_bytes: int = 8 * 1024 * 1024
    why: str

    def in_namespace(self, namespace: str) -> Topic:
        """The same topic under a namespace's prefix."""
        return replace(self, name=prefixed(namespace, self.name))

    @property
    def retention_days(self) -> int | None:
        """Whole days that a record is kept at least; None for ever."""
        return None if self.retention_ms < 0 else self.retention_ms // _DAY_MS

    @property
    def kept(self) -> str:
        """How long a record is kept, in words: "40 days", "for ever"."""
        if self.cleanup_policy == "compact":
            return "for ever, the newest per key"
        return "for ever" if self.retention_days is None else f"{self.retention_days} days"

    def config(self) -> dict[str, str]:
        """Broker-side settings."""
        return {
            "cleanup.policy": self.cleanup_policy,
            "retention.ms": str(self.retention_ms),
            "max.message.bytes": str(self.max_message_bytes),
        }


def require_pool_name(pool: str) -> str:
    """The name itself, if a pool may have it. Raises ValueError saying what was expected."""
    if not re.fullmatch(POOL_NAME, pool):
        raise ValueError(f"expected the name of a pool: 1 to 40 of a-z, 0-9 and '-', found {pool!r}")
    return pool


def requests_topic(pool: str = DEFAULT_POOL) -> Topic:
    """The queue of one pool."""
    return Topic(
        name=f"inference.requests.{pool}.v1",
        key="request_id",
        record=InferenceRequested,
        partitions=8,
        retention_ms=40 * _DAY_MS,
        may_grow=True,
        why="Partition is chosen by version (see partition_for), so that few workers hold a version's weights; limits "
        "and conservation are proved from it, and so only as far back as it is kept.",
    )


def _changes(name: str, key: str, record: type[Record]) -> Topic:
    """The history of a table."""
    return Topic(
        name=f"inference.{name}.v1",
        key=key,
        record=record,
        partitions=1,
        retention_ms=_FOR_EVER,
        why="Rare, and kept whole for ever: what was true at any moment is read off it. One partition keeps the order "
        "of the table's changes; compaction would keep only the last state.",
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


CANCELLATIONS = Topic(
    name="inference.cancellations.v1",
    key="request_id",
    record=RequestCancelled,
    partitions=1,
    retention_ms=40 * _DAY_MS,
    why="Every worker reads all of it, so one partition; kept as long as the requests it is about.",
)
MODELS = _changes("models", "model", ModelPublished)
ROUTES = _changes("routes", "model", RouteChanged)
KEYS = _changes("keys", "key_id", KeyChanged)
CUSTOMERS = _changes("customers", "customer_id", CustomerChanged)
PRICES = _changes("prices", "price_id", PriceBookPublished)
ADJUSTMENTS = _changes("adjustments", "customer_id", BillingAdjusted)
SCHEMAS = Topic(
    name="inference.schemas.v1",
    key="schema id",
    record=SchemaPublished,
    partitions=1,
    retention_ms=_FOR_EVER,
    cleanup_policy="compact",
    why="An id means one schema for ever, so the newest record per id is all there is to know.",
)


class UnknownTopic(ValueError):
    """No topic has that name; the message says which names there are."""


def short_name(name: str, *, namespace: str = "") -> str:
    """What people call the topic of this full name: `usage` for `inference.usage.v1`, in whichever namespace."""
    return name.removeprefix(prefixed(namespace, "")).removeprefix("inference.").removesuffix(".v1")


def find_topic(name: str, *, namespace: str = "") -> Topic:
    """The topic of a short name (`usage`, `requests.POOL`) or a full one, in its namespace. Raises UnknownTopic."""
    known = {short_name(t.name): t for t in all_topics()}
    short = short_name(name, namespace=namespace)
    pool = re.fullmatch(rf"requests(?:\.({POOL_NAME}))?", short)
    if pool is not None:
        found: Topic | None = requests_topic(pool.group(1)) if pool.group(1) else requests_topic()
    else:
        found = known.get(short)
    if found is None:
        first = ["usage", "results", "requests[.POOL]"]
        others = known.keys() - {"usage", "results", short_name(requests_topic().name)}
        raise UnknownTopic(f"there is no topic '{name}'; expected one of {', '.join([*first, *sorted(others)])}")
    return found.in_namespace(namespace)


def all_topics(pools: tuple[str, ...] = (DEFAULT_POOL,)) -> tuple[Topic, ...]:
    """Every topic an installation with these pools needs."""
    changes = (MODELS, ROUTES, KEYS, CUSTOMERS, PRICES, ADJUSTMENTS)
    return (*(requests_topic(pool) for pool in pools), RESULTS, USAGE, CANCELLATIONS, DEAD_LETTERS, *changes, SCHEMAS)


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
