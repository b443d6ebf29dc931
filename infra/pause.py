"""How long to wait before something is tried again: a pause that doubles each time, up to a bound.

A server that is away is asked often at first, because most outages are short, and seldom later.
"""

from __future__ import annotations

import asyncio


class Pause:
    """The pauses between the tries of one piece of work; the next work takes a new one."""

    __slots__ = ("_longest_s", "_next_s")

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._next_s = first_s
        self._longest_s = longest_s

    def next_s(self) -> float:
        """The length of the pause that is due now, in seconds, for whoever waits in another way than by `wait`."""
        due_s = self._next_s
        self._next_s = min(2 * due_s, self._longest_s)
        return due_s

    async def wait(self) -> None:
        """Pause."""
        await asyncio.sleep(self.next_s())
