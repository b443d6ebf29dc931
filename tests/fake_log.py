"""The log as the gateway reads it, in memory: lists of records by topic and partition, and a switch for "away"."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from api.results.log import Entry, Log, Schemas
from api.results.result_log import ResultLog
from infra.kafka import BusUnavailable, partition_of_key
from infra.kafka_lookups import Lookups


@dataclass(frozen=True)
class FakeEntry:
    """Implements Entry; `time_ms` is its timestamp."""

    partition: int
    offset: int
    time_ms: int
    key: bytes | None
    value: bytes | None


class FakeLog:
    """Implements Log, for as many readers as are opened: `add` appends a record by its key.

    `opened` counts readers and `read_offsets` what they were given; while `away`, every question fails.
    """

    def __init__(self, *, partitions: int = 4) -> None:
        self.away = False
        self.opened = 0
        self.read_offsets: list[tuple[str, int, int]] = []
        self.held = asyncio.Event()
        self.held.set()
        self._partitions = partitions
        self._records: dict[str, list[list[FakeEntry]]] = {}

    def add(self, topic: str, key: bytes, value: bytes | None, *, time_ms: int, partition: int | None = None) -> int:
        """Append, and return the offset."""
        places = self._records.setdefault(topic, [[] for _ in range(self._partitions)])
        number = partition_of_key(key, self._partitions) if partition is None else partition
        offset = len(places[number])
        places[number].append(FakeEntry(number, offset, time_ms, key, value))
        return offset

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Log]:
        """A reader."""
        self.ask()
        self.opened += 1
        yield FakeReader(self)

    def ask(self) -> None:
        """What every question does first."""
        if self.away:
            raise BusUnavailable("switched off")

    def places(self, topic: str) -> list[list[FakeEntry]]:
        """Its partitions; none if nothing was ever added."""
        return self._records.get(topic, [])


class FakeReader:
    """Implements Log."""

    def __init__(self, log: FakeLog) -> None:
        self._log = log
        self._followed: tuple[str, dict[int, int]] = ("", {})

    async def partitions(self, topic: str) -> int:
        self._log.ask()
        return len(self._log.places(topic))

    async def ends(self, topic: str, partitions: Collection[int]) -> dict[int, int]:
        self._log.ask()
        return {p: len(self._log.places(topic)[p]) for p in partitions}

    async def between(
        self, topic: str, partitions: Collection[int], *, since_ms: int, until_ms: int | None = None
    ) -> dict[int, range]:
        self._log.ask()
        found = {}
        for p in partitions:
            records = self._log.places(topic)[p]
            start, stop = (
                next((r.offset for r in records if at is not None and r.time_ms >= at), len(records))
                for at in (since_ms, until_ms)
            )
            found[p] = range(start, max(start, stop))
        return found

    async def read(self, topic: str, spans: Mapping[int, range]) -> AsyncGenerator[Sequence[Entry], None]:
        for p, span in spans.items():
            for offset in span:
                await self._log.held.wait()
                self._log.ask()
                self._log.read_offsets.append((topic, p, offset))
                yield [self._log.places(topic)[p][offset]]

    def follow(self, topic: str, heads: Mapping[int, int]) -> None:
        self._followed = (topic, dict(heads))

    async def news(self, *, within_s: float) -> tuple[Sequence[Entry], dict[int, int]]:
        await asyncio.sleep(0.001)
        topic, heads = self._followed
        new: list[Entry] = []
        for p, head in heads.items() if not self._log.away else ():  # a broker that is away is just silent
            new += self._log.places(topic)[p][head:]
            heads[p] = len(self._log.places(topic)[p])
        return new, dict(heads)


def result_log(log: FakeLog | None = None, *, topic: str = "results", schemas: Schemas | None = None) -> ResultLog:
    """One on a log; without a log it is never asked, as long as its loops do not run."""
    found = log or FakeLog()
    return ResultLog(found.open, Lookups[Log](found.open, most=1), topic=topic, schemas=schemas)
