"""How much memory the records hold that were fetched and are not in the ledger yet.

Faust bounds what it buffers by number, and a record may have megabytes, which took a broker some hundred bytes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from typing import Final, Protocol

#: Nothing more is fetched while so much is in hand; one fetch may go past it, as far as `infra.kafka_fetched` lets it.
MAX_BYTES: Final = 64 * 1024 * 1024
#: Counted for a record besides its bytes.
_RECORD_BYTES: Final = 256


class Fetched(Protocol):
    """A record as fetched."""

    @property
    def offset(self) -> int:
        """Offset it has."""

    @property
    def key(self) -> bytes | None:
        """Its key."""

    @property
    def value(self) -> bytes | None:
        """Its value."""


class InHand:
    """Sizes of what was fetched, by partition, until the ledger covers it."""

    def __init__(self, *, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._sizes: defaultdict[Hashable, deque[tuple[int, int]]] = defaultdict(deque)  # (next offset, bytes)
        self.size_bytes = 0

    @property
    def full(self) -> bool:
        """Whether nothing more may be fetched now."""
        return self.size_bytes > self._max_bytes

    def take(self, place: Hashable, records: Iterable[Fetched]) -> None:
        """These were fetched from a partition, in order."""
        size_bytes, end = 0, 0
        for record in records:
            size_bytes += _RECORD_BYTES + len(record.key or b"") + len(record.value or b"")
            end = record.offset + 1
        self._sizes[place].append((end, size_bytes))
        self.size_bytes += size_bytes

    def cover(self, place: Hashable, end: int) -> None:
        """The ledger holds everything below this offset. What was fetched at once is let go at once, when all is."""
        sizes = self._sizes[place]
        while sizes and sizes[0][0] <= end:
            self.size_bytes -= sizes.popleft()[1]

    def forget(self, places: Iterable[Hashable]) -> None:
        """These partitions belong to others now, and what was fetched of them is dropped."""
        for place in places:
            self.size_bytes -= sum(size for _, size in self._sizes.pop(place, ()))
