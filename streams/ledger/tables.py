"""The usage ledger in Postgres: where its transactions are opened, and its positions read and set.

Whoever ends is not kept waiting by a server that is stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from uuid import UUID

from infra.postgres import Connection, Pool, queries
from streams.ledger.transaction import LedgerTransaction, scope

_SQL = queries("streams.ledger")


class Ledger:
    """Opens transactions and reads positions. `group` is the consumer group whose position is kept."""

    def __init__(self, pool: Pool, *, group: str) -> None:
        self._pool = pool
        self._group = group

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[LedgerTransaction]:
        """A transaction that commits when the block ends and rolls back when it raises."""
        async with self._connection() as connection, scope(connection):
            yield self.on(connection)

    def on(self, connection: Connection) -> LedgerTransaction:
        """The ledger's statements on a connection with an open transaction."""
        return LedgerTransaction(connection, group=self._group)

    async def positions(self, topic: str) -> dict[int, int]:
        """Next offset per partition of a topic; partitions never read are absent."""
        async with self._connection() as connection:
            rows = await connection.fetch(_SQL["positions"], self._group, topic)
        return {r["partition"]: r["next_offset"] for r in rows}

    async def topic_id(self, topic: str) -> UUID | None:
        """Which topic of that name the positions are of; None when that was never noted."""
        async with self._connection() as connection:
            found: UUID | None = await connection.fetchval(_SQL["topic_id"], self._group, topic)
        return found

    async def move(self, topic: str, topic_id: UUID | None, moves: Mapping[int, tuple[int | None, int]]) -> None:
        """Set positions, also backwards: per partition from what it was (None: there was none) to what it shall be.

        A position that is another by now stays. Notes with them which topic they are of, where that can be told.
        """
        async with self._connection() as connection, scope(connection):
            if moves:
                columns = [list(moves), [was for was, _ in moves.values()], [to for _, to in moves.values()]]
                await connection.execute(_SQL["move"], self._group, topic, *columns)
            if topic_id is not None:
                await connection.execute(_SQL["note_topic"], self._group, topic, topic_id)

    async def reachable(self, *, timeout_s: float) -> None:
        """Return when Postgres answers. Raises what the driver raises when it does not."""
        async with self._connection() as connection:
            await connection.fetchval("SELECT 1", timeout=timeout_s)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """A connection of the pool, dropped at once when its user is cancelled.

        A server that is stopped, not gone, would keep a process that wants to end waiting for its word on a cancelled
        statement or a ROLLBACK; one that lives rolls back by itself, and nothing was acknowledged.
        """
        async with self._pool.acquire() as connection:
            try:
                yield connection
            except asyncio.CancelledError:
                connection.terminate()
                raise
