"""What is kept of a record that could not be handled, whoever set it aside: two writers make the same letter of it.

Pure. Bytes are kept as read, up to a bound that every topic and table takes; past it size and digest say what they
were, and topic, partition and offset where they are.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import datetime
from typing import Protocol

from schemas.codec import Placed
from schemas.frame import Unreadable
from schemas.ids import dead_letter_id
from schemas.records import DeadLetter

#: A value up to this long is kept in its letter; a letter is then far below what a topic takes (8 MiB).
VALUE_MAX_BYTES = 1024 * 1024
#: The same for a key.
KEY_MAX_BYTES = 64 * 1024
REASON_MAX_CHARS = 1000


class KeyedRecord(Placed, Protocol):
    """A record as read from the log, with its key."""

    @property
    def key(self) -> bytes | None:
        """Its key; None when it has none."""


def dead_letter(record: KeyedRecord, reason: str, *, occurred_at: datetime) -> DeadLetter:
    """The letter for a record, set aside at `occurred_at` (aware).

    The topic keeps the namespace it was read with, since that is where the record lies. The reason is cut to
    REASON_MAX_CHARS and to characters that Avro and Postgres take; it says of a key over KEY_MAX_BYTES what it was.
    """
    text = reason.replace("\x00", "\\0").encode("utf-8", "backslashreplace").decode("utf-8")[:REASON_MAX_CHARS]
    key, value = record.key, record.value
    if isinstance(value, Unreadable):
        value = None  # it is the reason once more, and nothing of the record
    if key is not None and len(key) > KEY_MAX_BYTES:
        text += f" (its key of {len(key)} bytes is left out, sha256 {_sha256(key)})"
        key = None
    letter = DeadLetter(
        event_id=dead_letter_id(record.topic, record.partition, record.offset),
        occurred_at=occurred_at,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        key=key,
        value=value,
        value_size_bytes=None if value is None else len(value),
        reason=text,
        attempts=1,
    )
    return letter if value is None or len(value) <= VALUE_MAX_BYTES else without_value(letter)


def without_value(letter: DeadLetter) -> DeadLetter:
    """The same letter with the digest of its value instead of the value."""
    return letter if letter.value is None else replace(letter, value=None, value_sha256=_sha256(letter.value))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
