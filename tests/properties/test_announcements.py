"""Whatever a schema on the log says, learning it is a refusal or a reader that works, and no bytes cost it more than
their number."""

from __future__ import annotations

import copy
import json
import struct
from io import BytesIO
from typing import Any
from unittest.mock import patch

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import announcement, codec
from schemas.codec import Codec, DecodeError, UnknownSchema, encode
from schemas.facts import RECORD_TYPES, SchemaPublished
from schemas.frame import NoSchema, fingerprint
from schemas.ids import schema_id_event
from schemas.lockfile import LockfileError, locked_schemas, versions_of
from schemas.outline import MAX_DEPTH, MAX_TYPES
from schemas.records import InferenceFinished, UsageRecorded
from tests.factories import NOON, finished, usage

LOCKED = locked_schemas()
HEADER = struct.pack(">bI", 0, 900)
OURS = versions_of(UsageRecorded.SCHEMA)[-1]

NAMES = st.sampled_from(
    ["a", "b", "N", "M", "inferlog.usage.v1.UsageRecorded", "UsageRecorded", "quantities", "", "a b", "é", "x.y", "\0"]
)
SIZES = st.sampled_from([0, 1, 8, -1, 2**40, True, "1", None, 1.5])
LOGICAL = st.sampled_from(["uuid", "timestamp-micros", "timestamp-millis", "decimal", "date", "duration", "nothing", 7])
PRIMITIVES = st.sampled_from(["null", "boolean", "int", "long", "float", "double", "bytes", "string"])
JUNK = st.sampled_from([None, 0, -1, [], {}, "x", True, 1e300, [[]], {"type": "x"}])


def _deeper(types: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = st.lists(
        st.fixed_dictionaries({"name": NAMES, "type": types}, optional={"default": JUNK, "aliases": JUNK})
    )
    more = {"logicalType": LOGICAL, "precision": SIZES, "scale": SIZES, "namespace": NAMES, "default": JUNK}
    return st.one_of(
        st.lists(types, max_size=3),
        st.fixed_dictionaries({"type": st.just("array"), "items": types}, optional=more),
        st.fixed_dictionaries({"type": st.just("map"), "values": types}, optional=more),
        st.fixed_dictionaries({"type": st.just("record"), "name": NAMES, "fields": fields}, optional=more),
        st.fixed_dictionaries({"type": types}, optional=more),
    )


#: Types as a stranger may write them: most parts make sense by themselves, and references may lead to any of them.
types = st.recursive(
    st.one_of(
        PRIMITIVES,
        NAMES,
        JUNK,
        st.fixed_dictionaries({"type": PRIMITIVES, "logicalType": LOGICAL}, optional={"precision": SIZES}),
        st.fixed_dictionaries({"type": st.just("enum"), "name": NAMES, "symbols": st.lists(NAMES, max_size=3)}),
        st.fixed_dictionaries({"type": st.just("fixed"), "name": NAMES, "size": SIZES}),
    ),
    _deeper,
    max_leaves=8,
)
SOUND = st.recursive(
    st.sampled_from(["boolean", "int", "long", "float", "double", "bytes", "string", ["null", "long"]]),
    lambda inner: st.one_of(
        inner.map(lambda t: {"type": "array", "items": t}),
        inner.map(lambda t: {"type": "map", "values": t}),
        inner.map(lambda t: ["null", t] if isinstance(t, str) else t),
    ),
    max_leaves=4,
)


def announced(definition: Any, kind: Any = UsageRecorded, /, **changes: Any) -> SchemaPublished:
    """What a stranger puts on the schemas topic; the fingerprint is the right one where there is one."""
    try:
        looks = fingerprint(definition)
    except NoSchema:
        looks = "0" * 16
    fields: dict[str, Any] = {
        "event_id": schema_id_event(900),
        "occurred_at": NOON,
        "schema_id": 900,
        "subject": versions_of(kind.SCHEMA)[-1].subject,
        "version": 99,
        "record": kind.SCHEMA,
        "fingerprint": looks,
        "definition": json.dumps(definition, separators=(",", ":")),
    }
    return SchemaPublished(**{**fields, **changes})


class TooMuchWork(BaseException):
    """The reader took more steps than its bytes allow; nobody catches this."""


class Counted(BytesIO):
    """Bytes that count how often they are read from: each step of fastavro's reader is at least one reading."""

    def __init__(self, value: bytes) -> None:
        super().__init__(value)
        self.left = len(value) + 2 * MAX_TYPES

    def read(self, size: int | None = -1) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise TooMuchWork
        return super().read(size)


def within_bounds(reader: Codec, value: bytes, kind: Any) -> Any:
    """The record, None for a DecodeError. Anything else, and more steps than there are bytes, is a failure."""
    with patch.object(codec, "BytesIO", Counted):
        try:
            return reader.decode(value, kind)
        except DecodeError:
            return None


def learnt(published: SchemaPublished) -> Codec | None:
    """The codec that took the schema, None when it gave a reason against it."""
    reader = Codec(LOCKED)
    reason = ""
    try:
        assert reader.learn(published)
    except LockfileError as error:
        reason = str(error)
    if reason:
        assert f"schema id {published.schema_id} on the log is not taken: " in reason
        assert len(reason) < 500
        with pytest.raises(UnknownSchema):
            reader.decode(HEADER + encode(usage())[5:], UsageRecorded)
        return None
    return reader


def number(value: int) -> bytes:
    """Avro's zigzag varint."""
    left, found = ((value << 1) ^ (value >> 63)) & (2**64 - 1), b""
    while left > 127:
        found, left = found + bytes([left & 127 | 128]), left >> 7
    return found + bytes([left])


NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 2**31 - 1, 2**60, -(2**60), 2**63 - 1, -(2**63)]), st.integers(-3, 100)
).map(number)
#: Bytes that are mostly counts and lengths, of any size.
BODIES = st.lists(st.one_of(NUMBERS, st.binary(max_size=8)), max_size=12).map(b"".join)


@given(types, st.booleans(), BODIES)
def test_any_schema_is_refused_or_reads_within_its_bytes(found: Any, first: bool, body: bytes) -> None:
    definition = copy.deepcopy(OURS.definition())
    definition["fields"].insert(0 if first else len(definition["fields"]), {"name": "later", "type": found})
    reader = learnt(announced(definition))
    if reader is None:
        return
    good = encode(usage())[5:]
    for value in (body + good, good + body, body):
        within_bounds(reader, HEADER + value, UsageRecorded)


@given(types, st.sampled_from(RECORD_TYPES))
def test_any_other_text_is_refused(found: Any, kind: Any) -> None:
    definition = found if isinstance(found, dict) else {"type": found}
    assert learnt(announced(definition, kind)) is None


@given(SOUND, BODIES, st.data())
def test_a_sound_field_that_is_new_is_read_past(found: Any, body: bytes, data: st.DataObject) -> None:
    definition = copy.deepcopy(OURS.definition())
    definition["fields"].insert(2, {"name": "later", "type": found})
    reader = learnt(announced(definition))
    record = usage()
    if reader is None:  # items that do not tell where they end
        assert '"items": "' in json.dumps(found)
        return
    writer = fastavro.parse_schema(copy.deepcopy(definition), named_schemas={})
    old = fastavro.schemaless_reader(BytesIO(encode(record)[5:]), OURS.definition(), None)
    assert isinstance(old, dict)
    out = BytesIO()
    fastavro.schemaless_writer(out, writer, old | {"later": data.draw(value_of(found))})
    assert within_bounds(reader, HEADER + out.getvalue(), UsageRecorded) == record
    within_bounds(reader, HEADER + out.getvalue()[:40] + body, UsageRecorded)


def value_of(found: Any) -> st.SearchStrategy[Any]:
    """A value of a SOUND type."""
    if isinstance(found, list):
        return st.one_of(value_of(one) for one in found)
    if isinstance(found, dict):
        inner = value_of(found["items" if found["type"] == "array" else "values"])
        keys = st.text(st.characters(codec="utf-8"), max_size=3)
        return st.lists(inner, max_size=3) if found["type"] == "array" else st.dictionaries(keys, inner, max_size=3)
    plain: dict[str, st.SearchStrategy[Any]] = {
        "null": st.none(),
        "boolean": st.booleans(),
        "int": st.integers(-(2**31), 2**31 - 1),
        "long": st.integers(-(2**63), 2**63 - 1),
        "float": st.just(1.5),
        "double": st.just(1.5),
        "bytes": st.binary(max_size=5),
        "string": st.text(st.characters(codec="utf-8"), max_size=5),
    }
    return plain[found]


def with_fields(*found: Any) -> dict[str, Any]:
    """Our schema and new fields of these types; what has a type and a name and is no type is a field itself."""
    definition = copy.deepcopy(OURS.definition())
    definition["fields"] += [{"name": f"x{n}", "type": one} for n, one in enumerate(found)]
    return definition


def record_of(name: str, *found: Any) -> dict[str, Any]:
    fields = [{"name": f"f{n}", "type": one} for n, one in enumerate(found)]
    return {"type": "record", "name": name, "fields": fields}


def changed(name: str, **changes: Any) -> dict[str, Any]:
    definition = copy.deepcopy(OURS.definition())
    (field,) = [f for f in definition["fields"] if f["name"] == name]
    field.update(changes)
    return definition


def array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


TWICE = [record_of("L0", "long"), *(record_of(f"L{n}", f"L{n - 1}", f"L{n - 1}") for n in range(1, 30))]
CHAIN = [record_of("L0", "long"), *(record_of(f"L{n}", f"L{n - 1}") for n in range(1, MAX_DEPTH + 1))]
HIDDEN = record_of("N", ["null", "N"])

CASES: dict[str, tuple[Any, str]] = {
    "a type that holds itself": (with_fields(HIDDEN), "holds itself"),
    "by an array": (with_fields(record_of("N", array("N"))), "holds itself"),
    "by a map": (with_fields(record_of("N", {"type": "map", "values": "N"})), "holds itself"),
    "by another": (with_fields(record_of("A", array(record_of("B", ["null", "A"])))), "holds itself"),
    "the record itself": (with_fields(["null", "UsageRecorded"]), "holds itself"),
    "marked as parsed": ({**with_fields(HIDDEN), "__fastavro_parsed": True, "__named_schemas": {}}, "holds itself"),
    "nulls in an array": (with_fields(array("null")), "null by itself"),
    "nulls in a map": (with_fields({"type": "map", "values": "null"}), "null by itself"),
    "a null": (with_fields("null"), "null by itself"),
    "records of nothing": (with_fields(record_of("E")), "without fields"),
    "any number of them": (with_fields(array(record_of("E"))), "does not see where the bytes end"),
    "a fixed of nothing": (with_fields({"type": "fixed", "name": "F", "size": 0}), "expected a fixed of 1 to"),
    "a fixed of 2^40 bytes": (with_fields({"type": "fixed", "name": "F", "size": 2**40}), "expected a fixed of 1 to"),
    "booleans in an array": (with_fields(array("boolean")), "does not see where the bytes end"),
    "records of doubles": (with_fields(array(record_of("D", "double", "float"))), "does not see where the bytes end"),
    "a type used 2^30 times": (with_fields(*TWICE), f"at most {MAX_TYPES} may"),
    "a line of types": (with_fields(*CHAIN), f"expected at most {MAX_DEPTH}"),
    "many fields": (with_fields(*["int"] * (MAX_TYPES - 4)), f"at most {MAX_TYPES} may"),
    "a long text": ({**with_fields(), "doc": "x" * announcement.MAX_TEXT_BYTES}, "bytes, expected at most"),
    "a union in a union": (with_fields(["null", ["null", "long"]]), "union"),
    "a union of nothing": (with_fields([]), "without branches"),
    "an enum of nothing": (with_fields({"type": "enum", "name": "E", "symbols": []}), "without symbols"),
    "a symbol twice": (with_fields({"type": "enum", "name": "E", "symbols": ["A", "A"]}), "twice"),
    "a field twice": (
        {**with_fields(), "fields": [*with_fields()["fields"], {"name": "customer_id", "type": "string"}]},
        "twice",
    ),
    "a type twice": (with_fields(record_of("N", "int"), record_of("N", "int")), "defined twice"),
    "a name that is none": (with_fields(record_of("a b", "int")), "no name of a type"),
    "no such type": (with_fields("Nothing"), "there is no type Nothing"),
    "another field's alias": (changed("model", aliases=["customer_id"]), "has aliases"),
    "an alias of ours": ({**with_fields(), "aliases": ["inferlog.billing.v1.BillingAdjusted"]}, "has aliases"),
    "a wrong default": (changed("model", default=7), "Default value"),
    "a precision below 0": (with_fields({"type": "bytes", "logicalType": "decimal", "precision": -1}), "precision"),
    "a time as a number": (
        changed("occurred_at", type="long"),
        "occurred_at: expected long timestamp-micros, found long",
    ),
    "a time in milliseconds": (
        changed("occurred_at", type={"type": "long", "logicalType": "timestamp-millis"}),
        "found long timestamp-millis",
    ),
    "a text as bytes": (changed("model", type="bytes"), "model: expected string, found bytes"),
    "a field that may be null": (changed("model", type=["null", "string"]), "model: expected string, found union"),
    "quantities of text": (
        changed("quantities", type={"type": "map", "values": "string"}),
        "quantities.*: expected long",
    ),
    "a field less": (
        {**with_fields(), "fields": with_fields()["fields"][:-1]},
        "it lacks quantities, which has no default",
    ),
    "another record": ({**with_fields(), "name": "Other"}, "announced for .*UsageRecorded and defines .*Other"),
    "no record": ({"type": "enum", "name": "E", "symbols": ["A"]}, "defines"),
    "half a surrogate pair": ({**with_fields(), "doc": "\ud800"}, "surrogate"),
}


@pytest.mark.parametrize(("definition", "words"), CASES.values(), ids=CASES.keys())
def test_what_no_release_can_have_published_is_refused_with_its_reason(definition: Any, words: str) -> None:
    reader = Codec(LOCKED)
    with pytest.raises(LockfileError, match=words):
        reader.learn(announced(definition))
    assert learnt(announced(definition)) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"definition": "[" * 30_000}, "inside one another"),
        ({"definition": ""}, "not JSON"),
        ({"definition": "[]"}, "expected a record"),
        ({"definition": '{"type": NaN}'}, "NaN is no JSON"),
        ({"definition": '{"type": "int", "type": "record"}'}, "the key 'type' twice"),
        ({"definition": '{"type": ' + "1" * 5000 + "}"}, "not JSON|expected a type"),
        ({"fingerprint": "0" * 16}, "not what its fingerprint says"),
        ({"subject": "inference.results.v1-value"}, "is of subject inference.usage.v1-value"),
        ({"record": "inferlog.usage.v1.Other"}, "that of inferlog.usage.v1.UsageRecorded"),
        ({"record": "com.other.v1.Other", "subject": "inference.other.v1-value"}, "expected a record inferlog"),
        ({"record": "inferlog.other.v1.Other", "subject": "other-value"}, "expected a subject inference"),
    ],
)
def test_a_place_or_a_text_that_is_not_ours_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LockfileError, match=rf"^schema id 900 on the log is not taken: .*({words})"):
        Codec(LOCKED).learn(announced(OURS.definition(), **changes))


def test_an_id_of_ours_with_another_text_is_refused() -> None:
    reader = Codec(LOCKED)
    same = announced(OURS.definition(), schema_id=OURS.id, version=OURS.version)
    assert not reader.learn(same)
    for changes in (
        {"definition": json.dumps({**OURS.definition(), "doc": "Others."})},
        {"subject": "inference.other.v1-value"},
        {"version": 2},
        {"record": "inferlog.usage.v1.Other"},
        {"fingerprint": "0" * 16},
    ):
        with pytest.raises(LockfileError, match=f"schema id {OURS.id} is .* an id never changes its meaning"):
            reader.learn(announced(OURS.definition(), **{"schema_id": OURS.id, "version": OURS.version, **changes}))


def test_no_more_are_learnt_than_a_process_has_room_for() -> None:
    reader = Codec(LOCKED)
    with patch.object(codec, "MAX_LEARNT", 3):
        for number in range(3):
            assert reader.learn(announced(OURS.definition(), schema_id=900 + number))
        with pytest.raises(LockfileError, match="3 that are not in the lock file are learnt already"):
            reader.learn(announced(OURS.definition(), schema_id=903))
        assert not reader.learn(announced(OURS.definition(), schema_id=902))


def test_a_new_record_of_a_newer_release_is_learnt() -> None:
    later = {**OURS.definition(), "namespace": "inferlog.audit.v1", "name": "DoorOpened"}
    place = {"record": "inferlog.audit.v1.DoorOpened", "subject": "inference.audit.v1-value"}
    assert Codec(LOCKED).learn(announced(later, **place))


def test_a_type_that_is_first_used_in_a_new_field_reads_the_same_in_an_old_one() -> None:
    definition = versions_of(InferenceFinished.SCHEMA)[-1].definition()
    (outputs,) = [f for f in definition["fields"] if f["name"] == "outputs"]
    first = {"name": "first", "type": array(outputs["type"]["items"]), "default": [], "doc": "x"}
    outputs["type"]["items"] = "Tensor"
    definition["fields"].insert(0, first)
    reader = learnt(announced(definition, InferenceFinished))
    assert reader is not None
    record = finished()
    assert within_bounds(reader, HEADER + b"\0" + encode(record)[5:], InferenceFinished) == record


def test_only_what_reading_needs_reaches_the_library() -> None:
    """Of a schema that says it was parsed before fastavro resolves no name."""
    definition = with_fields(record_of("Part", "long"), "Part") | {"__fastavro_parsed": True, "__named_schemas": {}}
    reader = learnt(announced(definition))
    assert reader is not None
    record = usage()
    assert within_bounds(reader, HEADER + encode(record)[5:] + b"\2\4", UsageRecorded) == record


@pytest.mark.parametrize("count", [2**60, -(2**60), 2**63 - 1, -(2**63), -1])
@pytest.mark.parametrize("found", ["long", ["null", "boolean"], record_of("R", "boolean", "bytes")], ids=str)
def test_a_count_that_no_bytes_follow_costs_nothing(found: Any, count: int) -> None:
    for new in (array(found), array(array(found)), {"type": "map", "values": found}):
        reader = learnt(announced(with_fields(new)))
        assert reader is not None
        for body in (number(count), number(1) + number(count), number(count) + number(-30), number(count) + number(0)):
            within_bounds(reader, HEADER + encode(usage())[5:] + body, UsageRecorded)
