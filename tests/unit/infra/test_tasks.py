from __future__ import annotations

import asyncio

from infra.tasks import end


async def test_a_task_that_swallows_a_cancellation_is_asked_again() -> None:
    swallowed = 0

    async def deaf() -> None:
        nonlocal swallowed
        while swallowed < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
        await asyncio.Event().wait()

    task = asyncio.ensure_future(deaf())
    await asyncio.sleep(0)
    await end([task], within_s=30)
    assert task.cancelled()
    assert swallowed == 3
