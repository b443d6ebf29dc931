"""The usage ledger in Postgres: a batch's rows and its position on the log in one transaction.

`processed_requests` decides what counts; only rows really inserted there reach `usage_hourly`, so a record that is
delivered, replayed or produced twice is billed once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from uuid import UUID

from infra.postgres import Connection, Pool, queries
from streams.dead_letters import DeadLetterRow
from streams.projections import LocatedUsage, NextOffset, hourly_rows, processed_rows


class LedgerTransaction:
    """One open transaction. Nothing in it is visible, and nothing is acknowledged, before it commits."""

    def __init__(self, connection: Connection, *, group: str) -> None:
        self._connection = connection
        self._group = group

    async def count(self, usages: Sequence[LocatedUsage]) -> int:
        """Bill the records (one per request id) that were never billed before; returns how many those were.

        Runs inside a savepoint: after an error the transaction can go on without these records. Raises what Postgres
        raises, `infra.postgres.is_data_error` when one of the records is to blame.
        """
        if not usages:
            return 0
        async with self._connection.transaction():
            new = await self._insert_processed(usages)
            fresh = [u for u in usages if u.record.request_id in new]
            rows = hourly_rows(fresh)
            if rows:
                await self._connection.execute(queries("streams")["add_usage"], *_columns([r.values() for r in rows]))
            return len(fresh)

    async def _insert_processed(self, usages: Sequence[LocatedUsage]) -> set[UUID]:
        rows = await self._connection.fetch(queries("streams")["insert_processed"], *_columns(processed_rows(usages)))
        # As Python's own UUIDs: the driver's class is equal to them but hashes slower.
        return {UUID(int=r["request_id"].int) for r in rows}

    async def set_aside(self, letters: Sequence[DeadLetterRow]) -> None:
        """Keep records that cannot be counted, with their bytes; repeating it changes nothing."""
        if letters:
            rows = [
                (x.source.topic, x.source.partition, x.source.offset, x.source.key, x.source.value, x.reason)
                for x in letters
            ]
            await self._connection.execute(queries("streams")["set_aside"], *_columns(rows))

    async def advance(self, offsets: Sequence[NextOffset]) -> None:
        """Move the ledger's position forward; an older position changes nothing."""
        if offsets:
            rows = [(o.topic, o.partition, o.next_offset) for o in offsets]
            await self._connection.execute(queries("streams")["advance"], self._group, *_columns(rows))


class Ledger:
    """Opens transactions and reads positions. `group` is the consumer group whose position is kept."""

    def __init__(self, pool: Pool, *, group: str) -> None:
        self._pool = pool
        self._group = group

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[LedgerTransaction]:
        """A transaction that commits when the block ends and rolls back when it raises."""
        async with self._pool.acquire() as connection, connection.transaction():
            yield LedgerTransaction(connection, group=self._group)

    async def positions(self, topic: str) -> dict[int, int]:
        """Next offset per partition of a topic; partitions never read are absent."""
        rows = await self._pool.fetch(queries("streams")["positions"], self._group, topic)
        return {r["partition"]: r["next_offset"] for r in rows}

    async def reachable(self, *, timeout_s: float) -> None:
        """Return when Postgres answers. Raises what the driver raises when it does not."""
        await self._pool.fetchval("SELECT 1", timeout=timeout_s)


def _columns(rows: Sequence[tuple[object, ...]]) -> list[list[object]]:
    return [list(column) for column in zip(*rows, strict=True)]
