"""How this process listens: its socket, what aiohttp is told to take, and `Connections` before both.

Nothing of it knows what the gateway answers, so that tests of hostile callers meet the same server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from api.door.connections import Connections
from api.door.handler import Handler
from api.door.pace import Pace

BACKLOG = 1024
#: Until a handler that is told to end has ended.
CLOSE_WITHIN_S = 1.0
#: How long what is left of a body that nobody wants is read before its connection is closed.
_LINGER_S = 1.0
_MOST_HEADERS = 100
#: What aiohttp takes in of a body before a call reads it: about twice this, for each connection.
_READ_AHEAD_BYTES = 16 * 1024


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError when the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; "
            "does a gateway of `inferlog up` run there? Name another port with INFERLOG_API_PORT"
        ) from error


def _is_ours(record: logging.LogRecord) -> bool:
    """Not what somebody sent that is no HTTP: aiohttp logs each with its traceback, as fast as it is sent."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def make_runner(app: web.Application) -> web.AppRunner:
    """What runs the application on connections."""
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    return web.AppRunner(
        app,
        shutdown_timeout=CLOSE_WITHIN_S,
        handler_cancellation=True,  # a caller that hangs up stops waiting at once, and its place is free
    )


def open_door(
    runner: web.AppRunner, strangers: Pace, *, most: int, clock: Callable[[], float] | None = None
) -> Connections:
    """At most so many connections to what the runner runs."""

    def serve() -> asyncio.Protocol:
        if runner.server is None:
            raise RuntimeError("a connection came before the application was started")
        return Handler(
            runner.server,
            strangers,
            connections.spoilt,
            loop=asyncio.get_running_loop(),
            access_log=None,
            auto_decompress=False,  # nothing that is packed is taken: `api.surfaces.http.read_body`
            read_bufsize=_READ_AHEAD_BYTES,
            max_headers=_MOST_HEADERS,
            lingering_time=_LINGER_S,
        )

    known = {} if clock is None else {"clock": clock}
    connections = Connections(serve, most=most, barred=strangers.crowding, wasted=strangers.wasted, **known)
    return connections
