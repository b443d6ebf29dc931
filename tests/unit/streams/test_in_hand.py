from __future__ import annotations

from typing import Any

from faust.types import TP

from streams.consumer import LedgerConsumer
from streams.in_hand import InHand
from streams.ledger.footing import Fetch, Footing
from streams.ledger.stretches import Stretch

A, B = TP("usage", 0), TP("usage", 1)


class Record:
    def __init__(self, offset: int, size_bytes: int) -> None:
        self.offset = offset
        self.key = None
        self.value = bytes(size_bytes)


def test_what_is_fetched_is_held_until_it_is_covered_or_belongs_to_others() -> None:
    held = InHand(max_bytes=10_000)
    held.take(A, [Record(n, 4000) for n in (5, 6)])
    assert not held.full
    held.take(A, [Record(9, 4000)])
    held.take(B, [Record(0, 4000)])
    assert held.full
    held.cover(A, 6)
    assert held.full, "half of a fetch is still in hand"
    held.cover(A, 10)
    assert not held.full
    assert held.size_bytes > 4000
    held.forget([A, B])
    assert held.size_bytes == 0
    held.cover(B, 99)
    assert held.size_bytes == 0


async def test_nothing_is_fetched_while_too_much_is_in_hand() -> None:
    class Thread:
        fetches = 0
        footing = Footing()

        def assignment(self) -> set[TP]:
            return {A}

        async def getmany(self, partitions: object, timeout: float) -> dict[TP, Fetch]:
            self.fetches += 1
            return {A: Fetch(epoch=None, records=[(0, Record(self.fetches, 6000))])}

    consumer: Any = object.__new__(LedgerConsumer)
    consumer.in_hand, consumer._covered, consumer._epochs = InHand(max_bytes=10_000), {}, {}
    consumer._thread = Thread()
    for _ in range(5):
        await consumer._getmany({A}, 0.0)
    assert consumer._thread.fetches == 2
    consumer.cover([Stretch(topic="usage", partition=0, begin=0, end=3)])
    assert await consumer._getmany({A}, 0.0)
