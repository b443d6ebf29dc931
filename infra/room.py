"""Memory as a number: whoever needs some waits until there is enough, in the order of asking.

It bounds what is held at once; how long somebody waits is bounded by whoever waits.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Room:
    """`size_bytes` to be shared. What is taken must be given back."""

    def __init__(self, size_bytes: int) -> None:
        self._left_bytes = size_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size_bytes: int) -> None:
        """Wait for this much; more than there is in all waits for ever."""
        if not self._waiting and size_bytes <= self._left_bytes:
            self._left_bytes -= size_bytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given room in this very moment
                self._left_bytes += size_bytes
            self._hand_out()
            raise

    def give_back(self, size_bytes: int) -> None:
        """Let others have it."""
        self._left_bytes += size_bytes
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting:
            size_bytes, turn = self._waiting[0]
            if not turn.done():
                if size_bytes > self._left_bytes:
                    return
                self._left_bytes -= size_bytes
                turn.set_result(None)
            self._waiting.popleft()
