"""The log as the gateway reads it: topics searched by time and followed, and schemas of newer writers learnt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Protocol


class Entry(Protocol):
    """A record on the log (aiokafka's fits)."""

    @property
    def partition(self) -> int:
        """Where it lies."""

    @property
    def offset(self) -> int:
        """Where it lies there."""

    @property
    def key(self) -> bytes | None:
        """The bytes that picked the partition."""

    @property
    def value(self) -> bytes | None:
        """The framed record."""


class Log(Protocol):
    """A reader of topics, for one task at a time (infra.kafka_lookup.Lookup fits).

    What waits raises BusUnavailable.
    """

    async def partitions(self, topic: str) -> int:
        """Number of partitions, 0 where there is no such topic."""

    async def ends(self, topic: str, partitions: Collection[int]) -> dict[int, int]:
        """The offsets behind the last records."""

    async def between(
        self, topic: str, partitions: Collection[int], *, since_ms: int, until_ms: int | None = None
    ) -> dict[int, range]:
        """Per partition the offsets from the first record stamped `since_ms` (Unix) or later, up to the present end.

        With `until_ms` they end before the first record stamped then or later.
        """

    def read(self, topic: str, spans: Mapping[int, range]) -> AsyncGenerator[Sequence[Entry], None]:
        """The records of these offsets, some at a time, in order within each partition."""

    def follow(self, topic: str, heads: Mapping[int, int]) -> None:
        """Have `news` read these partitions and no others, each from this offset on."""

    async def news(self, *, within_s: float) -> tuple[Sequence[Entry], dict[int, int]]:
        """What came since the last call, and where each partition is read on."""


class Schemas(Protocol):
    """Where schemas of newer writers are learnt from (infra.schema_feed.SchemaFeed fits)."""

    def ask(self) -> int:
        """Have what is published now learnt soon."""

    def answered(self, number: int) -> bool:
        """Whether that is done, for the number that `ask` gave."""


def size_bytes(records: Sequence[Entry]) -> int:
    """What these records came to, keys and values."""
    return sum(len(record.value or b"") + len(record.key or b"") for record in records)
