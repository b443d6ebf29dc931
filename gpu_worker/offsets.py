"""How far a partition is done: which offset may be committed when records end in any order. Pure.

The position to commit is the lowest offset that is not done yet, so that a worker that dies leaves nothing behind it;
it only ever moves forward.
"""

from __future__ import annotations

from collections import OrderedDict


class Watermark:
    """One partition, from when it is assigned until it is revoked."""

    __slots__ = ("_committed", "_end", "_open", "undone")

    def __init__(self) -> None:
        self._open: OrderedDict[int, bool] = OrderedDict()  # offset -> done, in the order of the log
        self._end: int | None = None  # one past the last offset that was read
        self._committed: int | None = None
        self.undone = 0  # records that were read and have not ended

    def __len__(self) -> int:
        """Records read and not below the position yet, those included that are done and wait for one before them."""
        return len(self._open)

    def read(self, offset: int) -> None:
        """A record arrived. Raises ValueError when it is not past the ones before it."""
        if self._end is not None and offset < self._end:
            raise ValueError(f"offset {offset} arrived after {self._end - 1}")
        self._open[offset] = False
        self.undone += 1
        self._end = offset + 1

    def done(self, offset: int) -> None:
        """A record ended. Raises KeyError for one that was not read or is done already."""
        if self._open.get(offset, True):
            raise KeyError(offset)
        self._open[offset] = True
        self.undone -= 1
        while self._open and self._open[next(iter(self._open))]:
            self._open.popitem(last=False)

    def position(self) -> int | None:
        """The next offset a successor has to read; None when nothing was read."""
        return next(iter(self._open)) if self._open else self._end

    def to_commit(self) -> int | None:
        """The position, when it is past the last one that was committed."""
        position = self.position()
        if position is None or (self._committed is not None and position <= self._committed):
            return None
        return position

    def committed(self, position: int) -> None:
        """A position was stored."""
        self._committed = position if self._committed is None else max(position, self._committed)
