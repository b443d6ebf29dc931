"""Whether it is worth asking a server that did not answer: after failures nobody is made to wait for a while.

One call per pause is let through to find out; the outage is logged when it begins and when it ends, not in between.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)


class Breaker:
    """The state of one server as its callers found it. `clock` gives seconds from any start.

    It is away after `opens_after` failures in a row, and back after `closes_after` answers in a row.
    """

    def __init__(
        self,
        server: str,
        *,
        pause_s: float,
        opens_after: int = 1,
        closes_after: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._pause_s = pause_s
        self._opens_after = opens_after
        self._closes_after = closes_after
        self._in_a_row = 0
        self._clock = clock
        self._why: str | None = None
        self._failed_s = 0.0
        self._try_at_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the server is away."""
        return self._why is not None

    def refuses(self) -> str | None:
        """Why not to call now; None for the call that may go, and then all others are refused for another pause."""
        if self._why is None:
            return None
        now_s = self._clock()
        if now_s < self._try_at_s:
            return self._why
        self._try_at_s = now_s + self._pause_s
        return None

    def failed(self, why: str) -> None:
        """The server did not do what was asked."""
        if self._why is None:
            self._in_a_row += 1
            if self._in_a_row < self._opens_after:
                return
            log.warning("%s is away", self._server, extra={"fields": {"why": why}})
        self._in_a_row = 0
        self._why, self._failed_s = why, self._clock()
        self._try_at_s = self._failed_s + self._pause_s

    def succeeded(self) -> None:
        """The server answered."""
        if self._why is None:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row < self._closes_after:
            return
        log.info("%s answers again", self._server)
        self._in_a_row = 0
        self._why = None

    def trouble(self) -> str | None:
        """What is wrong, as of the last call; None when nothing is."""
        if self._why is None:
            return None
        return f"{self._server} did not answer {self._clock() - self._failed_s:.0f} s ago: {self._why}"
