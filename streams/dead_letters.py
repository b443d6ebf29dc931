"""When one record is bad, and when all are: what is set aside with its evidence, and what stops the stream instead.

Pure. A dead letter keeps the bytes as read, so that it can be judged and handled again later.
"""

from __future__ import annotations

from dataclasses import dataclass

REASON_MAX_CHARS = 1000
#: A batch of at least this many records without a single good one is no accident of its records.
SYSTEMIC_RECORDS = 100


class AllRecordsBad(RuntimeError):
    """Every record of a large batch was refused: the fault is ours (an unknown schema, a changed table), not theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRecord:
    """A record as read from the log, with its place."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterRow:
    """One row of `dead_letters`: the record as read, and why it was not counted."""

    source: RawRecord
    reason: str


def set_aside(source: RawRecord, reason: str) -> DeadLetterRow:
    """The dead letter for a record; the reason is cut to a length and to characters that Postgres takes."""
    text = reason.replace("\x00", "\\0").encode("utf-8", "backslashreplace").decode("utf-8")
    return DeadLetterRow(source=source, reason=text[:REASON_MAX_CHARS])


def refuse_if_systemic(dead: list[DeadLetterRow], *, total: int) -> None:
    """Raise AllRecordsBad when a batch of `total` records is large and nothing in it was good.

    Setting aside a whole topic one record at a time would look like progress; stopping unacknowledged loses nothing.
    """
    if total >= SYSTEMIC_RECORDS and len(dead) >= total:
        first = dead[0]
        raise AllRecordsBad(
            f"all {total} records of a batch were refused, nothing was acknowledged; first: {first.source.topic} "
            f"partition {first.source.partition} offset {first.source.offset}: {first.reason}"
        )
