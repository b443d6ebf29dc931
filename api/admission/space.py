"""What unfinished calls may take of this process: places, for all and for each customer, and bytes of their inputs.

Whoever is refused here broke no rule of their own, so it is never 429: the process protects itself and its other
customers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from api.errors import Unavailable

#: A customer has at most this share of the places, and of the bytes, unless it is told otherwise.
PLACES_SHARE, BYTES_SHARE = 4, 2
#: The largest inputs of one call, of which a customer must be able to hold one: a body of numbers as short as they get.
LEAST_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class _Taken:
    places: int = 0
    size_bytes: int = 0


class Space:
    """Places for `max_in_flight` calls at a time with `max_bytes` of inputs; for one customer `max_per_customer` places
    (a quarter of all, if not said) and half of the bytes."""

    def __init__(
        self, *, max_in_flight: int, max_per_customer: int | None = None, max_bytes: int = 4 * LEAST_BYTES
    ) -> None:
        if max_per_customer is None:
            max_per_customer = max(1, max_in_flight // PLACES_SHARE)
        self._most = _Taken(max_in_flight, max_bytes)
        self._most_each = _Taken(max_per_customer, max_bytes // BYTES_SHARE)
        self._all = _Taken()
        self._customers: dict[str, _Taken] = {}

    @property
    def in_flight(self) -> int:
        """Calls that hold a place now."""
        return self._all.places

    @property
    def size_bytes(self) -> int:
        """Bytes of inputs that they hold."""
        return self._all.size_bytes

    @contextmanager
    def place(self, customer_id: str, size_bytes: int) -> Iterator[None]:
        """A place until the end of the block. Raises Unavailable when there is none, naming what is full."""
        mine = self._customers.get(customer_id) or _Taken()
        self._require(mine, size_bytes)
        # Taken in the same step as the check: any number of calls may wait for the limiter at once.
        self._customers[customer_id] = mine
        for taken in (self._all, mine):
            taken.places += 1
            taken.size_bytes += size_bytes
        try:
            yield
        finally:
            for taken in (self._all, mine):
                taken.places -= 1
                taken.size_bytes -= size_bytes
            if not mine.places:
                del self._customers[customer_id]

    def _require(self, mine: _Taken, size_bytes: int) -> None:
        if mine.places >= self._most_each.places:
            raise _full(
                f"{mine.places} requests of this customer wait here already, as many as it may have at this gateway",
                code="customer_crowded",
            )
        if mine.size_bytes + size_bytes > self._most_each.size_bytes:
            raise _full(
                f"{mine.size_bytes} bytes of this customer's inputs are held here already, and at most "
                f"{self._most_each.size_bytes} are for one customer",
                code="customer_crowded",
            )
        if self._all.places >= self._most.places:
            raise _full(f"this gateway already waits for {self._most.places} requests", code="overloaded")
        if self._all.size_bytes + size_bytes > self._most.size_bytes:
            raise _full(
                f"this gateway already holds {self._all.size_bytes} bytes of inputs, and at most "
                f"{self._most.size_bytes}",
                code="overloaded",
            )


def _full(words: str, *, code: str) -> Unavailable:
    return Unavailable(words, code=code, retry_after_s=1)
