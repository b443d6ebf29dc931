"""Readers of the log that several tasks share: opened when one is needed, and closed once none was for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

R = TypeVar("R")

_IDLE_S = 30.0
_SWEEP_S = 5.0
_CLOSE_WITHIN_S = 1.0


@dataclass(slots=True, eq=False)
class _Open(Generic[R]):
    reader: R
    closing: AsyncExitStack
    used_s: float = 0.0


class Lookups(Generic[R]):
    """At most `most` readers. One that a task failed with, or was cancelled with, is thrown away."""

    def __init__(
        self, open_reader: Callable[[], AbstractAsyncContextManager[R]], *, most: int, idle_s: float = _IDLE_S
    ) -> None:
        self._open_reader = open_reader
        self._turns = asyncio.Semaphore(most)
        self._idle_s = idle_s
        self._idle: list[_Open[R]] = []
        self._closing: set[asyncio.Future[None]] = set()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[R]:
        """A reader for the length of the block; how long somebody waits for one is bounded by whoever waits.

        Raises what opening raises.
        """
        async with self._turns:
            one = self._idle.pop() if self._idle else await self._open()
            try:
                yield one.reader
            except BaseException:
                self._close(one)
                raise
            one.used_s = time.monotonic()
            self._idle.append(one)

    async def run(self) -> None:
        """Close what was not used for a while, for ever; at the end everything."""
        try:
            while True:
                await asyncio.sleep(_SWEEP_S)
                since_s = time.monotonic() - self._idle_s
                for one in [one for one in self._idle if one.used_s < since_s]:
                    self._idle.remove(one)
                    self._close(one)
        finally:
            while self._idle:
                self._close(self._idle.pop())
            if self._closing:
                await asyncio.wait(self._closing, timeout=_CLOSE_WITHIN_S)

    async def _open(self) -> _Open[R]:
        closing = AsyncExitStack()
        return _Open(await closing.enter_async_context(self._open_reader()), closing)

    def _close(self, one: _Open[R]) -> None:
        task = asyncio.ensure_future(self._closed(one))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _closed(self, one: _Open[R]) -> None:
        try:
            await one.closing.aclose()
        except Exception:
            logger.exception("a reader of the log did not close")
