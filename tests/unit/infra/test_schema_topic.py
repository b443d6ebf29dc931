from __future__ import annotations

import asyncio
from typing import Any

import pytest

from infra.kafka import BusUnavailable, KafkaError, TopicPartition
from infra.schema_topic import SchemaTopic

PLACE = TopicPartition("inference.schemas.v1", 0)


class FakeConsumer:
    """As much of aiokafka's consumer as reading to the end takes; `records` are offsets, `end` may lie past them."""

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
        found = [type("Record", (), {"offset": n}) for n in self.records if n >= self.at]
        self.at = self.end
        return {PLACE: found}

    async def position(self, place: TopicPartition) -> int:
        return self.at


def topic(consumer: Any) -> SchemaTopic:
    return SchemaTopic(consumer, PLACE.topic)


async def offsets(consumer: FakeConsumer, start: int) -> tuple[list[int], int]:
    records, end = await topic(consumer).read(start)
    return [r.offset for r in records], end


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
        await topic(consumer).read(0)
