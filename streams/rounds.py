"""Work beside the ledger, round after round: no failure ends it, or the ledger, which counts without it.

A failure is said once, with what it waits for; an unforeseen one is said each time, with its traceback.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Final

from infra.kafka import BusUnavailable
from infra.pause import Pause
from infra.postgres import is_outage, is_unusable

log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0


class Rounds(ABC):
    """Some work, called `name` in the log. `state` is in the work's words, or away after a failure; `why` says more."""

    def __init__(
        self,
        name: str,
        *,
        first_round_s: float,
        round_s: float,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._name = name
        self._first_round_s = first_round_s
        self._round_s = round_s
        self._sleep = sleep
        self.state = "starting"
        self.why: str | None = None

    @abstractmethod
    async def round(self) -> None:
        """Do what there is to do. Raises what the servers' homes raise."""

    async def run(self) -> None:
        """A round every `round_s` until cancelled; after one that failed the next comes sooner."""
        await self._sleep(self._first_round_s)
        pause = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                await self.round()
                pause = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
                await self._sleep(self._round_s)
                continue
            except Exception as error:  # noqa: BLE001 (none may end the ledger, which counts without it)
                self._stand_still(error)
            await self._sleep(pause.next_s())

    def _stand_still(self, error: Exception) -> None:
        if not (isinstance(error, BusUnavailable) or is_outage(error) or is_unusable(error)):
            log.error("%s failed and is tried again", self._name, exc_info=error)
        elif self.state != "away":
            log.warning("%s waits: %s: %s", self._name, type(error).__name__, error)
        self._enter("away", f"{type(error).__name__}: {error}")

    def _enter(self, state: str, why: str | None = None) -> None:
        self.state, self.why = state, why
