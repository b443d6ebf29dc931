"""Pauses double up to their bound, and each piece of work begins anew."""

from __future__ import annotations

import pytest

from infra.pause import Pause


def test_pauses_double_up_to_the_bound() -> None:
    pause = Pause(0.1, 0.5)
    assert [pause.next_s() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert Pause(0.1, 0.5).next_s() == 0.1


async def test_it_waits_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(delay_s: float) -> None:
        waited.append(delay_s)

    monkeypatch.setattr("asyncio.sleep", sleep)
    pause = Pause(1.0, 3.0)
    for _ in range(3):
        await pause.wait()
    assert waited == [1.0, 2.0, 3.0]
