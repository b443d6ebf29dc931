"""Whether this process can serve now: every part that can be in trouble is asked for the reason.

Some troubles only few requests notice. They are told beside, and the process counts as ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger(__name__)

_TELL_EVERY_S = 60.0

Trouble = Callable[[], str | None]


class Health:
    """`troubles` maps a part's name to a function that says what is wrong with it, None when nothing is.

    `minor` does the same for parts without which it serves on; `counts` holds what such troubles came to, by name.
    """

    def __init__(
        self,
        troubles: Mapping[str, Trouble],
        *,
        minor: Mapping[str, Trouble] | None = None,
        counts: Sequence[Mapping[str, int]] = (),
    ) -> None:
        self._troubles = dict(troubles)
        self._minor = dict(minor or {})
        self._counts = tuple(counts)

    def reasons(self) -> dict[str, str]:
        """What is wrong now, by part; empty when this process can serve."""
        return _found(self._troubles)

    def degraded(self) -> dict[str, str]:
        """What is wrong now, by part, that does not keep this process from serving."""
        return _found(self._minor)

    def counts(self) -> dict[str, int]:
        """Since the start."""
        return merged(self._counts)


def merged(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """What they hold together: numbers of one name add up."""
    total: Counter[str] = Counter()
    for one in counts:
        for name, number in one.items():
            total[name] += number
    return dict(total)


async def tell_counts(counts: Sequence[Mapping[str, int]], *, every_s: float = _TELL_EVERY_S) -> None:
    """Log what was counted since the last time, for ever; nothing while nothing is."""
    told = merged(counts)
    while True:
        await asyncio.sleep(every_s)
        now = merged(counts)
        more = {name: number - told.get(name, 0) for name, number in now.items() if number != told.get(name, 0)}
        if more:
            logger.warning("calls or connections were refused, held back or closed", extra={"fields": more})
        told = now


def _found(troubles: Mapping[str, Trouble]) -> dict[str, str]:
    found = {name: trouble() for name, trouble in troubles.items()}
    return {name: why for name, why in found.items() if why is not None}
