"""How Postgres is reached: a pool with deadlines, transactions, and SQL kept in `.sql` files and called by name.

The only home of asyncpg. Failures come as three kinds, by SQLSTATE: the server is away, the data is wrong, or
anything else, which is a bug.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final, TypeVar

import asyncpg
from asyncpg import Connection, Pool, Record

from infra.settings import PostgresSettings

__all__ = [
    "Connection",
    "DatabaseUnavailable",
    "Pool",
    "Record",
    "fetch_within",
    "is_data_error",
    "is_outage",
    "on_connection",
    "open_connection",
    "open_pool",
    "queries",
    "split_queries",
]

T = TypeVar("T")

_CLOSE_WITHIN_S: Final = 5.0
# Connection trouble, operator intervention (shutdown, restart), insufficient resources, and lock trouble
# (deadlock, serialisation, lock timeout): the same statement may succeed later.
_OUTAGE_CLASSES = ("08", "57", "53", "40", "55")
# Data exceptions, constraint violations, and values past a limit of the server (a key too long for its index): the
# same statement fails for ever.
_DATA_CLASSES = ("22", "23", "54")
# Wrong user or password, no such database.
_LOGIN_CLASSES = ("28", "3D")


class DatabaseUnavailable(RuntimeError):
    """Postgres did not answer in time, or refused for a reason that an operator can mend."""


@asynccontextmanager
async def open_pool(
    settings: PostgresSettings,
    *,
    min_size: int = 0,
    max_size: int = 4,
    connect_timeout_s: float = 2.0,
    command_timeout_s: float = 10.0,
    statement_cache_size: int = 100,
    resets: bool = True,
) -> AsyncIterator[Pool]:
    """A pool whose connects and statements each end within their timeout.

    With `min_size=0` opening succeeds while the server is away, and each use fails or heals by itself. Without `resets`
    a connection that is given back is not asked to forget its session, which saves half of a short statement's time:
    for users whose statements leave nothing in it.
    """
    pool = asyncpg.create_pool(
        settings.dsn,
        min_size=min_size,
        max_size=max_size,
        timeout=connect_timeout_s,
        command_timeout=command_timeout_s,
        statement_cache_size=statement_cache_size,
        max_inactive_connection_lifetime=60,
        reset=None if resets else _keep,
    )
    await pool
    try:
        yield pool
    finally:
        pool.terminate()


async def _keep(_: Connection) -> None:
    """Leave a session as it is."""


async def connect(settings: PostgresSettings, *, timeout_s: float = 5.0, command_timeout_s: float = 30.0) -> Connection:
    """One connection, which the caller closes; `open_connection` is the one that cannot be forgotten."""
    return await asyncpg.connect(settings.dsn, timeout=timeout_s, command_timeout=command_timeout_s)


@asynccontextmanager
async def open_connection(settings: PostgresSettings, *, command_timeout_s: float = 30.0) -> AsyncIterator[Connection]:
    """One connection for one piece of work; locks that it holds are free again afterwards, whatever happened.

    A server that goes away only at the end undoes nothing that was committed, so it is no failure of the work.
    """
    connection = await connect(settings, command_timeout_s=command_timeout_s)
    try:
        yield connection
    except asyncio.CancelledError:
        connection.terminate()  # whoever is told to end does not wait for a server that may only be stopped
        raise
    finally:
        try:
            await connection.close(timeout=_CLOSE_WITHIN_S)
        except Exception as error:
            if not is_outage(error):
                raise
            connection.terminate()


def on_connection(settings: PostgresSettings, work: Callable[[Connection], Awaitable[T]]) -> T:
    """Run the work of a command, which runs in no event loop yet, on a connection of its own."""

    async def run() -> T:
        async with open_connection(settings) as connection:
            return await work(connection)

    return asyncio.run(run())


def is_outage(error: BaseException) -> bool:
    """True when the server is away or busy and the same work may succeed later."""
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "")[:2] in _OUTAGE_CLASSES
    # asyncpg reports a closed connection as InterfaceError; a refused or broken one as OSError; a slow one as timeout;
    # and one that died idle, its server's last words half read, as InternalClientError (seen with 0.32).
    known = (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError, ConnectionError)
    return isinstance(error, known) or type(error).__name__ == "TimeoutError"


def is_data_error(error: BaseException) -> bool:
    """True when a value was refused (range, type, constraint): repeating the statement cannot help."""
    if isinstance(error, asyncpg.PostgresError):
        return (error.sqlstate or "")[:2] in _DATA_CLASSES
    # asyncpg refuses values that do not fit a parameter's type before they reach the server.
    return isinstance(error, asyncpg.DataError)


def is_unusable(error: BaseException) -> bool:
    """True when an operator has to mend something first: wrong credentials, no such database, or tables not there."""
    return isinstance(error, asyncpg.PostgresError) and (
        (error.sqlstate or "")[:2] in _LOGIN_CLASSES or isinstance(error, asyncpg.UndefinedTableError)
    )


def is_unique_violation(error: BaseException) -> bool:
    """True when a row with the same unique key exists."""
    return isinstance(error, asyncpg.UniqueViolationError)


def split_queries(text: str) -> dict[str, str]:
    """Statements by name from a file of `-- name: x` blocks. Raises ValueError when a name repeats."""
    found: dict[str, str] = {}
    for block in re.split(r"^-- name:", text, flags=re.MULTILINE)[1:]:
        name, _, statement = block.partition("\n")
        if name.strip() in found:
            raise ValueError(f"query '{name.strip()}' is defined twice")
        found[name.strip()] = statement.strip()
    return found


@lru_cache(maxsize=16)
def queries(package: str) -> dict[str, str]:
    """The statements of `queries.sql` beside a package's modules, by name."""
    return split_queries(files(package).joinpath("queries.sql").read_text(encoding="utf-8"))


async def fetch_within(pool: Pool, timeout_s: float, statement: str, *args: Any) -> list[Record]:
    """Rows of a read that is over after `timeout_s`, waiting for a connection included.

    Raises DatabaseUnavailable, also when the server refuses (tables not there yet, wrong password): a reader can do
    nothing about either, and the words say which.
    """
    try:
        rows: list[Record] = await asyncio.wait_for(pool.fetch(statement, *args), timeout_s)
    except Exception as error:
        if is_outage(error) or (isinstance(error, asyncpg.PostgresError) and not is_data_error(error)):
            raise DatabaseUnavailable(f"{type(error).__name__}: {error}") from error
        raise
    return rows
