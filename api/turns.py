"""Work of callers who have no key: done beside the event loop, one piece at a time, with rests in between.

However many of them ask, they get a fifth of one core together, and the calls that are paid for get the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from api.errors import Unavailable

T = TypeVar("T")

MAX_WAITING = 16
_REST_PER_WORK = 4.0


class Turns:
    """One thread that takes turns; `clock` and `sleep` are in seconds."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="turns")
        self._waiting = 0
        self._rested_s = float("-inf")

    async def take(self, work: Callable[[], T]) -> T:
        """Wait for a turn and do the work. Raises what it raises, and Unavailable when too many wait."""
        if self._waiting >= MAX_WAITING:
            raise Unavailable("too many callers wait for the same; come back in a moment")
        # Counted until the work is done: a caller who hangs up does not free the thread.
        self._waiting += 1
        turn = asyncio.get_running_loop().run_in_executor(self._thread, self._turn, work)
        turn.add_done_callback(self._done)
        return await asyncio.shield(turn)

    def close(self) -> None:
        """Take no more work; what was not begun is not done."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _turn(self, work: Callable[[], T]) -> T:
        self._sleep(max(0.0, self._rested_s - self._clock()))
        began_s = self._clock()
        try:
            return work()
        finally:
            ended_s = self._clock()
            self._rested_s = ended_s + _REST_PER_WORK * (ended_s - began_s)

    def _done(self, turn: asyncio.Future[T]) -> None:
        self._waiting -= 1
        if not turn.cancelled():
            turn.exception()  # a caller who hung up does not fetch it
