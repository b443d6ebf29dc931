"""Tells the rows that are older than the outbox: one fact for each price, version, route, customer and key, once per
database.

They come before every fact that a command wrote, because a relay publishes nothing before it has told them all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from infra.outbox import FramedFact, add_earlier_facts, framed
from infra.postgres import Connection, Record, queries
from schemas.headers import Stamp
from streams.outbox.old_rows import Told, of_customer, of_key, of_price, of_route, of_version

log = logging.getLogger(__name__)

_STAMP: Final = Stamp("streams")
#: Rows of a slice: some 0.5 s, and 5 MB, but for manifests (the statement bounds those).
SLICE_ROWS: Final = 5000
_MOST_NAMED: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A table, the statement for slices of its old rows, the fact that a row makes, and the migration since which
    commands tell what they change there."""

    table: str
    statement: str
    fact: Callable[[Record], Told]
    since: str = "0005_facts.sql"


# From the last to the first on the log: prices and versions come before the routes that name them, customers before
# their keys.
_SOURCES: Final = (
    _Source(table="api_keys", statement="old_keys", fact=of_key),
    _Source(table="customers", statement="old_customers", fact=of_customer, since="0014_key_scopes.sql"),
    _Source(table="routes", statement="old_routes", fact=of_route),
    _Source(table="model_versions", statement="old_versions", fact=of_version),
    _Source(table="prices", statement="old_prices", fact=of_price),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Untold:
    """Rows that no fact can carry: how many, and the first ones, each with the reason."""

    count: int = 0
    first: Sequence[str] = ()

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        return {"count": self.count, "first": list(self.first)}


async def tell_old_rows(
    connection: Connection, *, progress: Callable[[int], None] = lambda told: None, rows: int = SLICE_ROWS
) -> int:
    """Write the facts that are not written yet, `rows` rows at a time; returns how many.

    `progress` is called with their number when there is something to do, and after each slice. A row that no fact can
    carry is noted and passed over. Raises what Postgres raises. A transaction is left open on failure: the session
    ends with it.
    """
    sql = queries("streams.outbox")
    await connection.execute(sql["backfill_begin"])
    tables = {r["source"] for r in await connection.fetch(sql["backfill_open"])}
    told = 0
    if tables:
        progress(told)
        for source in (s for s in _SOURCES if s.table in tables):
            since = await connection.fetchval(sql["told_since"], source.since)
            if since is None:
                raise RuntimeError(f"schema_migrations does not say when {source.since} was applied")
            while (count := await _tell_slice(connection, source, since, rows=rows)) is not None:
                told += count
                progress(told)
    return told


async def _tell_slice(connection: Connection, source: _Source, since: Any, *, rows: int) -> int | None:
    """Tell the newest rows of a table that are not told; returns how many facts that made, None when all are told."""
    # One Postgres transaction: dying before its COMMIT, the slice is told next time; after it, the next one is.
    # 1  take the table's turn
    # 2  read the slice
    # 3  write its facts before all that wait, so that the slices, each older than the one before, stand in order
    # 4  note the rows that cannot be told
    # 5  note how far the table is told, or, when the slice is empty, that it is
    sql = queries("streams.outbox")
    transaction = connection.transaction()
    await transaction.start()
    slice_: list[Record] = []
    facts: list[FramedFact] = []
    if await connection.fetchval(sql["backfill_turn"], source.table):
        slice_ = await connection.fetch(sql[source.statement], since, rows)
        if slice_:
            facts, refused = _judged(source, slice_)
            await add_earlier_facts(connection, facts[::-1])
            if refused:
                await connection.execute(sql["untold_add"], source.table, list(refused), list(refused.values()))
            await connection.execute(sql["backfill_move"], source.table, slice_[-1]["at"], slice_[-1]["id"])
        else:
            await connection.execute(sql["backfill_complete"], source.table)
    await transaction.commit()
    return len(facts) if slice_ else None


def _judged(source: _Source, rows: Sequence[Record]) -> tuple[list[FramedFact], dict[str, str]]:
    """The facts of these rows, in their order, and why other rows make none, by id."""
    facts: list[FramedFact] = []
    refused: dict[str, str] = {}
    for row in rows:
        try:
            facts.append(framed(*source.fact(row), stamp=_STAMP))
        except (ValueError, TypeError, ArithmeticError) as error:
            refused[row["id"]] = f"{type(error).__name__}: {error}"
            if len(refused) <= _MOST_NAMED:
                log.error("no fact can tell row %s of %s: %s", row["id"], source.table, refused[row["id"]])
    return facts, refused


async def untold(connection: Connection) -> Untold:
    """The rows that were passed over, in this database's whole life, and are still noted."""
    found = await connection.fetch(queries("streams.outbox")["untold"], _MOST_NAMED)
    if not found:
        return Untold()
    return Untold(count=found[0]["rows"], first=[f"{r['source']} {r['id']}: {r['reason']}" for r in found])
