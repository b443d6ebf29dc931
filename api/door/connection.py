"""One connection: between the socket and aiohttp's protocol, it tells `Connections` what comes and goes.

What the socket has is read in small portions: a call may be refused, or its body wait for room, before more is taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from api.door.pace import peer_at

if TYPE_CHECKING:
    from api.door.connections import Connections

#: The most that is taken from a socket at once, and so without a chance for aiohttp to stop reading.
CHUNK_BYTES = 64 * 1024
# One for all: what was read is copied before anything else is.
_chunk = memoryview(bytearray(CHUNK_BYTES))


class _Inward:
    """The socket's transport as aiohttp's protocol has it: whether it is read is for its connection to decide."""

    def __init__(self, transport: asyncio.Transport, hold: Callable[[bool], None]) -> None:
        self._transport, self._hold = transport, hold
        # Asked for with every answer.
        self.write, self.writelines = transport.write, transport.writelines
        self.is_closing, self.get_extra_info = transport.is_closing, transport.get_extra_info

    def pause_reading(self) -> None:
        self._hold(True)

    def resume_reading(self) -> None:
        self._hold(False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(asyncio.BufferedProtocol):
    """One of them. Everything is handed on to the protocol of `Connections`, which is made once it is let in."""

    __slots__ = (
        "_door",
        "_inner",
        "_is_held",
        "_is_paused",
        "_wire",
        "has_asked",
        "held_bytes",
        "is_leaving",
        "peer",
        "since_s",
        "taken_bytes",
        "transport",
        "unread_since_s",
    )

    def __init__(self, door: Connections) -> None:
        self._door = door
        self._inner: asyncio.Protocol | None = None
        self._wire: asyncio.Transport | None = None
        #: What the protocol answers on.
        self.transport: asyncio.Transport | None = None
        self.peer = ""
        #: Since when it has had its present state, in seconds of the clock.
        self.since_s = 0.0
        self.has_asked = False
        #: Whether the rest of what comes is of no use.
        self.is_leaving = False
        #: Bytes that came and were not read by a call; kept by `Connections`.
        self.held_bytes = 0
        #: Of the body that is being read, what was counted as read.
        self.taken_bytes = 0
        #: Since when its caller does not read, if it does not.
        self.unread_since_s = 0.0
        # It is read while neither of both would have it otherwise: `Connections`, and the protocol.
        self._is_paused = self._is_held = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let in or not: `Connections` decides."""
        self._wire = cast(asyncio.Transport, transport)
        self.transport = cast(asyncio.Transport, _Inward(self._wire, self._hold))
        self.peer = peer_at(transport)
        inner = self._door.let_in(self)
        if inner is not None:
            self._inner = inner
            inner.connection_made(self.transport)

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
        self._is_paused = True
        self._flow()

    def resume(self) -> None:
        """Take in more again, unless the protocol cannot."""
        if self._is_paused:
            self._is_paused = False
            self._flow()

    def _hold(self, is_held: bool) -> None:
        self._is_held = is_held
        self._flow()

    def _flow(self) -> None:
        if self._wire is None or self._wire.is_closing():
            return
        if self._is_paused or self._is_held:
            self._wire.pause_reading()
        else:
            self._wire.resume_reading()

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
