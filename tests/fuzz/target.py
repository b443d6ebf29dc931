"""What is fuzzed: any bytes are a record or a DecodeError, and a record comes back equal when it is written again."""

from __future__ import annotations

from dataclasses import fields, replace
from enum import Enum
from pathlib import Path

from schemas import codec
from schemas.facts import RECORD_TYPES, Record

CORPUS = Path(__file__).parent / "corpus"


def check(data: bytes) -> None:
    """The first byte picks the record that is expected, the rest is its framed bytes. Raises for a broken promise."""
    if not data:
        return
    expected, value = RECORD_TYPES[data[0] % len(RECORD_TYPES)], data[1:]
    try:
        record = codec.decode(value, expected)
    except codec.DecodeError:
        return
    record = _writable(record)
    if codec.decode(codec.encode(record), expected) != record:
        raise AssertionError(f"{record} came back as something else")


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
