"""A TCP proxy before Postgres that cuts a connection at the ledger's COMMIT: before Postgres has it, or after.

It runs in the test's own event loop, so nothing there may block while a process talks through it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit, urlunsplit

#: What is done to one COMMIT: let it pass, keep it from Postgres, or keep Postgres' answer from the ledger.
PASS, BEFORE, AFTER = "pass", "before", "after"

_SSL_REQUEST = 80877103
_COMMIT = b"COMMIT;\0"
#: Only the ledger's own connections prepare this; the relay and others commit through the proxy as well.
_LEDGERS = b"INSERT INTO processed_requests"


class CommitCutter:
    """`script` says what becomes of each of the ledger's COMMITs, in order; those after it pass."""

    def __init__(self, dsn: str, script: Sequence[str]) -> None:
        parts = urlsplit(dsn)
        self._upstream = (parts.hostname, parts.port)
        self._parts = parts
        self._script = list(script)
        self._port = 0
        self.commits = 0

    @property
    def dsn(self) -> str:
        """The same database and account, by way of the proxy."""
        account = self._parts.netloc.rpartition("@")[0]
        return urlunsplit(self._parts._replace(netloc=f"{account}@127.0.0.1:{self._port}"))

    @property
    def done(self) -> bool:
        """Whether all of the script has happened."""
        return self.commits >= len(self._script)

    async def relay(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it or it is cut."""
        server, to_server = await asyncio.open_connection(*self._upstream)
        swallow = asyncio.Event()
        ways = {
            asyncio.create_task(self._forward(client, to_server, swallow)),
            asyncio.create_task(_answer(server, to_client, swallow)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for writer in (to_client, to_server):
                writer.transport.abort()

    async def _forward(
        self, client: asyncio.StreamReader, to_server: asyncio.StreamWriter, swallow: asyncio.Event
    ) -> None:
        """The client's messages, until the one at which the script cuts."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:  # what comes before the session has no type
                size = await client.readexactly(4)
                body = await client.readexactly(int.from_bytes(size, "big") - 4)
                to_server.write(size + body)
                if int.from_bytes(body[:4], "big") != _SSL_REQUEST:
                    break
            ledgers = False
            while True:
                head = await client.readexactly(5)
                body = await client.readexactly(int.from_bytes(head[1:], "big") - 4)
                ledgers = ledgers or _LEDGERS in body
                if ledgers and head[:1] == b"Q" and body == _COMMIT:
                    act = self._script[self.commits] if self.commits < len(self._script) else PASS
                    self.commits += 1
                    if act == BEFORE:
                        return
                    if act == AFTER:
                        swallow.set()
                to_server.write(head + body)
                await to_server.drain()


async def _answer(server: asyncio.StreamReader, to_client: asyncio.StreamWriter, swallow: asyncio.Event) -> None:
    """The server's bytes; the first that come once they are to be swallowed end the connection."""
    with contextlib.suppress(ConnectionError):
        while chunk := await server.read(65_536):
            if swallow.is_set():
                return
            to_client.write(chunk)
            await to_client.drain()


@asynccontextmanager
async def open_cutter(dsn: str, script: Sequence[str]) -> AsyncIterator[CommitCutter]:
    """A proxy before the database of this DSN, on a port of its own."""
    cutter = CommitCutter(dsn, script)
    server = await asyncio.start_server(cutter.relay, "127.0.0.1", 0)
    try:
        cutter._port = server.sockets[0].getsockname()[1]
        yield cutter
    finally:
        server.close()
