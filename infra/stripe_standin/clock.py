"""The stand-in's own time, which a test may move or stop.

Stripe's rules are about days (24 hours, 35 days), and no test can wait for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSetting:
    """How the stand-in's time follows from the wall's: shifted by an offset, or standing still."""

    offset_s: float = 0.0
    frozen_at_s: float | None = None


class Clock:
    """Unix seconds that follow the wall clock unless told otherwise."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self.setting = ClockSetting()

    def now_s(self) -> float:
        """The stand-in's present, in Unix seconds."""
        if self.setting.frozen_at_s is not None:
            return self.setting.frozen_at_s
        return self._wall() + self.setting.offset_s

    def moved_to(self, now_s: float, *, frozen: bool) -> ClockSetting:
        """The setting under which it is `now_s` at this moment; the caller records it before using it."""
        if frozen:
            return ClockSetting(frozen_at_s=now_s)
        return ClockSetting(offset_s=now_s - self._wall())
