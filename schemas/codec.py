"""Records to bytes and back: Confluent framing (a zero byte, a 4-byte big-endian schema id) around an Avro body.

Schemas are compiled once. Decoding resolves the writer's schema, found by its id, to the one this reader knows as
newest, so bytes of older and newer writers both become today's records.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import fastavro

from schemas import frame
from schemas.announcement import announced, digest_of
from schemas.datum import BadValue, Shape
from schemas.facts import RECORD_TYPES, Record, SchemaPublished
from schemas.lockfile import LockedSchema, LockfileError, locked_schemas, text_digest, versions_of
from schemas.ranges import MOMENTS

R = TypeVar("R", bound=Record)

#: The most schemas of newer writers that a process takes, so that nobody can fill it with them.
MAX_LEARNT = 256

_HEADER_BYTES = frame.HEADER_BYTES
_unpack = frame.HEADER.unpack_from


class EncodeError(ValueError):
    """A record that its schema cannot carry; the message names the record, the field and what was expected."""


class DecodeError(ValueError):
    """Bytes that are not a record of the expected kind: `reason` says what was found instead.

    `topic`, `partition` and `offset` are the record's place on the log, None where it was not read from there.
    """

    def __init__(
        self, reason: str, *, topic: str | None = None, partition: int | None = None, offset: int | None = None
    ) -> None:
        super().__init__(reason if topic is None else f"{topic} partition {partition} offset {offset}: {reason}")
        self.reason = reason
        self.topic = topic
        self.partition = partition
        self.offset = offset


class UnknownSchema(DecodeError):
    """The frame names a schema id that this reader has not learnt; it may be a newer writer's."""


class Placed(Protocol):
    """A record as read from the log."""

    @property
    def topic(self) -> str:
        """Topic it was read from."""

    @property
    def partition(self) -> int:
        """Partition it was read from."""

    @property
    def offset(self) -> int:
        """Offset it has."""

    @property
    def value(self) -> bytes | None:
        """Its bytes; None when it has no value."""


class _Meaning(NamedTuple):
    """What an id stands for; `digest` is that of the schema's text."""

    record: str
    subject: str
    version: int
    fingerprint: str
    digest: str


class _Compiled:
    """One schema, ready to use."""

    __slots__ = ("bare", "fingerprint", "header", "id", "meaning", "record", "schema")

    def __init__(self, schema_id: int, record: str, definition: dict[str, Any], meaning: _Meaning) -> None:
        self.id = schema_id
        self.record = record
        self.fingerprint = frame.fingerprint(definition)
        self.schema = frame.parsed(definition)
        self.bare = frame.parsed(frame.without_conversions(definition))
        self.header = frame.header(schema_id)
        self.meaning = meaning


def _compile(locked: LockedSchema) -> _Compiled:
    """A published schema. Raises LockfileError when its file is not what was published."""
    definition = locked.definition()
    digest = text_digest(definition)
    meaning = _Meaning(locked.record, locked.subject, locked.version, locked.fingerprint, digest)
    compiled = _Compiled(locked.id, locked.record, definition, meaning)
    if (compiled.fingerprint, digest) != (locked.fingerprint, locked.sha256):
        raise LockfileError(
            f"schemas/avro/{locked.file} is not what was published as id {locked.id}; a published schema never "
            "changes: restore the file and add a new version (inferlog schemas add)"
        )
    return compiled


class Codec:
    """Encodes and decodes records by these schemas.

    `pinned` makes a reader and writer of the past: full name of a record to the version it knows as newest.
    """

    def __init__(self, schemas: Iterable[LockedSchema], *, pinned: Mapping[str, int] | None = None) -> None:
        self._locked = known = tuple(schemas)
        self._by_id = {s.id: _compile(s) for s in known}
        self._newest: dict[type, tuple[_Compiled, Shape[Any]]] = {}
        for cls in RECORD_TYPES:
            found = versions_of(cls.SCHEMA, known)
            if pinned and cls.SCHEMA in pinned:
                found = [s for s in found if s.version <= pinned[cls.SCHEMA]]
            if found:
                self._newest[cls] = (self._by_id[found[-1].id], Shape(cls))

    def encode(self, record: Record) -> bytes:
        """The framed Avro bytes of a record. Raises EncodeError, naming the field, when a value does not fit."""
        try:
            compiled, shape = self._newest[type(record)]
        except KeyError:
            raise EncodeError(f"{type(record).__name__} is no record of the log") from None
        out = BytesIO()
        out.write(compiled.header)
        try:
            fastavro.schemaless_writer(out, compiled.schema, shape.datum(record))
        except (TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
            raise _refusal(record, shape, error) from error
        return out.getvalue()

    def decode(self, value: bytes | None, expected: type[R]) -> R:
        """The record in these framed bytes, which must be of type `expected`.

        Raises DecodeError for anything else: no value, another framing, another record, a broken body, bytes after it
        or a value out of its field's range; UnknownSchema for an id that was never learnt. Nothing half-built is ever
        returned, and what is returned can be encoded again, but for symbols that are unknown here.
        """
        if value is None:
            raise DecodeError(f"expected {expected.__name__}, found a record without a value")
        if len(value) < _HEADER_BYTES or value[0] != frame.MAGIC:
            if isinstance(value, frame.Unreadable):
                raise DecodeError(value.reason)
            raise DecodeError(
                f"expected {expected.__name__} framed by 0x00 and a schema id, found {value[:5].hex() or 'nothing'}"
            )
        schema_id = _unpack(value)[1]
        writer = self._by_id.get(schema_id)
        if writer is None:
            raise UnknownSchema(f"schema id {schema_id} is unknown here")
        if writer.record != expected.SCHEMA:
            raise DecodeError(f"expected {expected.SCHEMA}, found {writer.record} (schema id {schema_id})")
        reader, shape = self._newest[expected]
        body = BytesIO(value)
        body.seek(_HEADER_BYTES)
        try:
            datum: Any = fastavro.schemaless_reader(body, writer.schema, None if reader is writer else reader.schema)
            rest = len(value) - body.tell()
            if not rest:
                return cast("R", shape.record(datum))
        except BadValue as error:
            raise DecodeError(f"{expected.__name__}.{error}") from error
        except OverflowError as error:
            # Python's calendar ends with the year 9999, and what fastavro raises then does not name the field.
            raise DecodeError(
                f"{expected.__name__}.{' or '.join(shape.moments)}: expected {MOMENTS.words}, found a time that no "
                f"calendar of ours has ({error})"
            ) from error
        except Exception as error:
            raise DecodeError(f"{expected.__name__}: {type(error).__name__}: {error}") from error
        raise DecodeError(f"{expected.__name__}: {rest} bytes follow the record")

    def bare(self, value: bytes | None, expected: type[Record]) -> dict[str, Any] | None:
        """The fields of a record of the newest schema as they lie on the log, for a reader that checks them itself.

        UUIDs are any text, moments any count of microseconds since 1970. None for everything that takes more than
        reading, or is no such record: `decode` then does it, or says what is wrong.
        """
        compiled, _ = self._newest[expected]
        if value is None or not value.startswith(compiled.header):
            return None
        body = BytesIO(value)
        body.seek(_HEADER_BYTES)
        try:
            datum = cast("dict[str, Any]", fastavro.schemaless_reader(body, compiled.bare, None))
        except Exception:  # noqa: BLE001 (whatever it is, decoding meets it again and names it)
            return None
        return datum if body.tell() == len(value) else None

    def decode_at(self, record: Placed, expected: type[R]) -> R:
        """The same for a record read from the log; the error then names its place."""
        try:
            return self.decode(record.value, expected)
        except DecodeError as error:
            raise type(error)(
                error.reason, topic=record.topic, partition=record.partition, offset=record.offset
            ) from error.__cause__

    def fingerprint_of(self, kind: type[Record]) -> str:
        """Fingerprint of the schema that records of this type are written with."""
        return self._newest[kind][0].fingerprint

    def learn(self, published: SchemaPublished) -> bool:
        """Take a schema that a newer writer uses; False when its id was known.

        Raises LockfileError when the id is known as something else, when no release of this program can have published
        the schema (`announcement`), and when MAX_LEARNT are learnt already.
        """
        known = self._by_id.get(published.schema_id)
        if known is not None:
            _require_meaning(published, known.meaning)
            return False
        if len(self._by_id) >= len(self._locked) + MAX_LEARNT:
            raise LockfileError(
                f"schema id {published.schema_id} on the log is not taken: {MAX_LEARNT} that are not in the lock file "
                "are learnt already; see who writes to the schemas topic, and restart with a newer release"
            )
        found = announced(published, self._locked)
        meaning = _Meaning(published.record, published.subject, published.version, published.fingerprint, found.digest)
        self._by_id[published.schema_id] = _Compiled(published.schema_id, published.record, found.definition, meaning)
        return True


def _require_meaning(published: SchemaPublished, known: _Meaning) -> None:
    said = _Meaning(published.record, published.subject, published.version, published.fingerprint, digest_of(published))
    if said == known:
        return
    here, there = (f"{m.record} version {m.version} on {m.subject} ({m.fingerprint})"[:300] for m in (known, said))
    text = ", with another text" if here == there else ""
    raise LockfileError(
        f"schema id {published.schema_id} is {here} here and {there} on the log{text}; an id never changes its meaning"
    )


def _refusal(record: Record, shape: Shape[Any], error: Exception) -> EncodeError:
    name = type(record).__name__
    try:
        shape.explain(record)
    except ValueError as found:
        return EncodeError(f"{name}.{found}")
    return EncodeError(f"{name}.{error}")


_codec = Codec(locked_schemas())
encode = _codec.encode
decode = _codec.decode
decode_at = _codec.decode_at
bare = _codec.bare
fingerprint_of = _codec.fingerprint_of
learn = _codec.learn
