from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from infra.kafka import BusUnavailable
from infra.schema_feed import SchemaFeed, teach
from infra.schema_topic import Take
from schemas.codec import Codec, UnknownSchema, encode
from schemas.facts import SchemaPublished
from schemas.frame import fingerprint
from schemas.lockfile import locked_schemas
from schemas.records import UsageRecorded
from tests.conditions import eventually
from tests.factories import usage
from tests.unit.infra.test_schema_publish import published

NEWER = next(s for s in locked_schemas() if s.record == UsageRecorded.SCHEMA)
FUTURE = 900


@dataclass
class Record:
    value: bytes | None
    offset: int
    topic: str = "inference.schemas.v1"
    partition: int = 0


class FakeLog:
    """Implements SchemaLog. `away` makes it fail; `hold` makes readings wait, one ends after the
    record at `breaks_after`; `reads` and `opened` count."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.away = False
        self.hold = asyncio.Event()
        self.hold.set()
        self.breaks_after: int | None = None
        self.reads = 0
        self.opened = 0

    def put(self, record: SchemaPublished | bytes) -> None:
        self.records.append(Record(record if isinstance(record, bytes) else encode(record), len(self.records)))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[FakeLog]:
        self.opened += 1
        if self.away:
            raise BusUnavailable("switched off")
        yield self

    async def read(self, start: int, take: Take) -> int:
        self.reads += 1
        if self.away:
            raise BusUnavailable("switched off")
        found, end = self.records[start:], len(self.records)
        await self.hold.wait()
        for record in found:
            take(record)
            if record.offset == self.breaks_after:
                self.breaks_after = None
                raise BusUnavailable("broke off")
        return end


def future_usage() -> SchemaPublished:
    """A schema of usage that no lock file has: one more field."""
    definition = NEWER.definition()
    definition["fields"].append({"name": "region", "type": ["null", "string"], "default": None, "doc": "Where."})
    return published(
        replace(NEWER, id=FUTURE), version=99, fingerprint=fingerprint(definition), definition=json.dumps(definition)
    )


@asynccontextmanager
async def following(log: FakeLog, codec: Codec, **options: float) -> AsyncIterator[SchemaFeed]:
    options = {"apart_s": 0.0, "follow_every_s": 3600.0, **options}
    feed = SchemaFeed(log.open, learn=codec.learn, **options)
    task = asyncio.ensure_future(feed.run())
    try:
        yield feed
    finally:
        task.cancel()
        await asyncio.wait([task])


def knows(codec: Codec) -> bool:
    """Whether a frame with the future id means something; its body is broken either way."""
    try:
        codec.decode(b"\x00" + FUTURE.to_bytes(4, "big"), UsageRecorded)
    except UnknownSchema:
        return False
    except ValueError:
        return True
    raise AssertionError("a frame without a body is no record")


async def test_what_is_on_the_log_at_the_start_and_later_is_learnt() -> None:
    log, codec = FakeLog(), Codec(locked_schemas())
    for schema in locked_schemas():
        log.put(published(schema))
    async with following(log, codec) as feed:
        await feed.catch_up(10)
        assert feed.counts == {"known": len(locked_schemas())}
        log.put(future_usage())
        await feed.catch_up(10)
        assert knows(codec)
        assert feed.counts["learnt"] == 1
        assert feed.trouble() is None


async def test_it_follows_without_being_asked() -> None:
    log, codec = FakeLog(), Codec(locked_schemas())
    async with following(log, codec, follow_every_s=0.01):
        log.put(future_usage())
        await eventually(lambda: knows(codec))


async def test_catching_up_means_a_reading_that_began_after_the_call() -> None:
    log, codec = FakeLog(), Codec(locked_schemas())
    log.hold.clear()
    async with following(log, codec) as feed:
        await eventually(lambda: log.reads == 1)  # it has looked, and has not answered yet
        log.put(future_usage())
        asked = asyncio.ensure_future(feed.catch_up(10))
        await asyncio.sleep(0)
        log.hold.set()
        await asked
        assert log.reads == 2
        assert knows(codec)


async def test_calls_at_the_same_time_share_a_reading() -> None:
    log, codec = FakeLog(), Codec(locked_schemas())
    async with following(log, codec) as feed:
        await feed.catch_up(10)
        before = log.reads
        await asyncio.gather(*(feed.catch_up(10) for _ in range(1000)))
        assert log.reads == before + 1


async def test_a_flood_of_calls_reads_no_more_often_than_it_may() -> None:
    log, codec = FakeLog(), Codec(locked_schemas())
    async with following(log, codec, apart_s=3600.0) as feed:
        await eventually(lambda: log.reads == 1)
        for _ in range(50):
            with pytest.raises(BusUnavailable, match="not read to its end in 0 s"):
                await feed.catch_up(0)
        assert log.reads == 1


async def test_while_the_log_is_away_callers_are_told_in_time_and_it_comes_back() -> None:
    log, codec = FakeLog(), Codec(locked_schemas())
    log.away = True
    async with following(log, codec) as feed:
        await eventually(lambda: log.opened > 2)
        with pytest.raises(BusUnavailable, match="switched off"):
            await feed.catch_up(0.05)
        assert "switched off" in (feed.trouble() or "")
        log.away = False
        log.put(future_usage())
        await feed.catch_up(10)
        assert knows(codec)
        assert feed.trouble() is None


async def test_what_was_read_is_not_read_again_after_an_outage() -> None:
    log, codec = FakeLog(), Codec(locked_schemas())
    log.put(future_usage())
    async with following(log, codec) as feed:
        await feed.catch_up(10)
        log.away = True
        with pytest.raises(BusUnavailable):
            await feed.catch_up(0.05)
        log.away = False
        await feed.catch_up(10)
        assert feed.counts == {"learnt": 1}


async def test_a_reading_that_breaks_off_goes_on_where_it_was() -> None:
    """A topic that takes longer to read than the server stays up would never be learnt otherwise."""
    log, codec = FakeLog(), Codec(locked_schemas())
    for _ in range(3):
        log.put(b"junk")
    log.put(future_usage())
    log.breaks_after = 1
    async with following(log, codec) as feed:
        await feed.catch_up(10)
        assert feed.counts == {"unreadable": 3, "learnt": 1}


def test_a_conflict_and_a_broken_record_are_counted_and_hold_nothing_up() -> None:
    codec = Codec(locked_schemas())
    log = FakeLog()
    log.put(b"junk")
    log.put(published(NEWER, record="inferlog.other.v1.Other"))
    log.put(published(replace(NEWER, id=901), definition="no schema"))
    log.put(future_usage())
    assert teach(log.records, codec.learn) == {"unreadable": 1, "conflicts": 2, "learnt": 1}
    assert knows(codec)
    record = usage()
    assert codec.decode(encode(record), UsageRecorded) == record  # the meaning that this process has stays
