"""aiohttp's protocol of one connection, with one difference: what is no HTTP waits for a turn, as calls with no key do.

aiohttp answers it at once and before any middleware hears of it, so that whoever sends the next such head as soon as
the last was refused takes all of a process for reading them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from api.door.answers import marks, written
from api.door.pace import TURNS_JUDGED, Pace, Refused, peer_at
from api.errors import ApiError, BadInput, Surface
from schemas.ids import new_request_id

#: What was sent is not repeated: it may be anything, a key in the wrong place too.
_EXPECTED = (
    "this cannot be read as HTTP: expected a request line, at most 100 headers of at most 8 KiB each, "
    "and a body as long as it says"
)


class Handler(web.RequestHandler):
    """`spoilt` is told the transport of a connection on which no further question can come."""

    __slots__ = ("_spoilt", "_strangers")

    def __init__(self, server: web.Server, strangers: Pace, spoilt: Callable[[Any], None], **options: Any) -> None:
        super().__init__(server, **options)
        self._strangers, self._spoilt = strangers, spoilt

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to what cannot be read. One to a bug outside of all middlewares is aiohttp's own."""
        told = super().handle_error(request, status, exc, message)
        if status != 400:
            return told
        self._spoilt(request.transport)
        peer = peer_at(request.transport)
        return _Unreadable(lambda: self._strangers.turn(peer, turns=TURNS_JUDGED))


class _Unreadable(web.Response):
    """A 400 that waits for its turn before it is sent, or becomes a 429; its connection is closed after it."""

    def __init__(self, turn: Callable[[], Any]) -> None:
        super().__init__()
        self._turn = turn
        self.force_close()

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Called once, by aiohttp, before the first byte is sent."""
        error: ApiError = BadInput(_EXPECTED, code="unreadable")
        try:
            await self._turn()
        except Refused as refused:
            error = refused
        request_id = new_request_id()
        self.set_status(error.status)
        self.body, headers = written(error, Surface.PROBLEM, request_id)
        self.headers.update({**headers, **marks(request_id)})
        return await super().prepare(request)
