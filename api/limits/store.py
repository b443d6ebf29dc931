"""The shared limits: scripts run on Redis, each round trip within its time.

A run that was not answered in time is never repeated, because it may have taken what it asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from infra.redis import LuaCall, Redis, RedisError, run_each

TIMEOUT_S = 0.05
#: Perhaps this process was held up and not Redis: an answer that has arrived meanwhile is still read.
_LATE_S = 0.01


class LimiterAway(RuntimeError):
    """Redis did not decide in time. What was asked for may or may not have been taken."""


class Script(Protocol):
    """Runs the limiter's scripts."""

    async def run(self, calls: Sequence[LuaCall]) -> Sequence[Any]:
        """One answer, or one exception as a value, per call. Raises LimiterAway."""


class RedisScript:
    """Runs scripts on a Redis server; a round trip is over after `within_s`, connecting included."""

    def __init__(self, client: Redis, *, within_s: float = TIMEOUT_S) -> None:
        self._client = client
        self._within_s = within_s

    async def run(self, calls: Sequence[LuaCall]) -> Sequence[Any]:
        """See Script."""
        trip = asyncio.ensure_future(run_each(self._client, calls))
        try:
            done, _ = await asyncio.wait((trip,), timeout=self._within_s)
            if not done:
                done, _ = await asyncio.wait((trip,), timeout=_LATE_S)
            if not done:
                raise LimiterAway(f"no answer in {self._within_s:g} s")
            return trip.result()
        except (RedisError, OSError) as error:
            raise LimiterAway(f"{type(error).__name__}: {error}") from error
        finally:
            if not trip.done():
                trip.add_done_callback(lambda t: t.cancelled() or t.exception())  # nobody asks any more
                trip.cancel()
