"""Whether this process can serve now: every part that can be in trouble is asked for the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Trouble = Callable[[], str | None]


class Health:
    """`troubles` maps a part's name to a function that says what is wrong with it, None when nothing is."""

    def __init__(self, troubles: Mapping[str, Trouble]) -> None:
        self._troubles = dict(troubles)

    def reasons(self) -> dict[str, str]:
        """What is wrong now, by part; empty when this process can serve."""
        found = {name: trouble() for name, trouble in self._troubles.items()}
        return {name: why for name, why in found.items() if why is not None}
