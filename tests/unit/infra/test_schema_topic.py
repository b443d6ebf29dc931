from __future__ import annotations

import asyncio
from typing import Any

import pytest

from infra.kafka import BusUnavailable, KafkaError, TopicPartition
from infra.schema_topic import SchemaTopic

PLACE = TopicPartition("inference.schemas.v1", 0)


class FakeConsumer:
    """As much of aiokafka's consumer as reading to the end takes; `records` are offsets, `end` may lie past them."""

    at_once = 1000

    def __init__(self, *records: int) -> None:
        self.records = list(records)
        self.end = len(records)
        self.at = 0
        self.fetching = False
        self.fails: Exception | None = None

    async def end_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        if self.fails is not None:
            raise self.fails
        return dict.fromkeys(places, self.end)

    def assign(self, places: list[TopicPartition]) -> None:
        self.fetching = True

    def seek(self, place: TopicPartition, offset: int) -> None:
        self.at = offset

    def pause(self, *places: TopicPartition) -> None:
        self.fetching = False

    async def getmany(self, *places: TopicPartition, timeout_ms: int) -> dict[TopicPartition, list[Any]]:
        found = [type("Record", (), {"offset": n}) for n in self.records if n >= self.at][: self.at_once]
        self.at = found[-1].offset + 1 if len(found) == self.at_once else self.end
        return {PLACE: found}

    async def position(self, place: TopicPartition) -> int:
        return self.at


def topic(consumer: Any) -> SchemaTopic:
    return SchemaTopic(consumer, PLACE.topic)


async def offsets(consumer: FakeConsumer, start: int) -> tuple[list[int], int]:
    taken: list[int] = []
    end = await topic(consumer).read(start, lambda record: taken.append(record.offset))
    return taken, end


async def test_it_reads_from_where_it_was_to_the_present_end() -> None:
    consumer = FakeConsumer(0, 1, 2)
    assert await offsets(consumer, 0) == ([0, 1, 2], 3)
    assert await offsets(consumer, 3) == ([], 3)
    consumer.records, consumer.end = [0, 2, 5], 6  # compaction has taken some away
    assert await offsets(consumer, 3) == ([5], 6)


async def test_a_topic_made_anew_is_read_whole() -> None:
    assert await offsets(FakeConsumer(0, 1), 14) == ([0, 1], 2)


async def test_between_readings_nothing_is_fetched() -> None:
    """A fetch that waits for news would keep the broker busy and hold up the next question for the end."""
    consumer = FakeConsumer(0)
    await offsets(consumer, 0)
    assert not consumer.fetching


@pytest.mark.parametrize("error", [KafkaError("gone"), asyncio.TimeoutError()])
async def test_a_broker_that_is_away_is_told_as_such(error: Exception) -> None:
    consumer = FakeConsumer(0)
    consumer.fails = error
    with pytest.raises(BusUnavailable, match=r"inference\.schemas\.v1"):
        await topic(consumer).read(0, lambda record: None)


async def test_records_are_handed_over_as_they_come_and_not_kept() -> None:
    """The topic may be larger than memory: whoever may write to it decides how large it is."""
    consumer = FakeConsumer(*range(6))
    consumer.at_once = 2
    seen: list[tuple[int, int]] = []
    await topic(consumer).read(0, lambda record: seen.append((record.offset, consumer.at)))
    assert [offset for offset, _ in seen] == list(range(6))
    assert all(at <= offset + consumer.at_once for offset, at in seen)


async def test_what_was_taken_before_a_fault_is_told() -> None:
    consumer = FakeConsumer(*range(6))
    consumer.at_once = 2
    taken: list[int] = []

    def take(record: Any) -> None:
        taken.append(record.offset)
        if record.offset == 3:
            raise KafkaError("gone")

    with pytest.raises(BusUnavailable):
        await topic(consumer).read(0, take)
    assert taken == [0, 1, 2, 3]
