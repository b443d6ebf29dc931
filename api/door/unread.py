"""Answers that their callers do not read: how long one may wait, and how many bytes of them this process holds.

Who reads, however slowly, keeps its connection; over the bound the one with the most to read loses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from api.door.connection import Connection

#: So long a caller may read nothing of what it was answered.
UNREAD_S = 30.0
#: What all of them may make this process hold.
MOST_UNREAD_BYTES = 64 * 1024 * 1024


class Unread:
    """Connections that are answered faster than they are read; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # How much each has left to read.
        self._left: dict[Connection, int] = {}

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._left

    @property
    def size_bytes(self) -> int:
        """What was answered and not read, as of when it was last looked at."""
        return sum(self._left.values())

    def look(self, connection: Connection) -> None:
        """Note what it has left to read; its time begins anew when that became less."""
        left = connection.unsent_bytes()
        if connection not in self._left or left < self._left[connection]:
            connection.unread_since_s = self._clock()
        self._left[connection] = left

    def forget(self, connection: Connection) -> None:
        """It has read nearly all of it, or is closed."""
        self._left.pop(connection, None)

    def excess(self) -> Iterator[Connection]:
        """Those to close, one after the other, so that the rest is within the bound: the one with the most first, which
        is above an equal share."""
        while self.size_bytes > MOST_UNREAD_BYTES:
            yield max(self._left, key=self._left.__getitem__)

    def late(self) -> list[Connection]:
        """Those that have read nothing for too long; the others are looked at anew."""
        for connection in self._left:
            self.look(connection)
        return [c for c in self._left if self._clock() - c.unread_since_s >= UNREAD_S]
