"""What is fuzzed: any bytes are a record or a DecodeError, and a record comes back equal when it is written again.

Bytes framed by the id LEARNT bring their schema with them, as the schemas topic would: two bytes of length, its text.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path

from schemas import codec
from schemas.facts import RECORD_TYPES, Record, SchemaPublished
from schemas.frame import NoSchema, fingerprint, header
from schemas.ids import schema_id_event
from schemas.lockfile import LockfileError, latest, locked_schemas

#: An id that no schema of ours has.
LEARNT = 2**31 - 1
_LEARNER = codec.Codec(locked_schemas())

CORPUS = Path(__file__).parent / "corpus"


def check(data: bytes) -> None:
    """The first byte picks the record that is expected, the rest is its framed bytes. Raises for a broken promise."""
    if not data:
        return
    expected, value = RECORD_TYPES[data[0] % len(RECORD_TYPES)], data[1:]
    try:
        record = _taught(value, expected) if value[:5] == header(LEARNT) else codec.decode(value, expected)
    except (codec.DecodeError, LockfileError):
        return
    record = _writable(record)
    if codec.decode(codec.encode(record), expected) != record:
        raise AssertionError(f"{record} came back as something else")


def _taught(value: bytes, expected: type[Record]) -> Record:
    """The record in bytes that bring their schema. Raises DecodeError, LockfileError for a schema that is refused."""
    size = int.from_bytes(value[5:7], "big")
    text = value[7 : 7 + size].decode("utf-8", "replace")
    try:
        looks = fingerprint(json.loads(text))
    except (NoSchema, ValueError, RecursionError):
        looks = "0" * 16
    published = SchemaPublished(
        event_id=schema_id_event(LEARNT),
        occurred_at=datetime(2026, 3, 1, tzinfo=timezone.utc),
        schema_id=LEARNT,
        subject=latest(expected.SCHEMA).subject,
        version=99,
        record=expected.SCHEMA,
        fingerprint=looks,
        definition=text,
    )
    _LEARNER.learn(published)
    try:
        return _LEARNER.decode(value[:5] + value[7 + size :], expected)
    finally:
        del _LEARNER._by_id[LEARNT]  # what one input taught is no part of the next


def _writable(record: Record) -> Record:
    """The record with known symbols in place of those that only a newer program could write again."""
    known = {}
    for field in fields(record):
        found = getattr(record, field.name)
        if isinstance(found, Enum) and found.value == "UNKNOWN":
            known[field.name] = list(type(found))[-1]
    if not known:
        return record
    try:
        codec.encode(record)
    except codec.EncodeError:
        return replace(record, **known)
    raise AssertionError(f"{record} was written although a symbol of it is unknown")
