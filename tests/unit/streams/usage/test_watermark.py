"""How often the watermark is looked at, and how seldom while it cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from infra.kafka import BusUnavailable
from infra.settings import KafkaSettings, PostgresSettings
from streams.usage.watermark import FIRST_PAUSE_S, INTERVAL_S, LONGEST_PAUSE_S, Watermark


async def test_pauses_grow_while_it_stands_still_and_begin_anew_after_a_look() -> None:
    pauses: list[float] = []
    there = {7, 8}

    class Looking:
        async def once(self) -> None:
            if len(pauses) not in there:
                raise BusUnavailable("away again")

    class Failing(Watermark):
        @asynccontextmanager
        async def open(self) -> AsyncIterator[Looking]:  # type: ignore[override]
            if len(pauses) not in there:
                raise BusUnavailable("away")
            yield Looking()

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 11:
            raise asyncio.CancelledError

    nowhere = KafkaSettings(bootstrap="", namespace=""), PostgresSettings(dsn="")
    watermark = Failing(*nowhere, assigned=frozenset, sleep=sleep)
    with pytest.raises(asyncio.CancelledError):
        await watermark.run()
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[6] == LONGEST_PAUSE_S
    assert pauses[7:] == [INTERVAL_S, INTERVAL_S, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S]
    assert watermark.why == "BusUnavailable: away"
