"""Old bytes with today's reader, today's bytes with old readers, and a newer writer's bytes with today's reader."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator
from copy import deepcopy
from datetime import datetime, timezone
from enum import Enum
from io import BytesIO
from typing import Any

import fastavro
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schemas.codec import Codec, DecodeError, encode
from schemas.facts import RECORD_TYPES, SchemaPublished
from schemas.frame import fingerprint
from schemas.gate.evolution import Version, may_follow
from schemas.ids import schema_id_event
from schemas.lockfile import locked_schemas, versions_of
from tests.strategies import records, records_of

LOCKED = locked_schemas()
LOCKED_BY_ID = {s.id: s for s in LOCKED}
TODAY = Codec(LOCKED)
KINDS = {kind.SCHEMA: kind for kind in RECORD_TYPES}
PARSED = {s.id: fastavro.parse_schema(s.definition(), named_schemas={}) for s in LOCKED}
PAST = {s.id: Codec(LOCKED, pinned={s.record: s.version}) for s in LOCKED}
VERSIONS = [(KINDS[s.record], s.id) for s in LOCKED]
BEYOND = max(PARSED) + 1


def plain(value: Any, **more: Any) -> Any:
    """A record as Avro's writer takes it, with `more` fields in it and in every record inside."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name), **more) for f in dataclasses.fields(value)} | more
    return [plain(one, **more) for one in value] if isinstance(value, tuple) else value


def read(value: bytes, reader_id: int) -> Any:
    """The datum that a stranger sees who has the lock file, fastavro and a schema of his choice."""
    return fastavro.schemaless_reader(BytesIO(value[5:]), PARSED[int.from_bytes(value[1:5], "big")], PARSED[reader_id])


def defaults_in(definition: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a schema that have a default, with it."""
    if isinstance(definition, list):
        for part in definition:
            yield from defaults_in(part)
    elif isinstance(definition, dict):
        for field in definition.get("fields", ()):
            if "default" in field:
                yield field["name"], field["default"]
            yield from defaults_in(field["type"])
        yield from defaults_in(definition.get("items"))


DEFAULTS = {name: default for s in LOCKED for name, default in defaults_in(s.definition())}


def agrees(found: Any, written: Any) -> bool:
    """Whether all that a reader found is what was written; what was not is its default, and fields may be missing."""
    if isinstance(found, dict):
        return all(agrees(one, written.get(name, DEFAULTS.get(name))) for name, one in found.items())
    if isinstance(found, list):
        return len(found) == len(written) and all(map(agrees, found, written))
    return bool(found == written)


def symbols(definition: Any) -> set[str]:
    """All symbols of the enums in a schema."""
    return {symbol for enum in inside(definition, "enum") for symbol in enum["symbols"]}


def record_symbols(record: Any) -> set[str]:
    """The symbols that a record holds for enums that its first version has; what came later is read as its default."""
    first = {e["name"] for e in inside(versions_of(record.SCHEMA)[0].definition(), "enum")}
    values = (getattr(record, f.name) for f in dataclasses.fields(record))
    return {v.value for v in values if isinstance(v, Enum) and type(v).__name__ in first}


def inside_named(definition: Any, name: str) -> bool:
    return any(found["name"] == name for found in inside(definition, "record"))


def refers_to_a_blob(record: Any) -> bool:
    return any(t.blob for name in ("inputs", "outputs") for t in getattr(record, name, ()))


@pytest.mark.parametrize(("kind", "schema_id"), VERSIONS, ids=lambda x: getattr(x, "__name__", x))
def test_every_version_reads_what_every_other_writes(kind: Any, schema_id: int) -> None:
    versions = [s.id for s in versions_of(kind.SCHEMA)]

    @given(records_of(kind))
    def check(record: Any) -> None:
        assume(all(record_symbols(record) <= symbols(s.definition()) for s in versions_of(kind.SCHEMA)))
        old = PAST[schema_id]
        then, now = old.encode(record), encode(record)
        assert then[:5] == struct.pack(">bI", 0, schema_id)
        # An old version has no place for what came later; all the rest is there.
        kept = read(then, schema_id)
        assert agrees(kept, plain(record))
        for reader_id in versions:
            assert agrees(read(then, reader_id), kept)
            assert agrees(read(now, reader_id), plain(record))
        if not inside_named(LOCKED_BY_ID[schema_id].definition(), "Blob") and refers_to_a_blob(record):
            # Without the blob its tensor has no elements, and is refused rather than taken for an empty one.
            for codec, value in ((TODAY, then), (old, now)):
                with pytest.raises(DecodeError, match="tensor"):
                    codec.decode(value, kind)
            return
        for codec, value in ((TODAY, then), (old, now)):
            assert agrees(kept, plain(codec.decode(value, kind)))

    check()


def inside(definition: Any, kind: str) -> list[dict[str, Any]]:
    """The definitions of records, or of enums, in a schema."""
    if isinstance(definition, list):
        return [found for one in definition for found in inside(one, kind)]
    if not isinstance(definition, dict):
        return []
    deeper = [found for key in ("type", "fields", "items", "values") for found in inside(definition.get(key), kind)]
    return [definition, *deeper] if definition.get("type") == kind else deeper


def in_future(definition: dict[str, Any]) -> dict[str, Any]:
    """A next version with everything that a next version may bring, at every depth."""
    future = deepcopy(definition)
    for record in inside(future, "record"):
        record["fields"].insert(0, {"name": "later_note", "type": ["null", "string"], "default": None, "doc": "x"})
        record["fields"].append({"name": "later_count", "type": "long", "default": 7, "doc": "x"})
        tags = {"type": "array", "items": "string"}
        record["fields"].append({"name": "later_tags", "type": tags, "default": [], "doc": "x"})
    for enum in inside(future, "enum"):
        enum["symbols"].append("LATER")
    return future


def taught(definition: dict[str, Any], record: str) -> Codec:
    """Today's reader after it has read the record that announces a newer writer's schema."""
    codec = Codec(LOCKED)
    published = SchemaPublished(
        event_id=schema_id_event(BEYOND),
        occurred_at=datetime(2027, 1, 1, tzinfo=timezone.utc),
        schema_id=BEYOND,
        subject=versions_of(record)[-1].subject,
        version=99,
        record=record,
        fingerprint=fingerprint(definition),
        definition=json.dumps(definition),
    )
    assert codec.learn(published)
    return codec


FUTURE = {kind: in_future(versions_of(kind.SCHEMA)[-1].definition()) for kind in RECORD_TYPES}
WRITERS = {kind: fastavro.parse_schema(definition, named_schemas={}) for kind, definition in FUTURE.items()}
LEARNT = {kind: taught(definition, kind.SCHEMA) for kind, definition in FUTURE.items()}


def written_later(kind: Any, datum: dict[str, Any]) -> bytes:
    out = BytesIO()
    out.write(struct.pack(">bI", 0, BEYOND))
    fastavro.schemaless_writer(out, WRITERS[kind], datum)
    return out.getvalue()


@pytest.mark.parametrize("kind", RECORD_TYPES, ids=lambda kind: kind.__name__)
def test_the_future_is_one_that_the_gate_would_let_in(kind: Any) -> None:
    newest = versions_of(kind.SCHEMA)[-1]
    earlier = [Version(number=newest.version, definition=newest.definition())]
    assert may_follow(Version(number=newest.version + 1, definition=FUTURE[kind]), earlier) == ()


@given(records, st.text(st.characters(codec="utf-8"), max_size=10))
def test_todays_reader_reads_a_newer_writer(record: Any, note: str) -> None:
    kind = type(record)
    value = written_later(kind, plain(record, later_note=note, later_count=8, later_tags=[note, note]))
    assert LEARNT[kind].decode(value, kind) == record
    with pytest.raises(DecodeError, match=f"schema id {BEYOND} is unknown"):
        TODAY.decode(value, kind)


@given(records)
def test_a_symbol_of_a_newer_writer_reads_as_unknown(record: Any) -> None:
    kind = type(record)
    enums = {
        f.name: type(value) for f in dataclasses.fields(record) if isinstance(value := getattr(record, f.name), Enum)
    }
    value = written_later(kind, plain(record) | dict.fromkeys(enums, "LATER"))
    unknown = {name: enum("UNKNOWN") for name, enum in enums.items()}
    assert LEARNT[kind].decode(value, kind) == dataclasses.replace(record, **unknown)
