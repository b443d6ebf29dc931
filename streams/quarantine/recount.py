"""Records that were set aside, judged by today's code and counted by the ledger's own statements.

Within somebody else's transaction: whatever is refused leaves nothing behind in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from infra.postgres import Connection, is_data_error
from schemas.codec import DecodeError, decode_at
from schemas.records import UsageRecorded
from streams.ledger.dead_letters import Kind, RawRecord, contradiction, kind_of
from streams.ledger.projections import LocatedUsage, UnfitRecord, check_fit, content_digest, in_turns
from streams.ledger.tables import LedgerTransaction

#: Raises UnfitRecord for a record that is fit but of a time in which the ledger counts nothing by itself.
CheckTime = Callable[[UsageRecorded], None]
#: Objections to a record's time, which an operator may overrule: nothing else is wrong with it.
MAY_ACCEPT = (Kind.HORIZON, Kind.FUTURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recounted:
    """What came of a record: `why` it was refused; else whether it was `new` or its equal had been counted.

    `accepted` is the kind of the objection that was overruled.
    """

    new: bool = False
    why: str | None = None
    accepted: Kind | None = None


async def recount(
    connection: Connection,
    ledger: LedgerTransaction,
    records: Sequence[RawRecord],
    *,
    accept: Collection[Kind],
    check_time: CheckTime,
) -> list[tuple[RawRecord, Recounted]]:
    """Count these usage records where they can be, and say of each what came of it.

    `accept` are objections to a record's time that do not matter. Raises what Postgres raises, unless a record is to
    blame.
    """
    found: list[tuple[RawRecord, Recounted]] = []
    usages: list[LocatedUsage] = []
    accepted: dict[int, Kind] = {}
    for source in records:
        try:
            record = decode_at(source, UsageRecorded)
            check_fit(record)
        except (DecodeError, UnfitRecord) as error:
            why = error.reason if isinstance(error, DecodeError) else str(error)
            found.append((source, Recounted(why=why)))
            continue
        try:
            check_time(record)
        except UnfitRecord as error:
            kind = kind_of(str(error))
            if kind not in MAY_ACCEPT or kind not in accept:
                found.append((source, Recounted(why=str(error))))
                continue
            accepted[id(source)] = kind
        usages.append(LocatedUsage(record=record, source=source, digest=content_digest(record)))
    turns = in_turns(usages)
    counted: list[tuple[RawRecord, Recounted]] = []
    for turn in turns.turns:
        for usage, one in await _count(connection, ledger, turn):
            counted.append((usage.source, one))
            copies = turns.copies.get((usage.record.request_id, usage.digest), [])
            counted += [(copy, Recounted(why=one.why)) for copy in copies]
    found += [(s, Recounted(new=r.new, why=r.why, accepted=accepted.get(id(s)))) for s, r in counted]
    return found


class _SomeWereNew(Exception):
    """Which ones is asked of each half."""


async def _count(
    connection: Connection, ledger: LedgerTransaction, usages: Sequence[LocatedUsage]
) -> list[tuple[LocatedUsage, Recounted]]:
    """Count records of different requests; when they do not share one fate, each half by itself."""
    try:
        async with connection.transaction():
            counted = await ledger.count(usages)
            if counted.new not in (0, len(usages)):
                raise _SomeWereNew
    except _SomeWereNew:
        pass
    except Exception as error:
        if not is_data_error(error):
            raise
        if len(usages) == 1:
            return [(usages[0], Recounted(why=f"{type(error).__name__}: {error}"))]
    else:
        contradicting = {u.record.request_id for u in counted.contradicting}
        new = counted.new > 0
        return [
            (u, Recounted(why=_contradiction(u)) if u.record.request_id in contradicting else Recounted(new=new))
            for u in usages
        ]
    middle = len(usages) // 2
    left = await _count(connection, ledger, usages[:middle])
    return left + await _count(connection, ledger, usages[middle:])


def _contradiction(usage: LocatedUsage) -> str:
    return f"{contradiction(usage.record.request_id)}; what is billed is corrected by  inferlog billing adjust"
