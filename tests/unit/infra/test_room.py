"""Memory for fetched tensors: shared in the order of asking, and none of it lost with whoever stops waiting."""

from __future__ import annotations

import asyncio

import pytest

from infra.room import Room
from tests.conditions import eventually


def _asking(room: Room, *sizes: int) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(room.take(size)) for size in sizes]


async def test_what_fits_is_had_at_once_and_the_rest_waits_in_order() -> None:
    room = Room(10)
    first, second, third = _asking(room, 6, 5, 1)
    await first
    for _ in range(5):
        await asyncio.sleep(0)
    assert (second.done(), third.done()) == (False, False), "no small one overtakes for ever"
    room.give_back(6)
    await asyncio.gather(second, third)


@pytest.mark.parametrize("given_first", [False, True])
async def test_room_of_one_that_stops_waiting_goes_to_the_next(given_first: bool) -> None:
    room = Room(10)
    await room.take(10)
    waits, next_one = _asking(room, 8, 9)
    await eventually(lambda: len(room._waiting) == 2)
    if given_first:
        room.give_back(10)
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    if not given_first:
        room.give_back(10)
    await asyncio.wait_for(next_one, 5)
    room.give_back(9)
    await asyncio.wait_for(room.take(10), 5)
