"""When one record is bad, and when all are: what is set aside with its evidence, and what stops the stream instead.

Pure. What a letter keeps of a record is decided in `schemas.evidence`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Final
from uuid import UUID

from schemas.records import DeadLetter

#: A batch of at least this many records without a single good one is no accident of its records.
SYSTEMIC_RECORDS = 100
#: Evidence in one statement; a batch of large records would pass what Postgres takes in one message (1 GiB).
SLICE_BYTES = 16 * 1024 * 1024


class Kind(str, Enum):
    """Why a record was set aside, in one word that commands and alarms can rely on."""

    UNKNOWN_SCHEMA = "unknown_schema"
    UNDECODABLE = "undecodable"
    UNFIT = "unfit"
    CONTRADICTING = "contradicting"
    HORIZON = "horizon"
    FUTURE = "future"


#: The first pattern that a reason begins with names its kind. Letters are kept for more than a year: a reason that was
#: once written keeps its pattern. Understood alike by Python and by Postgres (`reason ~ pattern`).
KIND_PATTERNS: Final = (
    (Kind.UNKNOWN_SCHEMA, r"^schema id [0-9]+ is unknown"),
    (Kind.CONTRADICTING, r"^request [0-9a-f-]+: differs from"),
    (Kind.FUTURE, r"^occurred_at: .*future"),
    (Kind.HORIZON, r"^(occurred_at|request_id): .*horizon"),
    (Kind.UNFIT, r"^[a-z_]+: "),  # the field is named first
    (Kind.UNFIT, r"^[A-Za-z]+Error: "),  # Postgres refused a value of it
    (Kind.UNDECODABLE, r""),
)


def contradiction(request_id: UUID) -> str:
    """The reason of a letter whose record says something else of a request than the one that was counted for it."""
    return f"request {request_id}: differs from the usage record that was counted for it"


def kind_of(reason: str) -> Kind:
    """The kind of a letter with this reason."""
    return next(kind for kind, pattern in KIND_PATTERNS if re.match(pattern, reason))


class AllRecordsBad(RuntimeError):
    """Every record of a large batch was refused: the fault is ours (an unknown schema, a changed table), not theirs."""


def refuse_if_systemic(dead: Sequence[DeadLetter], *, total: int) -> None:
    """Raise AllRecordsBad when a batch of `total` records is large and nothing in it was good.

    Setting aside a whole topic one record at a time would look like progress; stopping unacknowledged loses nothing.
    """
    if total >= SYSTEMIC_RECORDS and len(dead) >= total:
        first = dead[0]
        raise AllRecordsBad(
            f"all {total} records of a batch were refused, nothing was acknowledged; first: {first.topic} "
            f"partition {first.partition} offset {first.offset}: {first.reason} (look at it:  inferlog "
            f"dead-letters show {first.topic}/{first.partition}/{first.offset}). If they are bad and the ledger is "
            "not, start it with INFERLOG_LEDGER_SET_ASIDE_ALL=1: they are then dead letters, which can be redriven"
        )


def in_slices(letters: Sequence[DeadLetter], *, max_bytes: int = SLICE_BYTES) -> Iterator[list[DeadLetter]]:
    """These letters in the same order, in lists with at most `max_bytes` of evidence each, or one letter."""
    part: list[DeadLetter] = []
    size_bytes = 0
    for letter in letters:
        own_bytes = len(letter.key or b"") + len(letter.value or b"")
        if part and size_bytes + own_bytes > max_bytes:
            yield part
            part, size_bytes = [], 0
        part.append(letter)
        size_bytes += own_bytes
    if part:
        yield part
