"""Customers take turns with the readers of the log."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from api.errors import RateLimited
from api.results import readers as module
from api.results.log import Log
from api.results.readers import AT_ONCE, Readers
from infra.kafka import BusUnavailable
from infra.kafka_lookups import Lookups
from tests.conditions import eventually
from tests.fake_log import FakeLog

ACME, OTHER = "cus_acme", "cus_other"


class Room:
    """So many readers, and customers who keep one until they are told to go. `begun` names who got one, in order."""

    def __init__(self, *, most: int) -> None:
        self.log = FakeLog()
        self.readers = Readers(Lookups[Log](self.log.open, most=most))
        self.begun: list[str] = []
        self._go = asyncio.Semaphore(0)

    async def look(self, customer_id: str) -> None:
        async with self.readers.one(customer_id):
            self.begun.append(customer_id)
            await self._go.acquire()

    async def look_for_ever(self, customer_id: str) -> None:
        while True:
            await self.look(customer_id)

    def end_one(self) -> None:
        """Whoever has had a reader for the longest gives it back."""
        self._go.release()


async def _settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("most", [1, 2])
async def test_one_customer_with_endless_look_ups_does_not_keep_another_waiting(most: int) -> None:
    room = Room(most=most)
    tasks = [asyncio.ensure_future(room.look_for_ever(ACME)) for _ in range(AT_ONCE)]
    await eventually(lambda: room.begun == [ACME])
    await _settled()
    tasks += [asyncio.ensure_future(room.look_for_ever(OTHER)) for _ in range(AT_ONCE)]
    if most == 1:  # there is none left: the other one is the next, though three were there before
        await _settled()
        room.end_one()
    await eventually(lambda: room.begun[:2] == [ACME, OTHER])
    for seen in range(2, 10):
        await _settled()
        room.end_one()
        await eventually(lambda seen=seen: len(room.begun) > seen)  # type: ignore[misc]
    assert abs(room.begun.count(ACME) - room.begun.count(OTHER)) <= 1
    await _ended(tasks)


async def test_a_customer_has_so_many_at_once_and_others_have_their_own() -> None:
    room = Room(most=2)
    tasks = [asyncio.ensure_future(room.look(ACME)) for _ in range(AT_ONCE)]
    await eventually(lambda: room.begun == [ACME])
    with pytest.raises(RateLimited, match="the cache did not answer in time or no longer has") as refused:
        await room.look(ACME)
    assert refused.value.headers["Retry-After"]
    tasks.append(asyncio.ensure_future(room.look(OTHER)))
    for _ in tasks:
        room.end_one()
    await asyncio.gather(*tasks)
    assert room.begun.count(ACME) == AT_ONCE
    assert not room.readers._customers


async def test_nobody_waits_for_ever_and_who_gave_up_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(most=1)
    first = asyncio.ensure_future(room.look(ACME))
    await eventually(lambda: room.begun == [ACME])
    monkeypatch.setattr(module, "TURN_WITHIN_S", 0.01)
    for customer_id in (ACME, OTHER):
        with pytest.raises(BusUnavailable, match="other look-ups came first"):
            await room.look(customer_id)
    monkeypatch.setattr(module, "TURN_WITHIN_S", 60.0)
    hung_up = asyncio.ensure_future(room.look(OTHER))
    await _settled()
    await _ended([hung_up])
    room.end_one()
    await first
    assert not room.readers._customers
    room.end_one()
    await room.look(OTHER)
    assert room.begun == [ACME, OTHER]
    assert room.log.opened == 1


async def test_while_no_reader_can_be_opened_nobody_is_kept_from_trying() -> None:
    room = Room(most=1)
    room.log.away = True
    for _ in range(3):
        with pytest.raises(BusUnavailable, match="switched off"):
            await room.look(ACME)
    room.log.away = False
    room.end_one()
    await room.look(ACME)
