"""A record is handed to its stream without a task where there is room, and else races an order to pause."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streams.consumer import LedgerConsumer


class Bare(LedgerConsumer):
    """What of the consumer the race needs."""

    def __init__(self) -> None:
        self.suspend_flow = asyncio.Event()
        self._stopped = asyncio.Event()
        self._crashed = asyncio.Event()
        self.loop = asyncio.get_running_loop()


@pytest.fixture
async def consumer() -> Bare:
    return Bare()


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    real = asyncio.ensure_future
    monkeypatch.setattr(asyncio, "ensure_future", lambda x, **k: (made.append(repr(x)), real(x, **k))[1])
    return made


async def test_a_handover_that_waits_for_nothing_takes_no_task(consumer: Bare, tasks: list[str]) -> None:
    async def hand_over() -> str:
        return "there"

    found = await consumer.wait_first(hand_over(), consumer.suspend_flow.wait())
    assert (found.results, found.stopped, tasks) == (["there"], False, [])


async def test_a_handover_that_waits_goes_on_where_it_was(consumer: Bare) -> None:
    room, thrown, steps = asyncio.Event(), asyncio.Event(), []

    async def hand_over() -> str:
        steps.append("first")
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0.001)
        except asyncio.TimeoutError:
            steps.append("thrown")
            thrown.set()
        await room.wait()
        steps.append("second")
        return "there"

    race = asyncio.create_task(consumer.wait_first(hand_over(), consumer.suspend_flow.wait()))
    await thrown.wait()
    room.set()
    found = await race
    assert (found.results, steps) == (["there"], ["first", "thrown", "second"])


async def test_an_order_to_pause_ends_a_handover_that_waits(consumer: Bare) -> None:
    ended: list[str] = []

    async def hand_over() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    race = asyncio.create_task(consumer.wait_first(hand_over(), consumer.suspend_flow.wait()))
    await asyncio.sleep(0)
    consumer.suspend_flow.set()
    found = await race
    await asyncio.sleep(0)
    assert (found.results, ended) == ([True], ["cancelled"])


@pytest.mark.parametrize(("order", "stopped"), [("_stopped", True), ("_crashed", True), ("suspend_flow", False)])
async def test_an_order_that_was_given_before_is_told(consumer: Bare, order: str, stopped: bool) -> None:
    async def hand_over() -> str:
        return "there"

    getattr(consumer, order).set()
    found = await consumer.wait_first(hand_over(), consumer.suspend_flow.wait())
    assert (found.stopped, found.results) == (stopped, [] if stopped else ["there", True])


@pytest.mark.parametrize("waits_first", [False, True])
async def test_what_a_handover_raises_is_raised(consumer: Bare, waits_first: bool) -> None:
    async def hand_over() -> Any:
        if waits_first:
            await asyncio.sleep(0)
        raise LookupError("no such partition")

    with pytest.raises(LookupError):
        await consumer.wait_first(hand_over(), consumer.suspend_flow.wait())
