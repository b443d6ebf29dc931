"""One transaction of the usage ledger: a batch's rows and its position on the log, or nothing of either.

`processed_requests` decides what counts; only rows really inserted there reach `usage_hourly`, so a record that is
delivered, replayed or produced twice is billed once. Rows are locked in the order of their keys: all requests, then
all hours, then dead letters and positions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from uuid import UUID

from infra.outbox import add_facts
from infra.postgres import Connection, is_data_error, queries
from schemas.headers import Stamp
from schemas.records import DeadLetter
from schemas.topics import DEAD_LETTERS
from streams.ledger.dead_letters import in_slices, kind_of
from streams.ledger.dedup import Bounds, Opening, Overtaken, Place
from streams.ledger.halving import refused_of
from streams.ledger.projections import Counted, LocatedUsage, hourly_rows, processed_rows, row_order
from streams.ledger.stretches import Skipped, Stretch

_STAMP = Stamp("streams")
_SQL = queries("streams.ledger")


class LedgerTransaction:
    """One open transaction. Nothing in it is visible, and nothing is acknowledged, before it commits."""

    def __init__(self, connection: Connection, *, group: str) -> None:
        self._connection = connection
        self._group = group
        self._opening: Opening | None = None

    async def opening(self, stretches: Sequence[Stretch] = ()) -> Opening:
        """What the ledger knows as the transaction begins; to be asked for before anything is judged by it.

        What is read here stays true to the end: rows are let go of only after every transaction has ended that may have
        seen an earlier bound, and positions that moved meanwhile are found out by `advance`.
        """
        places = [(s.topic, s.partition) for s in stretches]
        columns = _columns(places) if places else ([], [])
        rows = await self._connection.fetch(_SQL["opening"], self._group, *columns)
        if not rows:
            raise RuntimeError("the table ledger_dedup has lost its row; restore it, with the horizon that it held")
        first_id = rows[0]["first_id"]
        self._opening = Opening(
            bounds=Bounds(
                counts_from=rows[0]["counts_from"],
                first_id=None if first_id is None else UUID(int=first_id.int),
                now=rows[0]["now"],
            ),
            next_offsets={(r["topic"], r["partition"]): r["next_offset"] for r in rows if r["topic"] is not None},
        )
        return self._opening

    async def count(self, usages: Sequence[LocatedUsage]) -> Counted:
        """Bill the records (one per request id) that were never billed before, and say what became of the others.

        A record that Postgres refuses leaves nothing behind. Raises what it raises for any other reason.
        """
        if not usages:
            return Counted()
        try:
            async with scope(self._connection):
                fresh = await self._insert_processed(usages)
                rows = await self._add(fresh)
        except Exception as error:
            if not is_data_error(error):
                raise
            return await self._count_apart(usages)
        return Counted(fresh=fresh, contradicting=await self._contradicting(usages, fresh), rows=rows)

    async def _count_apart(self, usages: Sequence[LocatedUsage]) -> Counted:
        """The same when Postgres refuses some of the records: each that is to blame is found.

        All requests before all hours, and halves in the order of their rows, as when nothing is refused: so writers
        that both do this wait for each other in line. What an attempt has locked is free again when it fails.
        """
        new: set[int] = set()
        rows = 0

        async def insert(part: Sequence[LocatedUsage]) -> None:
            async with scope(self._connection):
                found = await self._insert_processed(part)
            new.update(u.record.request_id.int for u in found)

        async def add(part: Sequence[LocatedUsage]) -> None:
            nonlocal rows
            async with scope(self._connection):
                added = await self._add(part)
            rows += added

        by_id = sorted(usages, key=lambda u: u.record.request_id.int)
        refused = await refused_of(by_id, insert, blames=is_data_error)
        fresh = [u for u in usages if u.record.request_id.int in new]
        if fresh:
            # Of the same hour in the order in which they came: of two that would overflow it the first counts.
            unbilled = await refused_of(sorted(fresh, key=row_order), add, blames=is_data_error)
            refused += unbilled
            if unbilled:
                await self._connection.execute(_SQL["forget"], [u.record.request_id for u, _ in unbilled])
        bad = {u.record.request_id.int for u, _ in refused}
        good = [u for u in usages if u.record.request_id.int not in bad]
        counted = [u for u in fresh if u.record.request_id.int not in bad]
        return Counted(
            fresh=counted,
            contradicting=await self._contradicting(good, counted),
            refused=[(u, f"{type(error).__name__}: {error}") for u, error in refused],
            rows=rows,
        )

    async def _add(self, fresh: Sequence[LocatedUsage]) -> int:
        """Add what these records say to their hours; returns how many rows that were."""
        rows = hourly_rows(fresh)
        if rows:
            await self._connection.execute(_SQL["add_usage"], *_columns([r.values() for r in rows]))
        return len(rows)

    async def _insert_processed(self, usages: Sequence[LocatedUsage]) -> Sequence[LocatedUsage]:
        """Put the request ids into the table; returns the records whose ids were not there."""
        rows = await self._connection.fetch(_SQL["insert_processed"], *_columns(processed_rows(usages)))
        if len(rows) == len(usages):
            return usages
        new = {r["request_id"].int for r in rows}
        return [u for u in usages if u.record.request_id.int in new]

    async def _contradicting(self, usages: Sequence[LocatedUsage], fresh: Sequence[LocatedUsage]) -> list[LocatedUsage]:
        """Of the records that are not fresh, those that say something else than the one that was counted."""
        if len(fresh) == len(usages):
            return []
        new = {u.record.request_id.int for u in fresh}
        said = [(u.record.request_id, u.digest) for u in usages if u.record.request_id.int not in new]
        # A statement of its own: the insert's snapshot may be older than the row that it waited for and met.
        rows = await self._connection.fetch(_SQL["contradicting"], *_columns(said))
        ids = {r["request_id"].int for r in rows}
        return [u for u in usages if u.record.request_id.int in ids] if ids else []

    async def letters_at(self, places: Sequence[Place]) -> set[Place]:
        """Those of these places that have a dead letter."""
        rows = await self._connection.fetch(_SQL["letters_at"], *_columns(places)) if places else []
        return {(r["topic"], r["partition"], r["offset"]) for r in rows}

    async def set_aside(self, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
        """Keep records that cannot be counted, and return the letters that were not there, in the order of places."""
        new: list[DeadLetter] = []
        # Sorted, so that two writers of the same letters wait for each other and not in a circle.
        for part in in_slices(sorted(letters, key=_place)):
            rows = await self._connection.fetch(_SQL["set_aside"], *_columns([_row(x) for x in part]))
            places = {(r["topic"], r["partition"], r["offset"]) for r in rows}
            new += [x for x in part if _place(x) in places]
        return new

    async def advance(self, stretches: Sequence[Stretch]) -> None:
        """Move the ledger's position of each partition to the stretch's end, if that is further.

        Raises Skipped when a stretch begins past the position: then records between were not counted; Overtaken when
        the position moved after the opening. Either way the transaction must not commit. A partition that was never
        read stands at 0.
        """
        if not stretches:
            return
        stood = (self._opening or await self.opening(stretches)).next_offsets
        for s in stretches:
            if s.begin > stood.get((s.topic, s.partition), 0):
                raise Skipped(
                    f"{s.topic} partition {s.partition}: a batch begins at {s.begin}, past the ledger's next offset "
                    f"{stood.get((s.topic, s.partition), 0)}; the records between were not counted, and nothing of the "
                    "batch was kept"
                )
        known = [(s.topic, s.partition, stood[s.topic, s.partition], s.end) for s in stretches if _of(s) in stood]
        first = [(s.topic, s.partition, s.end) for s in stretches if _of(s) not in stood]
        moved = 0
        if known:
            moved += len(await self._connection.fetch(_SQL["advance"], self._group, *_columns(known)))
        if first:
            moved += len(await self._connection.fetch(_SQL["begin"], self._group, *_columns(first)))
        if moved != len(stretches):
            raise Overtaken("another writer moved the position of a partition of this batch meanwhile")

    async def tell(self, letters: Sequence[DeadLetter]) -> None:
        """Have these letters put on the dead-letter topic after the commit; must come last in the transaction."""
        for part in in_slices(letters):
            await add_facts(self._connection, DEAD_LETTERS, [(x.topic, x) for x in part], stamp=_STAMP)


@asynccontextmanager
async def scope(connection: Connection) -> AsyncIterator[None]:
    """A transaction or, inside one, a savepoint; left as it is when cancelled: its connection is dropped."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield
    except asyncio.CancelledError:
        raise
    except BaseException:
        await transaction.rollback()
        raise
    await transaction.commit()


def _of(stretch: Stretch) -> tuple[str, int]:
    return stretch.topic, stretch.partition


def _place(letter: DeadLetter) -> Place:
    return letter.topic, letter.partition, letter.offset


def _row(x: DeadLetter) -> tuple[object, ...]:
    """In the order of the statement's columns."""
    kind = kind_of(x.reason).value
    return (*_place(x), x.key, x.value, x.value_size_bytes, x.value_sha256, x.reason, x.occurred_at, kind)


def _columns(rows: Sequence[tuple[object, ...]]) -> list[list[object]]:
    return [list(column) for column in zip(*rows, strict=True)]
