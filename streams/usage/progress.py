"""Moments that a reader of the log has passed: where the ends lay at a moment, and whether all of that has been read.

Pure. Offsets alone tell it, so no record has to be read to know how old it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, Generic, TypeVar

P = TypeVar("P", bound=Hashable)

#: Moments that are remembered while a reader is behind; beyond, every other one is forgotten.
MOST_MOMENTS: Final = 512
#: From the time in a request's record until the record is on the log, clocks of two machines that differ included.
ADMISSION: Final = timedelta(seconds=10)
#: The longest life of a request: the largest deadline that a gateway may be given (600 s), and time to log its usage.
LONGEST_LIFE: Final = timedelta(seconds=720)


@dataclass(slots=True, kw_only=True)
class Progress(Generic[P]):
    """The latest moment all of whose records have been read; `reached` is None until there is one. P is a partition."""

    reached: datetime | None = None
    _ahead: list[tuple[datetime, dict[P, int]]] = field(default_factory=list)
    _apart: timedelta = timedelta()

    def note(self, moment: datetime, ends: Mapping[P, int]) -> None:
        """All that was on the log by this moment lies below these ends, which were read after it."""
        # The later moment stands for both when nothing came between, or when moments so close are too many to keep.
        if self._ahead and (self._ahead[-1][1] == ends or self._is_close(moment)):
            self._ahead.pop()
        self._ahead.append((moment, dict(ends)))
        if len(self._ahead) > MOST_MOMENTS:
            self._apart = 2 * (self._ahead[-1][0] - self._ahead[0][0]) / MOST_MOMENTS
            self._ahead = self._ahead[::2]

    def _is_close(self, moment: datetime) -> bool:
        return len(self._ahead) > 1 and moment - self._ahead[-2][0] < self._apart

    def read_up_to(self, positions: Mapping[P, int]) -> datetime | None:
        """The reader's next offsets, 0 where there is none; returns `reached` as it is then."""
        done = 0
        for number, (moment, ends) in enumerate(self._ahead, start=1):
            if any(positions.get(place, 0) < end for place, end in ends.items()):
                break
            done = number
            self.reached = moment if self.reached is None else max(self.reached, moment)
        del self._ahead[:done]
        if not self._ahead:
            self._apart = timedelta()
        return self.reached


def settled_until(worked_off: datetime | None, *, now: datetime) -> datetime:
    """Until when whatever was admitted has its usage on the log, if it has any.

    `worked_off`: the latest moment all of whose requests the workers have committed, which they do once the usage is
    acknowledged. Where no worker is at work, a request that old is expired at best, and no usage comes of it.
    """
    latest = now - LONGEST_LIFE if worked_off is None else max(worked_off, now - LONGEST_LIFE)
    return latest - ADMISSION
