"""A batch as read from the log, decoded: what may be counted, what is set aside, and how far it reaches.

Decides and does no I/O; a large batch is decoded in steps, so that what else the process does goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from schemas.codec import DecodeError, UnknownSchema, decode_at
from schemas.evidence import dead_letter
from schemas.records import DeadLetter, UsageRecorded
from streams.ledger.dedup import Extent
from streams.ledger.projections import LocatedUsage, Turns, UnfitRecord, check_fit, content_digest, in_turns
from streams.ledger.raw import RawRecord
from streams.ledger.reading import read_usage
from streams.ledger.stretches import Stretch, stretches

#: Decoded at a time, which takes some milliseconds.
STEP_RECORDS = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedBatch:
    """A batch after decoding: what may be counted, what is set aside, and how far it reaches.

    `located` are the records of `usages` in the order in which they were read, `extent` what their times and ids span.
    `unlearnt` says that some are set aside because their schema's id is unknown to this process. `total` counts all.
    `began_s` is when work on it began, by the clock of whoever holds it.
    """

    began_s: float
    total: int
    usages: Turns
    located: list[LocatedUsage]
    extent: Extent | None
    dead: list[DeadLetter]
    stretches: list[Stretch]
    unlearnt: bool


class Sorting:
    """A batch while it is decoded, as many records at a time as the caller likes."""

    def __init__(self, *, now: datetime) -> None:
        self._now = now
        self._usages: list[LocatedUsage] = []
        self._dead: list[DeadLetter] = []
        self._unlearnt = False

    def take(self, records: Sequence[RawRecord]) -> None:
        """Decode each record; undecodable and unfit ones become dead letters of this moment."""
        usages, dead, now = self._usages, self._dead, self._now
        for source in records:
            usage = read_usage(source)
            if usage is not None:
                usages.append(usage)
                continue
            try:
                record = decode_at(source, UsageRecorded)
                check_fit(record)
            except DecodeError as error:
                self._unlearnt = self._unlearnt or isinstance(error, UnknownSchema)
                dead.append(dead_letter(source, error.reason, occurred_at=now))
            except UnfitRecord as error:
                dead.append(dead_letter(source, str(error), occurred_at=now))
            else:
                usages.append(LocatedUsage(record=record, source=source, digest=content_digest(record)))

    def batch(self, records: Sequence[RawRecord], *, began_s: float) -> SortedBatch:
        """All that was taken, in the order in which it was. Raises Skipped."""
        return SortedBatch(
            began_s=began_s,
            total=len(records),
            usages=in_turns(self._usages),
            located=self._usages,
            extent=Extent.of(self._usages),
            dead=self._dead,
            stretches=stretches(records),
            unlearnt=self._unlearnt,
        )


async def sort_in_steps(records: Sequence[RawRecord], *, began_s: float) -> SortedBatch:
    """Sort in steps: what else this process does, such as writing the batch before, goes on between. Raises Skipped."""
    sorting = Sorting(now=datetime.now(timezone.utc))
    for at in range(0, len(records), STEP_RECORDS):
        sorting.take(records[at : at + STEP_RECORDS])
        await asyncio.sleep(0)
    return sorting.batch(records, began_s=began_s)
