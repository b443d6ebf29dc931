"""A stall is lag without movement for a while; anything else restarts the clock."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock
from uuid import UUID

import pytest

from infra.settings import KafkaSettings
from streams.watchdog import StallDetector, Stalled, Standing, Watchdog


def standing(next_offset: int, end: int) -> dict[int, Standing]:
    return {0: Standing(next_offset=next_offset, end=end)}


def test_lag_without_movement_is_a_stall_after_its_time() -> None:
    detector = StallDetector(stall_s=10)
    assert detector.observe(standing(5, 9), now_s=100) == {}
    assert detector.observe(standing(5, 20), now_s=109) == {}
    assert detector.observe(standing(5, 20), now_s=110) == {0: 10}


def test_movement_restarts_the_clock() -> None:
    detector = StallDetector(stall_s=10)
    detector.observe(standing(5, 9), now_s=100)
    detector.observe(standing(6, 9), now_s=109)
    assert detector.observe(standing(6, 9), now_s=118) == {}
    assert detector.observe(standing(6, 9), now_s=119) == {0: 10}


def test_nothing_to_read_is_never_a_stall() -> None:
    detector = StallDetector(stall_s=10)
    for now_s in range(0, 1000, 5):
        assert detector.observe(standing(9, 9), now_s=now_s) == {}
    assert detector.observe(standing(9, 10), now_s=1001) == {}


def test_a_partition_that_was_given_back_starts_anew() -> None:
    detector = StallDetector(stall_s=10)
    detector.observe(standing(5, 9), now_s=100)
    detector.observe({}, now_s=105)
    assert detector.observe(standing(5, 9), now_s=111) == {}


def test_an_explained_pause_starts_anew() -> None:
    detector = StallDetector(stall_s=10)
    detector.observe(standing(5, 9), now_s=100)
    detector.forget()
    assert detector.observe(standing(5, 9), now_s=111) == {}


async def test_a_topic_that_is_another_by_now_ends_the_process_whatever_else_holds() -> None:
    class Reader:
        async def freeze(self, _topic: str, _partitions: int) -> dict[int, object]:
            return {}

        async def topic_id(self, _topic: str) -> UUID | None:
            return found[0]

    found: list[UUID | None] = [None]
    watchdog = Watchdog(
        KafkaSettings(bootstrap="127.0.0.1:1", namespace="t"),
        topic="t",
        partitions=1,
        stall_s=10,
        positions=AsyncMock(return_value={}),
        assigned=set,
        holding=lambda: "Postgres is away",
    )
    reader: Any = Reader()
    for known, now in ((None, UUID(int=2)), (UUID(int=1), None), (UUID(int=1), UUID(int=1))):
        watchdog.topic_id, found[0] = known, now
        await watchdog.look(reader)
    found[0] = UUID(int=2)
    with pytest.raises(Stalled, match="deleted and made anew"):
        await watchdog.look(reader)
