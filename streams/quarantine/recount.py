"""Records that were set aside, judged by today's code and counted by the ledger's own statements.

Within somebody else's transaction: whatever is refused leaves nothing behind in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from schemas.codec import DecodeError, decode_at
from schemas.records import UsageRecorded
from streams.ledger.dead_letters import Kind, contradiction, kind_of
from streams.ledger.projections import LocatedUsage, UnfitRecord, check_fit, content_digest, in_turns
from streams.ledger.raw import RawRecord
from streams.ledger.transaction import LedgerTransaction

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
        for usage, one in await _count(ledger, turn):
            counted.append((usage.source, one))
            copies = turns.copies.get((usage.record.request_id, usage.digest), [])
            counted += [(copy, Recounted(why=one.why)) for copy in copies]
    found += [(s, Recounted(new=r.new, why=r.why, accepted=accepted.get(id(s)))) for s, r in counted]
    return found


async def _count(ledger: LedgerTransaction, usages: Sequence[LocatedUsage]) -> list[tuple[LocatedUsage, Recounted]]:
    """Count records of different requests."""
    counted = await ledger.count(usages)
    refused = {u.record.request_id: why for u, why in counted.refused}
    refused |= {u.record.request_id: _contradiction(u) for u in counted.contradicting}
    new = {u.record.request_id for u in counted.fresh}
    return [(u, Recounted(new=u.record.request_id in new, why=refused.get(u.record.request_id))) for u in usages]


def _contradiction(usage: LocatedUsage) -> str:
    return f"{contradiction(usage.record.request_id)}; what is billed is corrected by  inferlog billing adjust"
