"""What tells a reader which schema bytes were written with: the frame before them, and a schema's fingerprint.

Everything that frames a value, takes one apart or compares fingerprints asks here.
"""

from __future__ import annotations

import struct
from typing import Any

import fastavro
from fastavro.schema import fingerprint as _fingerprint
from fastavro.schema import to_parsing_canonical_form

#: The first byte of every value, in Confluent's framing.
MAGIC = 0
#: That byte and the schema's id, big-endian; the Avro body follows.
HEADER = struct.Struct(">bI")
HEADER_BYTES = HEADER.size


class NoSchema(ValueError):
    """JSON that Avro's libraries, or we, do not take for a schema; the message says why."""


class Unreadable(bytes):
    """What stands for a value that cannot be had from the log: the reason, in words, framed as no record is."""

    __slots__ = ()

    @property
    def reason(self) -> str:
        """Why it cannot be had."""
        return self.decode()


def header(schema_id: int) -> bytes:
    """The HEADER_BYTES before the body of a record that is written with this schema."""
    return HEADER.pack(MAGIC, schema_id)


def parsed(definition: Any) -> Any:
    """A schema as fastavro writes and reads with it. Raises NoSchema."""
    try:
        return fastavro.parse_schema(definition, named_schemas={})
    except Exception as error:
        # It may be a stranger's; whatever the library says of it, it is the schema that is at fault.
        raise NoSchema(f"{type(error).__name__}: {error}") from error


def without_conversions(definition: Any) -> Any:
    """The same schema with UUIDs as text and moments as microseconds: the same bytes, and nothing made of them yet."""
    if isinstance(definition, list):
        return [without_conversions(part) for part in definition]
    if not isinstance(definition, dict):
        return definition
    nested = ("type", "items", "values", "fields")
    left = {name: without_conversions(part) if name in nested else part for name, part in definition.items()}
    if (left.get("type"), left.get("logicalType")) in (("string", "uuid"), ("long", "timestamp-micros")):
        del left["logicalType"]
    return left


def fingerprint(definition: Any) -> str:
    """CRC-64-AVRO of the parsing canonical form, as fastavro computes it (hex, little-endian). Raises NoSchema."""
    schema = parsed(definition)
    try:
        return _fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")
    except Exception as error:
        raise NoSchema(f"{type(error).__name__}: {error}") from error
