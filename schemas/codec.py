"""Records to bytes and back: Confluent framing (a zero byte, a 4-byte big-endian schema id) around an Avro body.

Schemas are compiled once at import. Decoding resolves the writer's schema, found by its id, to the newest one known
here, so bytes of older and newer writers both become today's records.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import fields
from io import BytesIO
from typing import Any, TypeVar, cast

import fastavro
from fastavro.schema import fingerprint as _fingerprint
from fastavro.schema import to_parsing_canonical_form

from schemas.lockfile import LockedSchema, LockfileError, latest, locked_schemas
from schemas.records import (
    BucketCharge,
    DeadLetter,
    InferenceFinished,
    InferenceRequested,
    Outcome,
    Record,
    Task,
    UsageRecorded,
)
from schemas.tensors import Tensor

R = TypeVar("R", InferenceRequested, InferenceFinished, UsageRecorded, DeadLetter)

_MAGIC = b"\x00"
_HEADER = struct.Struct(">bI")


class EncodeError(ValueError):
    """A record that its schema cannot carry; the message names the record and, where known, the field."""


class DecodeError(ValueError):
    """Bytes that are not a record of the expected kind; the message says what was found instead."""


def fingerprint(definition: dict[str, Any]) -> str:
    """CRC-64-AVRO of the parsing canonical form, as fastavro computes it (hex, little-endian)."""
    parsed = fastavro.parse_schema(definition, named_schemas={}, _write_hint=False)
    return _fingerprint(to_parsing_canonical_form(parsed), "CRC-64-AVRO")


class _Compiled:
    """One published schema, checked against the lock file and ready to use."""

    def __init__(self, locked: LockedSchema) -> None:
        definition = locked.definition()
        found = fingerprint(definition)
        if found != locked.fingerprint:
            raise LockfileError(
                f"schemas/avro/{locked.file}: its fingerprint is {found}, but id {locked.id} was published with "
                f"{locked.fingerprint}; a published schema never changes, add a new version instead"
            )
        self.id = locked.id
        self.record = locked.record
        self.schema = fastavro.parse_schema(definition, named_schemas={})
        self.header = _HEADER.pack(0, locked.id)


_by_id = {s.id: _Compiled(s) for s in locked_schemas()}
_TYPES: tuple[type[Record], ...] = (InferenceRequested, InferenceFinished, UsageRecorded, DeadLetter)
_newest = {cls: _by_id[latest(cls.SCHEMA).id] for cls in _TYPES}


def encode(record: Record) -> bytes:
    """The framed Avro bytes of a record. Raises EncodeError when a value does not fit its schema."""
    compiled = _newest[type(record)]
    out = BytesIO()
    out.write(compiled.header)
    try:
        fastavro.schemaless_writer(out, compiled.schema, _TO_DATUM[type(record)](record))
    except (TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
        raise EncodeError(f"{type(record).__name__}: {error}") from error
    return out.getvalue()


def decode(value: bytes | None, expected: type[R]) -> R:
    """The record in these framed bytes, which must be of type `expected`.

    Raises DecodeError for anything else: no value, another framing, an unknown schema id, another record, a broken
    body or bytes after it. Nothing half-built is ever returned.
    """
    if value is None:
        raise DecodeError(f"expected {expected.__name__}, found a record without a value")
    if len(value) < _HEADER.size or value[:1] != _MAGIC:
        raise DecodeError(
            f"expected {expected.__name__} framed by 0x00 and a schema id, found {value[:5].hex() or 'nothing'}"
        )
    schema_id = _HEADER.unpack_from(value)[1]
    writer = _by_id.get(schema_id)
    if writer is None:
        raise DecodeError(f"schema id {schema_id} is unknown here")
    if writer.record != expected.SCHEMA:
        raise DecodeError(f"expected {expected.SCHEMA}, found {writer.record} (schema id {schema_id})")
    reader = _newest[expected]
    body = BytesIO(value)
    body.seek(_HEADER.size)
    try:
        datum: Any = fastavro.schemaless_reader(body, writer.schema, None if reader is writer else reader.schema)
        rest = len(value) - body.tell()
        if rest:
            raise DecodeError(f"{expected.__name__}: {rest} bytes follow the record")
        return cast(R, _FROM_DATUM[expected](datum))
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(f"{expected.__name__}: {type(error).__name__}: {error}") from error


def _flat(cls: type[Record]) -> Callable[[Any], dict[str, Any]]:
    names = tuple(f.name for f in fields(cls))
    return lambda record: {name: getattr(record, name) for name in names}


def _tensor_datum(t: Tensor) -> dict[str, Any]:
    return {"name": t.name, "datatype": t.datatype, "shape": t.shape, "data": t.data}


def _tensor(d: dict[str, Any]) -> Tensor:
    return Tensor(name=d["name"], datatype=d["datatype"], shape=tuple(d["shape"]), data=d["data"])


_requested_fields = _flat(InferenceRequested)
_finished_fields = _flat(InferenceFinished)


def _requested_datum(r: InferenceRequested) -> dict[str, Any]:
    datum = _requested_fields(r)
    datum["task"] = r.task.value
    datum["inputs"] = [_tensor_datum(t) for t in r.inputs]
    datum["limiter_buckets"] = [
        {
            "bucket": b.bucket,
            "interval_us": b.interval_us,
            "burst": b.burst,
            "cost": b.cost,
            "remaining": b.remaining,
        }
        for b in r.limiter_buckets
    ]
    return datum


def _requested(d: dict[str, Any]) -> InferenceRequested:
    d["task"] = Task(d["task"])
    d["inputs"] = tuple(_tensor(t) for t in d["inputs"])
    d["limiter_buckets"] = tuple(BucketCharge(**b) for b in d["limiter_buckets"])
    return InferenceRequested(**d)


def _finished_datum(r: InferenceFinished) -> dict[str, Any]:
    datum = _finished_fields(r)
    datum["outcome"] = r.outcome.value
    datum["outputs"] = [_tensor_datum(t) for t in r.outputs]
    return datum


def _finished(d: dict[str, Any]) -> InferenceFinished:
    d["outcome"] = Outcome(d["outcome"])
    d["outputs"] = tuple(_tensor(t) for t in d["outputs"])
    return InferenceFinished(**d)


_TO_DATUM: dict[type[Record], Callable[[Any], dict[str, Any]]] = {
    InferenceRequested: _requested_datum,
    InferenceFinished: _finished_datum,
    UsageRecorded: _flat(UsageRecorded),
    DeadLetter: _flat(DeadLetter),
}
_FROM_DATUM: dict[type[Record], Callable[[dict[str, Any]], Record]] = {
    InferenceRequested: _requested,
    InferenceFinished: _finished,
    UsageRecorded: lambda d: UsageRecorded(**d),
    DeadLetter: lambda d: DeadLetter(**d),
}
