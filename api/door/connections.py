"""Connections to this process: how many there may be, how long one may keep a place without a whole question, and how
many bytes they may make this process hold, of questions that nobody has read yet and of answers that nobody reads.

It stands between the socket and aiohttp's protocol and uses only what asyncio promises of both: aiohttp has no timeout
for the head of a request, and bounds what it holds for each connection but not for all. Bodies have their own bounds
where they are read (`api.door.bodies`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain

from api.door.connection import Connection
from api.door.unread import Unread

#: A head must be complete so long after the connection was opened, or after its first byte on one that was idle.
HEAD_WITHIN_S = 10.0
#: Longer than the usual proxies keep an idle connection, so that they close first and no call meets a closing one.
IDLE_S = 75.0
#: How long a connection on which no question can come is left to its caller, unread: who waits for its end cannot come
#: again at once. Longer than the answer to what cannot be read is held back.
SPOILT_S = 5.0
#: What one connection may send before its head is whole, and while its call is answered, beyond what is read of it: the
#: largest head, and what aiohttp takes in before it stops reading. Beyond, it is closed, or read no further.
MOST_OWED_BYTES = 192 * 1024
MOST_AHEAD_BYTES = 128 * 1024
#: What is read of a body that nobody wants, so that who sends it sees why.
MOST_UNWANTED_BYTES = 1024 * 1024
#: What all of them may make this process hold of bytes that nobody has read yet.
MOST_HELD_BYTES = 64 * 1024 * 1024
_SWEEP_S = 1.0


class Connections:
    """At most `most` at once, and half as many of one peer. `serve` makes the protocol that answers on one.

    A new one takes the place of the one that has waited longest without a whole question, of the same peer if that has
    its share; where all are being answered it is closed at once. `barred` says which peers are not served now; `wasted`
    is told the peer of each that ended before it asked for anything. One whose head is too large, or is none, is not
    closed at once but read no further.
    """

    def __init__(
        self,
        serve: Callable[[], asyncio.Protocol],
        *,
        most: int,
        barred: Callable[[str], bool] = lambda _peer: False,
        wasted: Callable[[str], None] = lambda _peer: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._serve, self._most, self._most_per_peer = serve, most, max(1, most // 2)
        self._barred, self._wasted, self._clock = barred, wasted, clock
        # In the order of since_s: those that owe a head, those that have asked before and are idle.
        self._owing: dict[Connection, None] = {}
        self._idle: dict[Connection, None] = {}
        # Of these nothing more is read.
        self._spoilt: dict[Connection, None] = {}
        self._of: dict[asyncio.BaseTransport, Connection] = {}
        self._peers: Counter[str] = Counter()
        self._unread = Unread(clock)
        self._held_bytes = 0
        self.counts: Counter[str] = Counter(
            connections_refused=0, connections_closed_for_others=0, heads_late=0, heads_large=0, answers_unread=0
        )

    def __call__(self) -> Connection:
        """A protocol for asyncio's server."""
        return Connection(self)

    def __len__(self) -> int:
        return len(self._of)

    def let_in(self, new: Connection) -> asyncio.Protocol | None:
        """Count it and return the protocol that answers. None when it is closed, or kept unread, instead."""
        if new.transport is None or not self._make_room(new.peer):
            self.counts["connections_refused"] += 1
            if new.transport is not None:
                new.transport.abort()
            return None
        self._of[new.transport] = new
        self._peers[new.peer] += 1
        if self._barred(new.peer):
            # Closed at once it would come again at once, which costs more than its place.
            self.counts["connections_refused"] += 1
            new.has_asked = True
            self._spoil(new)
            return None
        self._move(new, self._owing)
        return self._serve()

    @property
    def held_bytes(self) -> int:
        """Bytes that came and belong to no call yet, or to one that has not read them."""
        return self._held_bytes

    def heard(self, connection: Connection, size_bytes: int) -> bool:
        """Bytes came: on an idle one they begin a head. False when they are not to be handed on."""
        if connection in self._spoilt:
            return False
        if connection in self._idle:
            self._move(connection, self._owing)
            self._let_go(connection)
        connection.held_bytes += size_bytes
        self._held_bytes += size_bytes
        is_large = connection in self._owing and not connection.is_leaving and connection.held_bytes > MOST_OWED_BYTES
        # Who holds less than an equal share is not who fills it.
        if is_large or (self._held_bytes > MOST_HELD_BYTES and connection.held_bytes > MOST_HELD_BYTES / len(self)):
            self.counts["heads_large" if is_large else "connections_closed_for_others"] += 1
            if is_large:
                self._spoil(connection)  # and what its protocol holds counts until its end
            else:
                self._close(connection)
            return False
        if connection.is_leaving and connection.held_bytes > MOST_UNWANTED_BYTES:
            connection.pause()
            return False
        return True

    def fed(self, connection: Connection) -> None:
        """The bytes were handed on, and so many wait to be read that no more are taken."""
        if connection not in self._owing and connection.held_bytes > MOST_AHEAD_BYTES:
            connection.pause()

    def took(self, transport: asyncio.BaseTransport | None) -> None:
        """Its call has read all of the body that came until now."""
        connection = self._at(transport)
        if connection is not None:
            connection.taken_bytes += connection.held_bytes
            self._let_go(connection)

    def asked(self, transport: asyncio.BaseTransport | None, head_bytes: int | None = None) -> None:
        """A whole head of so many bytes (all that came, if not said) has come on it, and is being answered."""
        connection = self._at(transport)
        if connection is not None:
            connection.has_asked = True
            connection.taken_bytes = 0
            self._move(connection, None)
            self._let_go(connection, head_bytes)

    def answered(self, transport: asyncio.BaseTransport | None, body_bytes: int = 0) -> None:
        """The answer is made, and the body of so many bytes was read or is of no use; another question may come."""
        connection = self._at(transport)
        if connection is not None and body_bytes > connection.taken_bytes:
            self._let_go(connection, body_bytes - connection.taken_bytes)
        if connection is not None and connection not in self._owing:
            self._move(connection, self._idle)

    def leaving(self, transport: asyncio.BaseTransport | None) -> None:
        """The answer is made, the rest of the question is of no use, and it will be closed."""
        self.answered(transport)
        connection = self._at(transport)
        if connection is not None:
            connection.is_leaving = True
            self._let_go(connection)
            self._move(connection, self._owing)  # what still comes does not prolong its time

    def spoilt(self, transport: asyncio.BaseTransport | None) -> None:
        """What came on it is no question, so that none can follow; it may be told so before it is closed."""
        connection = self._at(transport)
        if connection is not None:
            self._spoil(connection)

    def stuck(self, connection: Connection) -> None:
        """Its caller reads more slowly than it is answered."""
        self._unread.look(connection)
        self._close_unread(self._unread.excess())

    def read_on(self, connection: Connection) -> None:
        """Its caller has read nearly all of it."""
        self._unread.forget(connection)

    def gone(self, connection: Connection) -> None:
        """It was closed."""
        self._owing.pop(connection, None)
        self._idle.pop(connection, None)
        self._spoilt.pop(connection, None)
        self._unread.forget(connection)
        self._let_go(connection)
        if connection.transport is not None and self._of.pop(connection.transport, None) is not None:
            self._peers[connection.peer] -= 1
            if self._peers[connection.peer] <= 0:
                del self._peers[connection.peer]
            if not connection.has_asked:
                self._wasted(connection.peer)

    def close_late(self) -> None:
        """Close those that have waited too long."""
        now_s = self._clock()
        for waiting, within_s, count in (
            (self._owing, HEAD_WITHIN_S, "heads_late"),
            (self._idle, IDLE_S, None),
            (self._spoilt, SPOILT_S, None),
        ):
            for connection in list(waiting):
                if now_s - connection.since_s < within_s:
                    break
                if count is not None:
                    self.counts[count] += 1
                self._close(connection)
        for connection in self._idle:
            # No call has begun with what is left, so it is none: spaces, or frames of chunks, that nobody counted.
            if now_s - connection.since_s >= _SWEEP_S and connection not in self._unread:
                self._let_go(connection)
        self._close_unread(self._unread.late())
        self._close_unread(self._unread.excess())  # they may have been given more to read meanwhile

    async def sweep(self) -> None:
        """Close late ones, once a second, for ever."""
        while True:
            self.close_late()
            await asyncio.sleep(_SWEEP_S)

    def _at(self, transport: asyncio.BaseTransport | None) -> Connection | None:
        return self._of.get(transport) if transport is not None else None

    def _move(self, connection: Connection, waiting: dict[Connection, None] | None) -> None:
        """It has one state, None while it is being answered. Who is spoilt stays so."""
        if connection not in self._spoilt:
            self._owing.pop(connection, None)
            self._idle.pop(connection, None)
            if waiting is not None:
                connection.since_s = self._clock()
                waiting[connection] = None

    def _spoil(self, connection: Connection) -> None:
        self._move(connection, self._spoilt)
        connection.pause()

    def _let_go(self, connection: Connection, size_bytes: int | None = None) -> None:
        held = connection.held_bytes
        size_bytes = held if size_bytes is None else min(size_bytes, held)
        self._held_bytes -= size_bytes
        connection.held_bytes -= size_bytes
        if connection.held_bytes <= MOST_AHEAD_BYTES // 2 and connection not in self._spoilt:
            connection.resume()

    def _make_room(self, peer: str) -> bool:
        waiting = chain(self._spoilt, self._owing, self._idle)
        if self._peers[peer] >= self._most_per_peer:
            oldest = next((c for c in waiting if c.peer == peer), None)
        elif len(self._of) >= self._most:
            oldest = next(waiting, None)
        else:
            return True
        if oldest is None:
            return False
        self.counts["connections_closed_for_others"] += 1
        self._close(oldest)
        return True

    def _close_unread(self, those: Iterable[Connection]) -> None:
        for connection in those:
            self.counts["answers_unread"] += 1
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        self.gone(connection)  # its place is free now, although asyncio tells of its end later
        if connection.transport is not None:
            connection.transport.abort()
