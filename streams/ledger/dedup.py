"""Which usage records the ledger counts by itself: those of a time it can judge, and whose evidence it still has.

Pure. Whether a request was counted is known from its row in `processed_requests`; rows of requests from before the
horizon may have been let go of, and then a record of one cannot be told from a record that was counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from schemas.records import UsageRecorded
from streams.ledger.projections import LocatedUsage, UnfitRecord
from streams.ledger.stretches import Located, Stretch

#: Unless a setting says otherwise: how far ahead of the ledger's clock a record's time may lie.
AHEAD: Final = timedelta(seconds=300)
_TIMED_VERSION: Final = 7

#: Topic, partition and offset.
Place = tuple[str, int, int]


class Overtaken(RuntimeError):
    """Another writer moved a partition's position after this transaction looked at it; nothing of it may be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Between which times records are counted.

    Of requests from `counts_from` on, which is where `first_id` begins, all evidence is there; both are None while all
    of it is. `now` is the clock of the database, one for all ledgers.
    """

    counts_from: datetime | None
    first_id: UUID | None
    now: datetime

    def objection(self, record: UsageRecorded, ahead: timedelta) -> str | None:
        """Why a record's time keeps it from being counted; None when nothing does.

        A request is as old as its id says: by its time alone, a forged record would count a second time.
        """
        if self.counts_from is not None:
            too_old = (
                f"is older than the dedup horizon, {_iso(self.counts_from)}: whether it was counted before can no "
                "longer be told"
            )
            if record.occurred_at < self.counts_from:
                return f"occurred_at: {_iso(record.occurred_at)} {too_old}"
            if self.may_be_gone(record.request_id):
                return f"request_id: {record.request_id} {too_old}"
        if record.occurred_at > self.now + ahead:
            return (
                f"occurred_at: {_iso(record.occurred_at)} lies in the future: more than {ahead.total_seconds():g} s "
                f"past the ledger's clock, {_iso(self.now)}"
            )
        return None

    def may_be_gone(self, request_id: UUID) -> bool:
        """Whether the row of this request, if there ever was one, may have been let go of."""
        return (
            self.first_id is not None
            and request_id.int < self.first_id.int
            # An id without a time keeps its row for ever. The bits alone decide, as in `dedup_slice`.
            and (request_id.int >> 76) & 0xF == _TIMED_VERSION
        )

    def check(self, record: UsageRecorded, ahead: timedelta) -> None:
        """Raise UnfitRecord with the objection, if there is one."""
        found = self.objection(record, ahead)
        if found is not None:
            raise UnfitRecord(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The earliest and latest time of some records, and the least of their request ids as a number."""

    earliest: datetime
    latest: datetime
    least_id: int

    @classmethod
    def of(cls, usages: Sequence[LocatedUsage]) -> Extent | None:
        """Of these records; None when there are none."""
        if not usages:
            return None
        times = [u.record.occurred_at for u in usages]
        return cls(earliest=min(times), latest=max(times), least_id=min(u.record.request_id.int for u in usages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a transaction finds when it begins: the bounds, and the next offset of each partition that was ever read."""

    bounds: Bounds
    next_offsets: Mapping[tuple[str, int], int]

    def was_read(self, source: Located) -> bool:
        """Whether the record lies below the position: it was counted or set aside when that passed it."""
        return source.offset < self.next_offsets.get((source.topic, source.partition), 0)

    def is_plain(self, extent: Extent | None, stretches: Iterable[Stretch], ahead: timedelta) -> bool:
        """Whether a batch of this extent holds nothing that was read before and nothing of an odd time."""
        if any(s.begin < self.next_offsets.get((s.topic, s.partition), 0) for s in stretches):
            return False
        b = self.bounds
        return extent is None or (
            extent.latest <= b.now + ahead
            and (b.counts_from is None or extent.earliest >= b.counts_from)
            and (b.first_id is None or extent.least_id >= b.first_id.int)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sifted:
    """The records to count, in their order, and those to set aside, each with the reason."""

    fit: list[LocatedUsage]
    objections: list[tuple[LocatedUsage, str]]


def sift(usages: Iterable[LocatedUsage], opening: Opening, *, letters: Set[Place], ahead: timedelta) -> Sifted:
    """Take a batch apart by time; `letters` are the places among those that were read before which have a dead letter.

    A time is objected to once, when a record is read first: read again, it is in the sums by then, or has its letter.
    And a record that has a letter is the operator's: its time may have come since, but redriving is what counts it.
    """
    fit: list[LocatedUsage] = []
    objections: list[tuple[LocatedUsage, str]] = []
    for usage in usages:
        source = usage.source
        why = opening.bounds.objection(usage.record, ahead)
        if opening.was_read(source):
            if why is None and (source.topic, source.partition, source.offset) not in letters:
                fit.append(usage)
        elif why is None:
            fit.append(usage)
        else:
            objections.append((usage, why))
    return Sifted(fit=fit, objections=objections)


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
