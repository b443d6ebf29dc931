from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from api.health import Health, merged, tell_counts
from tests.conditions import eventually


def test_what_several_parts_count_is_told_together() -> None:
    first, second = Counter({"a": 1}), Counter({"b": 2})
    health = Health({}, counts=(first, second))
    second["b"] += 1
    assert health.counts() == {"a": 1, "b": 3}


async def test_what_was_counted_since_the_last_time_is_logged_and_nothing_while_nothing_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counts, rounds = Counter(a=1, b=0), 0

    class Watched(Counter[str]):
        def items(self) -> object:  # type: ignore[override]
            nonlocal rounds
            rounds += 1
            return counts.items()

    telling = asyncio.ensure_future(tell_counts((Watched(),), every_s=0))
    with caplog.at_level(logging.WARNING):
        await eventually(lambda: rounds > 5)
        assert not caplog.records
        counts["b"] += 7
        seen = rounds
        await eventually(lambda: rounds > seen + 5)
    telling.cancel()
    (record,) = caplog.records
    assert record.fields == {"b": 7}  # type: ignore[attr-defined]


def test_what_two_parts_count_by_one_name_adds_up() -> None:
    assert merged(({"spend_unknown": 2, "a": 1}, {"spend_unknown": 3})) == {"spend_unknown": 5, "a": 1}
