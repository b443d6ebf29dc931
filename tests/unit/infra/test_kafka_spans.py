"""What of a partition is to be read, however it changes while that is asked."""

from __future__ import annotations

from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from infra.kafka import BusUnavailable, KafkaError, TopicPartition
from infra.kafka_spans import span_since, spans_kept, spans_since
from streams.log import LogReader

PLACE = TopicPartition("t", 0)


class Growing:
    """A partition that held [first, end) when it was asked for its end; `found` is the offset for a time."""

    def __init__(self, *, first: int, end: int, found: int | None) -> None:
        self._first, self._end, self._found = first, end, found
        self.fails = False

    async def beginning_offsets(self, places: Any) -> dict[TopicPartition, int]:
        if self.fails:
            raise KafkaError("gone")
        return dict.fromkeys(places, self._first)

    async def end_offsets(self, places: Any) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, self._end)

    async def offsets_for_times(self, times: Any) -> dict[TopicPartition, Any]:
        if self.fails:
            raise KafkaError("gone")
        return dict.fromkeys(times, None if self._found is None else SimpleNamespace(offset=self._found))


@pytest.mark.parametrize(
    ("found", "kept", "expected"),
    [
        (3, range(1, 7), range(3, 7)),
        (1, range(1, 7), range(1, 7)),
        (None, range(1, 7), range(7, 7)),
        (9, range(1, 7), range(7, 7)),  # it came after the end was asked for
        (0, range(1, 7), range(1, 7)),
    ],
)
async def test_a_span_since_a_time_lies_within_what_is_kept(found: int | None, kept: range, expected: range) -> None:
    assert span_since(found, kept) == expected
    consumer: Any = Growing(first=kept.start, end=kept.stop, found=found)
    assert await spans_since(consumer, {PLACE: kept}, since_ms=5) == {PLACE: expected}
    (span,) = (await LogReader(consumer).freeze("t", 1, since=datetime.now(timezone.utc))).values()
    assert (span.first, span.begin, span.end) == (kept.start, expected.start, expected.stop)
    assert span.end - span.begin >= 0, "else the progress of the reading ends below nothing"


async def test_a_partition_that_was_emptied_meanwhile_holds_nothing() -> None:
    consumer: Any = Growing(first=9, end=7, found=None)
    assert await spans_kept(consumer, [PLACE]) == {PLACE: range(9, 9)}


async def test_a_broker_that_is_away_is_told_with_the_topic() -> None:
    consumer: Any = Growing(first=0, end=0, found=None)
    consumer.fails = True
    for asking in (spans_kept(consumer, [PLACE]), spans_since(consumer, {PLACE: range(1)}, since_ms=1)):
        with pytest.raises(BusUnavailable, match="gone"):
            await asking
    with pytest.raises(BusUnavailable, match=r"^t: .*gone"):
        await LogReader(consumer).freeze("t", 1)
