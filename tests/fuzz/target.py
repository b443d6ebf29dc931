"""What is fuzzed: any bytes are a record or a DecodeError, and a record comes back equal when it is written again."""

from __future__ import annotations

from pathlib import Path

from schemas import codec
from schemas.facts import RECORD_TYPES

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
    try:
        again = codec.encode(record)
    except codec.EncodeError:
        return  # a careless writer's values, which ours would not write
    if codec.decode(again, expected) != record:
        raise AssertionError(f"{record} came back as something else")
