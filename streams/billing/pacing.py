"""How fast and how stubbornly Stripe is called: a steady pace for all calls, growing pauses after failures.

Time and sleep are arguments, so that a test runs a storm of an hour in no time.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Sleep = Callable[[float], Awaitable[None]]


class Pace:
    """At most `calls_per_s`, evenly spaced, over everyone who asks for a turn."""

    def __init__(self, *, calls_per_s: float, monotonic: Callable[[], float], sleep: Sleep) -> None:
        self._gap_s = 1 / calls_per_s
        self._monotonic = monotonic
        self._sleep = sleep
        self._next_s = float("-inf")

    async def turn(self) -> None:
        """Return when it is this caller's turn."""
        now_s = self._monotonic()
        mine_s = max(now_s, self._next_s)
        self._next_s = mine_s + self._gap_s
        if mine_s > now_s:
            await self._sleep(mine_s - now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pauses that double from `first_s` to `longest_s`, each shortened at random by up to half."""

    first_s: float = 0.5
    longest_s: float = 300.0

    def pause_s(self, failures: int, *, at_least_s: float = 0.0, chance: Callable[[], float] = random.random) -> float:
        """The pause after the `failures`-th failure in a row (from 1); never below what the server asked for."""
        ceiling_s = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return max(at_least_s, ceiling_s * (1 - chance() / 2))
