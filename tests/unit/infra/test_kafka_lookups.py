from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from infra import kafka_lookups as module
from infra.kafka import BusUnavailable
from infra.kafka_lookups import Lookups
from tests.conditions import eventually


class Readers:
    """Numbers in the place of readers."""

    def __init__(self) -> None:
        self.opened = 0
        self.open: set[int] = set()
        self.away = False

    @asynccontextmanager
    async def one(self) -> AsyncIterator[int]:
        if self.away:
            raise BusUnavailable("switched off")
        self.opened += 1
        number = self.opened
        self.open.add(number)
        try:
            yield number
        finally:
            self.open.remove(number)


async def test_a_reader_is_used_again_and_there_are_never_more_than_may_be() -> None:
    readers, most = Readers(), 0
    lookups = Lookups(readers.one, most=2)

    async def use() -> None:
        nonlocal most
        async with lookups.one():
            most = max(most, len(readers.open))
            await asyncio.sleep(0)

    await asyncio.gather(*(use() for _ in range(20)))
    assert (readers.opened, most) == (2, 2)


@pytest.mark.parametrize("fault", [BusUnavailable("broken"), asyncio.CancelledError()], ids=["failed", "cancelled"])
async def test_one_that_a_task_ended_badly_with_is_not_used_again(fault: BaseException) -> None:
    readers = Readers()
    lookups = Lookups(readers.one, most=1)
    with pytest.raises(type(fault)):
        async with lookups.one():
            raise fault
    async with lookups.one() as number:
        assert number == 2
    await eventually(lambda: readers.open == {2})


async def test_while_none_can_be_opened_nobody_is_kept_from_trying() -> None:
    readers = Readers()
    lookups = Lookups(readers.one, most=1)
    readers.away = True
    for _ in range(3):
        with pytest.raises(BusUnavailable):
            async with lookups.one():
                pass
    readers.away = False
    async with lookups.one() as number:
        assert number == 1


async def test_what_is_not_used_is_closed_and_at_the_end_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SWEEP_S", 0.01)
    readers = Readers()
    lookups = Lookups(readers.one, most=2, idle_s=0.02)
    task = asyncio.ensure_future(lookups.run())
    async with lookups.one():
        async with lookups.one():
            pass
        await eventually(lambda: readers.open == {1})
    await eventually(lambda: not readers.open)
    async with lookups.one():
        pass
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert not readers.open
