"""Whether this process can serve now: every part that can be in trouble is asked for the reason.

Some troubles only few requests notice. They are told beside, and the process counts as ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
        counts: Mapping[str, int] | None = None,
    ) -> None:
        self._troubles = dict(troubles)
        self._minor = dict(minor or {})
        self._counts = {} if counts is None else counts

    def reasons(self) -> dict[str, str]:
        """What is wrong now, by part; empty when this process can serve."""
        return _found(self._troubles)

    def degraded(self) -> dict[str, str]:
        """What is wrong now, by part, that does not keep this process from serving."""
        return _found(self._minor)

    def counts(self) -> dict[str, int]:
        """Since the start."""
        return dict(self._counts)


def _found(troubles: Mapping[str, Trouble]) -> dict[str, str]:
    found = {name: trouble() for name, trouble in troubles.items()}
    return {name: why for name, why in found.items() if why is not None}
