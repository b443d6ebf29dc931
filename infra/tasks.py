"""How background tasks are ended: asked again and again, for a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, Final

_ASK_AGAIN_S: Final = 0.05


async def end(tasks: Collection[asyncio.Future[Any]], *, within_s: float) -> None:
    """Cancel tasks until they have ended, or for this long.

    A client that is just connecting may swallow a cancellation, so one is not enough, and a task that missed its only
    one would keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + within_s
    pending = set(tasks)
    while pending and loop.time() < ends_s:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_ASK_AGAIN_S)
