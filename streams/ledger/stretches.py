"""How far a reader has come, without a hole: a stretch begins where its reader stood and ends past its last record.

Offsets alone cannot tell a skipped record from a transaction's marker or one that was compacted away. A position can:
whoever reads in order stands at the end of what it read, and the next record follows that position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from schemas.codec import Placed


class Skipped(RuntimeError):
    """Records between two positions were not read; the message says where. Nothing of the batch may be kept."""


class Located(Placed, Protocol):
    """A record as read by somebody who knows where it stood, at most at the record's offset."""

    @property
    def follows(self) -> int:
        """No record lies between this position and the offset."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Stretch:
    """Everything of a partition from `begin` to below `end` was read, whatever lies in between."""

    topic: str
    partition: int
    begin: int
    end: int


def stretches(records: Iterable[Located]) -> list[Stretch]:
    """The stretch of each partition, sorted by topic and partition, of records in the order in which they were read.

    A reader may go back and read again; it may not go forward past what it did not read. Raises Skipped.
    """
    reach: dict[tuple[str, int], list[int]] = {}
    for r in records:
        place = (r.topic, r.partition)
        known = reach.get(place)
        if known is None:
            reach[place] = [r.follows, r.offset + 1]
        elif r.follows > known[1]:
            raise Skipped(
                f"{r.topic} partition {r.partition}: read up to {known[1]}, then offset {r.offset}, whose reader stood "
                f"at {r.follows}"
            )
        else:
            # The begin stays the first one, also when the reader went back: what lies between was read by nobody here.
            known[1] = max(known[1], r.offset + 1)
    return [Stretch(topic=t, partition=p, begin=begin, end=end) for (t, p), (begin, end) in sorted(reach.items())]


def following(records: Sequence[Any], stood: int) -> list[tuple[int, Any]]:
    """Each record of one partition's fetch with the position that it follows; `stood` is that of the first."""
    told = []
    for record in records:
        told.append((stood, record))
        stood = record.offset + 1
    return told
