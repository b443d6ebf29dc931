"""Timestamps are the producer's choice: whatever it is, a record of it can be read."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from streams.replay.log import moment


@pytest.mark.parametrize("timestamp_ms", [-1, 0, 1, -(2**63), 2**63 - 1, 10**15, -(10**15)])
def test_any_timestamp_is_a_time_that_can_be_written_down(timestamp_ms: int) -> None:
    assert moment(timestamp_ms).isoformat()


def test_a_timestamp_is_its_moment_to_the_millisecond() -> None:
    assert moment(1_780_000_000_123) == datetime(2026, 5, 28, 20, 26, 40, 123_000, tzinfo=timezone.utc)
