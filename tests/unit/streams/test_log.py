"""Timestamps are the producer's choice: whatever it is, a record of it can be read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from infra.kafka import TopicPartition
from streams.log import LogReader, Span, moment


@pytest.mark.parametrize("timestamp_ms", [-1, 0, 1, -(2**63), 2**63 - 1, 10**15, -(10**15)])
def test_any_timestamp_is_a_time_that_can_be_written_down(timestamp_ms: int) -> None:
    assert moment(timestamp_ms).isoformat()


def test_a_timestamp_is_its_moment_to_the_millisecond() -> None:
    assert moment(1_780_000_000_123) == datetime(2026, 5, 28, 20, 26, 40, 123_000, tzinfo=timezone.utc)


class Consumer:
    """It answers as aiokafka does: no time before 1970."""

    def __init__(self) -> None:
        self.asked_ms: list[int] = []

    async def beginning_offsets(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, 0)

    async def end_offsets(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, 9)

    async def offsets_for_times(self, times: dict[TopicPartition, int]) -> dict[TopicPartition, Any]:
        self.asked_ms += times.values()
        if min(times.values()) < 0:
            raise ValueError("the target time cannot be negative")
        return dict.fromkeys(times, SimpleNamespace(offset=3))


async def test_a_time_before_all_that_kafka_knows_is_its_first() -> None:
    consumer: Any = Consumer()
    spans = await LogReader(consumer).freeze("t", 2, since=datetime(1969, 1, 1, tzinfo=timezone.utc))
    assert spans[1] == Span(first=0, begin=3, end=9)
    assert consumer.asked_ms == [0, 0]
