"""The ids whose results this process awaits, and the rule by which records of the log become their results.

An id is needed once Redis has shown that it may not get its result there. Only records of awaited ids are decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from api.results.log import Schemas
from schemas.first_results import FirstResults, Recorded


@dataclass(slots=True, eq=False, kw_only=True)
class Sought:
    """One awaited id. `watched` is the following of its partition that began before any record of it.

    Nothing of it is stamped before `since_ms` (Unix), but for the difference of clocks.
    """

    key: bytes
    since_ms: int
    watched: int | None = None
    is_needed: bool = False


#: Told the id, its result, and whether it had been needed.
Deliver = Callable[[bytes, Recorded, bool], None]


class Awaited:
    """Give it the records of an id in the order of the log; it tells `deliver` the first that counts, once."""

    def __init__(self, deliver: Deliver, schemas: Schemas | None = None) -> None:
        self._deliver = deliver
        self._schemas = schemas
        self._all: dict[bytes, Sought] = {}
        self._first = FirstResults()
        self._question: int | None = None
        self.needed: dict[bytes, Sought] = {}

    def __getitem__(self, key: bytes | None) -> Sought | None:
        """The awaited id of a record's key; None for other keys."""
        return None if key is None else self._all.get(key)

    def expect(self, key: bytes, *, since_ms: int, watched: int | None) -> None:
        """An id is awaited. Again is once."""
        if key not in self._all:
            self._all[key] = Sought(key=key, since_ms=since_ms, watched=watched)

    def forget(self, key: bytes) -> None:
        """It is not awaited any more."""
        self._all.pop(key, None)
        self.needed.pop(key, None)
        self._first.forget(key)

    def need(self, key: bytes) -> Sought | None:
        """An awaited id is needed; None when that is known, or it is not awaited."""
        sought = self._all.get(key)
        if sought is None or sought.is_needed:
            return None
        sought.is_needed = True
        self.needed[key] = sought
        return sought

    def offer(self, sought: Sought, value: bytes | None) -> None:
        """The next record of an id."""
        self._first.look_for(sought.key, sought.since_ms, partition=0)
        self._first.offer(sought.key, value)
        self._hand_over(sought.key)

    def learn(self) -> None:
        """To be called again and again: results of newer workers wait until the schemas of now are known."""
        if not self._first.unlearnt:
            self._question = None
        elif self._schemas is not None and self._question is None:
            self._question = self._schemas.ask()
        elif self._schemas is None or self._question is None or self._schemas.answered(self._question):
            self._question = None
            self._first.look_again()
            for key in list(self._first.found):
                self._hand_over(key)

    def _hand_over(self, key: bytes) -> None:
        if (found := self._first.found.get(key)) is not None:
            is_needed = self._all[key].is_needed
            self.forget(key)
            self._deliver(key, found, is_needed)
