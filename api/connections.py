"""Connections to this process: how many there may be, and how long one may keep a place without a whole question.

It stands between the socket and aiohttp's protocol and uses only what asyncio promises of both: aiohttp has no timeout
for the head of a request. Bodies have theirs where they are read (`api.surfaces.http`).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import cast

from api.strangers import peer_of

logger = logging.getLogger(__name__)

#: A head must be complete so long after the connection was opened, or after its first byte on one that was idle.
HEAD_WITHIN_S = 10.0
#: Longer than the usual proxies keep an idle connection, so that they close first and no call meets a closing one.
IDLE_S = 75.0
_SWEEP_S = 1.0
#: Files beside connections of callers: servers, libraries, logs.
_OTHER_FILES = 256


class Connection(asyncio.Protocol):
    """One of them. Everything is handed on to the protocol of `Connections`, which is made once it is let in."""

    __slots__ = ("_door", "_inner", "has_asked", "peer", "since_s", "transport")

    def __init__(self, door: Connections) -> None:
        self._door = door
        self._inner: asyncio.Protocol | None = None
        self.transport: asyncio.Transport | None = None
        self.peer = ""
        #: Since when it has had its present state, in seconds of the clock.
        self.since_s = 0.0
        self.has_asked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let in, or closed at once."""
        self.transport = cast(asyncio.Transport, transport)
        self.peer = peer_of(transport.get_extra_info("peername"))
        inner = self._door.let_in(self)
        if inner is None:
            self.transport.abort()
            return
        self._inner = inner
        inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._inner is not None:
            self._door.heard(self)
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """The caller sends no more."""
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        """The caller reads too slowly."""
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """The caller reads again."""
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        if self._inner is not None:
            self._door.gone(self)
            self._inner.connection_lost(exc)


class Connections:
    """At most `most` at once, and half as many of one peer. `serve` makes the protocol that answers on one.

    A new one takes the place of the one that has waited longest without a whole question, of the same peer if that has
    its share; where all are being answered it is closed at once. `barred` says which peers may open none now; `wasted`
    is told the peer of each that ended before it asked for anything.
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
        self._of: dict[asyncio.BaseTransport, Connection] = {}
        self._peers: Counter[str] = Counter()
        self.counts: Counter[str] = Counter(connections_refused=0, connections_closed_for_others=0, heads_late=0)

    def __call__(self) -> Connection:
        """A protocol for asyncio's server."""
        return Connection(self)

    def __len__(self) -> int:
        return len(self._of)

    def let_in(self, new: Connection) -> asyncio.Protocol | None:
        """Count it and return the protocol that answers, or None when there is no place for it."""
        if self._barred(new.peer) or not self._make_room(new.peer):
            self.counts["connections_refused"] += 1
            return None
        if new.transport is not None:
            self._of[new.transport] = new
        self._peers[new.peer] += 1
        self._wait(self._owing, new)
        return self._serve()

    def heard(self, connection: Connection) -> None:
        """Bytes came: on an idle one they begin a head."""
        if connection in self._idle:
            del self._idle[connection]
            self._wait(self._owing, connection)

    def asked(self, transport: asyncio.BaseTransport | None) -> None:
        """A whole head has come on it, and is being answered."""
        connection = self._of.get(transport) if transport is not None else None
        if connection is not None:
            connection.has_asked = True
            self._owing.pop(connection, None)
            self._idle.pop(connection, None)

    def answered(self, transport: asyncio.BaseTransport | None) -> None:
        """The answer is made; it may send another question."""
        connection = self._of.get(transport) if transport is not None else None
        if connection is not None and connection not in self._owing:
            self._idle.pop(connection, None)
            self._wait(self._idle, connection)

    def gone(self, connection: Connection) -> None:
        """It was closed."""
        self._owing.pop(connection, None)
        self._idle.pop(connection, None)
        if connection.transport is not None and self._of.pop(connection.transport, None) is not None:
            self._peers[connection.peer] -= 1
            if self._peers[connection.peer] <= 0:
                del self._peers[connection.peer]
            if not connection.has_asked:
                self._wasted(connection.peer)

    def close_late(self) -> None:
        """Close those that have waited too long."""
        now_s = self._clock()
        for waiting, within_s, count in ((self._owing, HEAD_WITHIN_S, "heads_late"), (self._idle, IDLE_S, None)):
            for connection in list(waiting):
                if now_s - connection.since_s < within_s:
                    break
                if count is not None:
                    self.counts[count] += 1
                self._close(connection)

    async def sweep(self) -> None:
        """Close late ones, once a second, for ever."""
        while True:
            self.close_late()
            await asyncio.sleep(_SWEEP_S)

    def _wait(self, waiting: dict[Connection, None], connection: Connection) -> None:
        connection.since_s = self._clock()
        waiting[connection] = None

    def _make_room(self, peer: str) -> bool:
        waiting = chain(self._owing, self._idle)
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

    def _close(self, connection: Connection) -> None:
        self.gone(connection)  # its place is free now, although asyncio tells of its end later
        if connection.transport is not None:
            connection.transport.abort()


def room_for_files(wanted: int) -> int:
    """How many connections the system's limit of open files leaves, at most `wanted`; the soft limit is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        if raised < needed:
            fields = {"open_files": raised, "needed": needed}
            logger.warning(
                "the limit of open files leaves fewer connections than were asked for", extra={"fields": fields}
            )
        return max(1, raised - _OTHER_FILES)
    return wanted
