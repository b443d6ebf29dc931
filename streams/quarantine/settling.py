"""Letters settled: redriven or discarded, each with its mark, its actor and reason in one Postgres transaction.

That one transaction is what makes redriving exactly-once. Done twice, by two operators at once or killed anywhere, a
record is counted and its letter marked, or neither is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Final

from infra.actor import Author
from infra.postgres import Connection, queries
from streams.ledger.dead_letters import Kind
from streams.ledger.dedup import AHEAD
from streams.ledger.raw import RawRecord
from streams.ledger.transaction import LedgerTransaction
from streams.quarantine.letters import Place, State
from streams.quarantine.recount import recount

#: Why a redriven letter is not discarded.
COUNTED: Final = "it was redriven, so its usage is counted; what is billed is corrected by  inferlog billing adjust"


class Outcome(str, Enum):
    """What came of redriving or discarding a letter."""

    COUNTED = "counted"
    ALREADY_COUNTED = "already_counted"
    DISCARDED = "discarded"
    SETTLED_BEFORE = "settled_before"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A letter's outcome. `why` says what stands in the way of one that was refused or settled before; `accepted` is
    the kind of an objection that was overruled.
    """

    place: Place
    outcome: Outcome
    why: str | None = None
    accepted: Kind | None = None


async def redrive(
    connection: Connection,
    records: Sequence[RawRecord],
    *,
    group: str,
    by: Author,
    wanted: Collection[State],
    accept: Collection[Kind] = (),
    ahead: timedelta = AHEAD,
    dry: bool = False,
) -> list[Settled]:
    """Count records of the usage topic that were set aside, as the ledger would now, and mark their letters.

    `wanted` are the states a letter may be in; others are left alone, and places without a letter are left out.
    `accept` are objections to a record's time that do not matter; `ahead` is how far past the ledger's clock that may
    lie. With `dry` everything is taken back at the end. Raises what Postgres raises; then nothing has happened, or a
    COMMIT has whose answer was lost: doing it again tells.
    """
    # One Postgres transaction. Dying before its COMMIT: nothing was counted or marked. After it: both were.
    # 1  hold the letters: another operator waits here, and then finds them settled
    # 2  judge their records, by the horizon of now too, and count them by the ledger's own statements
    # 3  mark the letters, and write down who did it and why
    async with _transaction(connection, dry=dry):
        held, done = await _hold(connection, [place_of(r) for r in records], wanted)
        ledger = LedgerTransaction(connection, group=group)
        bounds = (await ledger.opening()).bounds
        counts = await recount(
            ledger,
            [r for r in records if place_of(r) in held],
            accept=accept,
            check_time=lambda record: bounds.check(record, ahead),
        )
        for source, found in counts:
            outcome = Outcome.REFUSED if found.why else Outcome.COUNTED if found.new else Outcome.ALREADY_COUNTED
            done.append(Settled(place=place_of(source), outcome=outcome, why=found.why, accepted=found.accepted))
        settled = [s for s in done if s.outcome in (Outcome.COUNTED, Outcome.ALREADY_COUNTED)]
        await _settle(connection, settled, State.REDRIVEN, by=by)
    return sorted(done, key=lambda s: s.place)


async def discard(connection: Connection, places: Sequence[Place], *, by: Author, dry: bool = False) -> list[Settled]:
    """Mark open letters as discarded: their records stay uncounted, and that is a decision from now on."""
    async with _transaction(connection, dry=dry):
        held, before = await _hold(connection, places, (State.OPEN, State.REDRIVEN))
        done = [Settled(place=p, outcome=Outcome.REFUSED, why=COUNTED) for p, s in held.items() if s is State.REDRIVEN]
        settled = [Settled(place=p, outcome=Outcome.DISCARDED) for p, s in held.items() if s is State.OPEN]
        await _settle(connection, settled, State.DISCARDED, by=by)
    return sorted([*before, *done, *settled], key=lambda s: s.place)


def place_of(record: RawRecord) -> Place:
    """Where a record lies."""
    return Place(topic=record.topic, partition=record.partition, offset=record.offset)


@asynccontextmanager
async def _transaction(connection: Connection, *, dry: bool) -> AsyncIterator[None]:
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield
    except BaseException:
        await transaction.rollback()
        raise
    await (transaction.rollback() if dry else transaction.commit())


async def _hold(
    connection: Connection, places: Sequence[Place], wanted: Collection[State]
) -> tuple[dict[Place, State], list[Settled]]:
    """Lock these letters: those in a wanted state, each with it, and what became of the others."""
    columns = [p.topic for p in places], [p.partition for p in places], [p.offset for p in places]
    rows = await connection.fetch(queries("streams.quarantine")["hold"], *columns)
    states = {Place(topic=r["topic"], partition=r["partition"], offset=r["offset"]): State(r["state"]) for r in rows}
    before = [
        Settled(place=p, outcome=Outcome.SETTLED_BEFORE, why=f"is {s.value} already")
        for p, s in states.items()
        if s not in wanted
    ]
    return {p: s for p, s in states.items() if s in wanted}, before


async def _settle(connection: Connection, settled: Sequence[Settled], state: State, *, by: Author) -> None:
    if not settled:
        return
    await connection.execute(
        queries("streams.quarantine")["settle"],
        [s.place.topic for s in settled],
        [s.place.partition for s in settled],
        [s.place.offset for s in settled],
        [s.outcome.value for s in settled],
        [None if s.accepted is None else s.accepted.value for s in settled],
        state.value,
        by.actor,
        by.reason,
    )
