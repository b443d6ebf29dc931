"""The book of claims as a table of Postgres: it outlives processes, Redis and flushes, and is one for all of them.

Each call is one statement, over within its bound; a statement that timed out may have been done, and whoever repeats it
finds what it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api.once.claims import (
    COUNTED_HORIZON_S,
    LOST_S,
    REFUSED_S,
    BookAway,
    Decisions,
    Entry,
    Note,
    Standing,
)
from infra.postgres import DatabaseUnavailable, Pool, Record, fetch_within, queries
from infra.turns import Turn
from schemas.ids import first_request_id

#: For callers that wait; what is written beside them may take longer.
ASK_WITHIN_S = 1.0
_NOTE_WITHIN_S = 2.0
_PRUNE_WITHIN_S = 10.0


class PostgresBook:
    """Implements the port Book."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._sql = queries("api.once")

    async def enter(self, entries: Sequence[Entry]) -> Sequence[Standing | None]:
        """See Book. Two statements only if a key was taken."""
        decided = [e.decisions for e in entries]
        entered = await self._fetch(
            "enter_claims",
            [e.is_keyed for e in entries],
            [d.request_id for d in decided],
            [e.name for e in entries],
            [e.customer_id for e in entries],
            [e.digest for e in entries],
            [d.admitted_at for d in decided],
            [d.deadline_at for d in decided],
            [d.version for d in decided],
            [d.price_id for d in decided],
            [e.retries for e in entries],
            [e.patience_s for e in entries],
        )
        new = {row["request_id"] for row in entered}
        taken = [e.name for e in entries if e.is_keyed and e.decisions.request_id not in new]
        # A statement of its own, so that it sees what the first one waited for.
        there = {s.name: s for s in map(_standing, await self._fetch("claims_by_key", taken))} if taken else {}
        # Without a key only its own claim can be there already, of a statement whose answer was lost.
        return [there.get(e.name) if e.name in taken else _new(e) for e in entries]

    async def rejoin(self, entry: Entry) -> Standing | None:
        """See Book."""
        while True:
            rows = await self._fetch(
                "rejoin_claim",
                entry.name,
                entry.customer_id,
                entry.retries,
                COUNTED_HORIZON_S,
                LOST_S,
                entry.patience_s,
                REFUSED_S,
            )
            if not rows or rows[0]["used_up"]:
                return None
            if rows[0]["joined"]:
                return _standing(rows[0])

    async def find(self, standing: Standing) -> Standing | None:
        """See Book."""
        rows = await self._fetch("claim", standing.is_keyed, standing.decisions.request_id)
        return _standing(rows[0]) if rows else None

    async def take_over(self, standing: Standing) -> bool:
        """See Book."""
        claim = (standing.is_keyed, standing.decisions.request_id, standing.takeovers)
        return bool(await self._fetch("take_over_claim", *claim))

    async def note(self, notes: Sequence[Note]) -> None:
        """See Book."""
        kept, gone = [n for n in notes if not n.is_leaving], [n for n in notes if n.is_leaving]
        if kept:
            await self._fetch(
                "note_claims",
                [n.is_keyed for n in kept],
                [n.request_id for n in kept],
                [n.retries for n in kept],
                [n.answered for n in kept],
                within_s=_NOTE_WITHIN_S,
            )
        if gone:
            await self._fetch(
                "end_claims",
                [n.is_keyed for n in gone],
                [n.request_id for n in gone],
                [n.retries for n in gone],
                [n.void for n in gone],
                within_s=_NOTE_WITHIN_S,
            )

    async def prune(self, *, is_keyed: bool, older_than_s: float, at_most: int) -> int | None:
        """See Book."""
        before = first_request_id(age_s=older_than_s if is_keyed else min(older_than_s, REFUSED_S))
        args = (is_keyed, before, older_than_s, at_most, Turn.CLAIMS, REFUSED_S)
        rows = await self._fetch("prune_claims", *args, within_s=_PRUNE_WITHIN_S)
        return int(rows[0]["gone"]) if rows[0]["is_ours"] else None

    async def _fetch(self, name: str, *args: Any, within_s: float = ASK_WITHIN_S) -> list[Record]:
        try:
            return await fetch_within(self._pool, within_s, self._sql[name], *args)
        except DatabaseUnavailable as error:
            raise BookAway(str(error)) from error


def _new(entry: Entry) -> Standing:
    return Standing(
        is_keyed=entry.is_keyed,
        name=entry.name,
        customer_id=entry.customer_id,
        digest=entry.digest,
        retries=entry.retries,
        takeovers=0,
        is_accepted=False,
        age_s=0.0,
        quiet_s=0.0,
        decisions=entry.decisions,
    )


def _standing(row: Record) -> Standing:
    return Standing(
        is_keyed=row["is_keyed"],
        name=row["sameness"],
        customer_id=row["customer_id"],
        digest=row["digest"],
        retries=row["retries"],
        takeovers=row["takeovers"],
        is_accepted=row["is_accepted"],
        age_s=row["age_s"],
        quiet_s=row["quiet_s"],
        decisions=Decisions(
            request_id=row["request_id"],
            admitted_at=row["admitted_at"],
            deadline_at=row["deadline_at"],
            version=row["version"],
            price_id=row["price_id"],
        ),
    )
