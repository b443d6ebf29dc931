"""One connection: between the socket and aiohttp's protocol, it tells `Connections` what comes and goes.

What the socket has is read in small portions: a call may be refused, or its body wait for room, before more is taken.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from api.door.pace import peer_of

if TYPE_CHECKING:
    from api.door.connections import Connections

#: The most that is taken from a socket at once, and so without a chance for aiohttp to stop reading.
CHUNK_BYTES = 64 * 1024
# One for all: what was read is copied before anything else is.
_chunk = memoryview(bytearray(CHUNK_BYTES))


class Connection(asyncio.BufferedProtocol):
    """One of them. Everything is handed on to the protocol of `Connections`, which is made once it is let in."""

    __slots__ = (
        "_door",
        "_inner",
        "_is_paused",
        "has_asked",
        "held_bytes",
        "is_leaving",
        "peer",
        "since_s",
        "transport",
        "unread_since_s",
    )

    def __init__(self, door: Connections) -> None:
        self._door = door
        self._inner: asyncio.Protocol | None = None
        self.transport: asyncio.Transport | None = None
        self.peer = ""
        #: Since when it has had its present state, in seconds of the clock.
        self.since_s = 0.0
        self.has_asked = False
        #: Whether the rest of what comes is of no use.
        self.is_leaving = False
        #: Bytes that came and were not read by a call; kept by `Connections`.
        self.held_bytes = 0
        #: Since when its caller does not read, if it does not.
        self.unread_since_s = 0.0
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let in or not: `Connections` decides."""
        self.transport = cast(asyncio.Transport, transport)
        self.peer = peer_of(transport.get_extra_info("peername"))
        inner = self._door.let_in(self)
        if inner is not None:
            self._inner = inner
            inner.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to put what comes."""
        del sizehint
        return _chunk

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes came."""
        self.data_received(bytes(_chunk[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._inner is not None and self._door.heard(self, len(data)):
            self._inner.data_received(data)
            self._door.fed(self)

    def pause(self) -> None:
        """Take in no more until `resume`. While it lasts nobody notices that the caller is gone."""
        if self.transport is not None and not self.transport.is_closing():
            self._is_paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Take in more again."""
        if self._is_paused and self.transport is not None:
            self._is_paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def unsent_bytes(self) -> int:
        """What was answered and did not leave this process yet."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def eof_received(self) -> bool | None:
        """The caller sends no more."""
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        """The caller reads too slowly."""
        if self._inner is not None:
            self._door.stuck(self)
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """The caller reads again."""
        if self._inner is not None:
            self._door.read_on(self)
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        self._door.gone(self)
        if self._inner is not None:
            self._inner.connection_lost(exc)
