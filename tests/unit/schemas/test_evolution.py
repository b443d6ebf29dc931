"""Which change of a schema is refused, where, by which rule; and that each of the three judges is really asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from schemas.compatibility import avro_refusals, compatibility_messages
from schemas.gate import evolution
from schemas.gate.evolution import Version, may_follow, write
from schemas.gate.golden import datum_of, golden_body, golden_text
from schemas.outline import Absent, outline

MICROS = {"type": "long", "logicalType": "timestamp-micros"}
UUID = {"type": "string", "logicalType": "uuid"}
BASE: dict[str, Any] = {
    "type": "record",
    "name": "DoorOpened",
    "namespace": "inferlog.doors.v1",
    "doc": "A door was opened.",
    "fields": [
        {"name": "event_id", "type": UUID, "doc": "Identity."},
        {"name": "occurred_at", "type": MICROS, "doc": "When, UTC."},
        {"name": "door", "type": "string", "doc": "Which one."},
        {"name": "width_mm", "type": "int", "doc": "How wide, millimetres."},
        {"name": "note", "type": ["null", "string"], "default": None, "doc": "Remark; null when none."},
        {"name": "times", "type": "int", "default": 1, "doc": "How often."},
        {
            "name": "state",
            "type": {
                "type": "enum",
                "name": "State",
                "doc": "How it was.",
                "symbols": ["UNKNOWN", "LOCKED", "SHUT"],
                "default": "UNKNOWN",
            },
            "doc": "State before.",
        },
        {
            "name": "hands",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Hand",
                    "doc": "A hand on it.",
                    "fields": [
                        {"name": "fingers", "type": "long", "doc": "How many."},
                        {"name": "sizes", "type": {"type": "map", "values": "long"}, "doc": "By finger, millimetres."},
                    ],
                },
            },
            "doc": "Who pushed.",
        },
    ],
}
Definition = dict[str, Any]


def field(definition: Definition, name: str) -> Definition:
    return next(f for f in definition["fields"] if f["name"] == name)


def hand(definition: Definition) -> Definition:
    return field(definition, "hands")["type"]["items"]


def without(definition: Definition, name: str) -> None:
    definition["fields"].remove(field(definition, name))


def adding(**attributes: Any) -> Callable[[Definition], None]:
    return lambda d: d["fields"].append({"name": "colour", "doc": "Of the door.", **attributes})


def setting(name: str, /, **attributes: Any) -> Callable[[Definition], None]:
    return lambda d: field(d, name).update(attributes)


def changed(*changes: Callable[[Definition], Any], base: Definition = BASE) -> Definition:
    copy = deepcopy(base)
    for change in changes:
        change(copy)
    return copy


def version(number: int, definition: Definition) -> Version:
    return Version(
        number=number,
        definition=definition,
        golden=write(definition, datum_of(outline(definition), Absent.DEFAULT, name="")),
    )


def found(*definitions: Definition) -> list[tuple[str, str]]:
    """Path and rule of whatever stands against the last of these following the others."""
    *earlier, last = [version(n, d) for n, d in enumerate(definitions, 1)]
    return [(f.path, f.rule) for f in may_follow(Version(number=last.number, definition=last.definition), earlier)]


MAY = {
    "a nullable field": adding(type=["null", "string"], default=None),
    "a field with a default": adding(type="int", default=0),
    "a nullable field inside": lambda d: hand(d)["fields"].append(
        {"name": "glove", "type": ["null", "string"], "default": None, "doc": "Which; null for none."}
    ),
    "a symbol at the end": lambda d: field(d, "state")["type"]["symbols"].append("AJAR"),
    "a better description": setting("door", doc="Which one, by its number."),
    "a field with a default less": lambda d: without(d, "times"),
    "another order of fields": lambda d: d["fields"].reverse(),
    "a default for a field that had none": setting("width_mm", default=900),
}

MAY_NOT: dict[str, tuple[Callable[[Definition], Any], str, str]] = {
    "a field without default removed": (lambda d: without(d, "door"), "door", "field-removed"),
    "one inside removed": (lambda d: hand(d)["fields"].pop(0), "hands[].fingers", "field-removed"),
    "a field without default added": (adding(type="string"), "colour", "field-added"),
    "renamed": (setting("door", name="gate"), "door", "rename"),
    "renamed, with an alias": (setting("door", name="gate", aliases=["door"]), "gate", "rename"),
    "renamed although it has a default": (setting("note", name="remark"), "note", "rename"),
    "renamed, and given a default": (setting("door", name="gate", default=""), "door", "rename"),
    "renamed while another came": (
        lambda d: (setting("door", name="gate")(d), adding(type=["null", "string"], default=None)(d)),
        "door",
        "rename",
    ),
    "a type inside renamed": (lambda d: hand(d).update(name="Palm"), "hands[]", "rename"),
    "an enum renamed": (lambda d: field(d, "state")["type"].update(name="Condition"), "state", "rename"),
    "symbols reordered": (
        lambda d: field(d, "state")["type"].update(symbols=["UNKNOWN", "SHUT", "LOCKED"]),
        "state",
        "enum-append",
    ),
    "a symbol put in between": (
        lambda d: field(d, "state")["type"]["symbols"].insert(1, "AJAR"),
        "state",
        "enum-append",
    ),
    "a symbol removed": (lambda d: field(d, "state")["type"]["symbols"].pop(), "state", "enum-append"),
    "int to long": (setting("width_mm", type="long"), "width_mm", "type-change"),
    "long to int": (lambda d: hand(d)["fields"][0].update(type="int"), "hands[].fingers", "type-change"),
    "int to long in a map": (
        lambda d: hand(d)["fields"][1].update(type={"type": "map", "values": "int"}),
        "hands[].sizes{}",
        "type-change",
    ),
    "string to bytes": (setting("door", type="bytes"), "door", "type-change"),
    "made nullable": (setting("door", type=["null", "string"], default=None), "door", "type-change"),
    "made a uuid": (setting("door", type=UUID), "door", "type-change"),
    "another default": (setting("times", default=2), "times", "default-change"),
    "a default of another type": (setting("times", default="1"), "times", "default-fits"),
    "a default of true for a number": (setting("times", default=True), "times", "default-fits"),
    "a default taken away": (lambda d: field(d, "times").pop("default"), "times", "default-change"),
    "null for a default with another type first": (
        setting("note", type=["string", "null"], default=""),
        "note",
        "null-first",
    ),
    "a union in a union": (setting("note", type=["null", ["string"]]), "note", "null-first"),
    "nothing": (lambda d: None, "", "unchanged"),
}

FORM: dict[str, tuple[Callable[[Definition], Any], str, str]] = {
    "float": (adding(type="float", default=0.0), "colour", "no-float"),
    "double in a map": (adding(type={"type": "map", "values": "double"}, default={}), "colour{}", "no-float"),
    "nullable double": (adding(type=["null", "double"], default=None), "colour", "no-float"),
    "no doc on a field": (adding(type="int", default=0, doc=" "), "colour", "doc"),
    "no doc on the record": (lambda d: d.pop("doc"), "", "doc"),
    "no doc on an enum": (lambda d: field(d, "state")["type"].pop("doc"), "state", "doc"),
    "no doc on a record inside": (lambda d: hand(d).pop("doc"), "hands[]", "doc"),
    "no doc on a field inside": (lambda d: hand(d)["fields"][0].pop("doc"), "hands[].fingers", "doc"),
    "an enum without UNKNOWN": (
        adding(type={"type": "enum", "name": "C", "doc": "x", "symbols": ["RED"], "default": "RED"}, default="RED"),
        "colour",
        "enum-unknown",
    ),
    "an enum without default": (
        lambda d: field(d, "state")["type"].pop("default"),
        "state",
        "enum-unknown",
    ),
    "a small symbol": (lambda d: field(d, "state")["type"]["symbols"].append("ajar"), "state", "names"),
    "milliseconds": (
        adding(type={"type": "long", "logicalType": "timestamp-millis"}, default=0),
        "colour",
        "timestamp-micros",
    ),
    "a bare long for a moment": (setting("event_id", name="x"), "event_id", "envelope"),
    "a moment that is none": (
        lambda d: d["fields"].append({"name": "shut_at", "type": "long", "default": 0, "doc": "When."}),
        "shut_at",
        "timestamp-micros",
    ),
    "no event_id": (lambda d: without(d, "event_id"), "event_id", "envelope"),
    "occurred_at in milliseconds": (setting("occurred_at", type="long"), "occurred_at", "envelope"),
    "decimal": (
        adding(type={"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, default=""),
        "colour",
        "types",
    ),
    "fixed": (adding(type={"type": "fixed", "name": "F", "size": 2}, default="ab"), "colour", "types"),
    "null second": (adding(type=["string", "null"], default="x"), "colour", "null-first"),
    "null without default": (adding(type=["null", "string"]), "colour", "null-first"),
    "three types": (adding(type=["null", "string", "int"], default=None), "colour", "null-first"),
    "null in a list": (
        adding(type={"type": "array", "items": ["null", "string"]}, default=[]),
        "colour",
        "null-first",
    ),
    "a default too large": (adding(type="int", default=2**31), "colour", "default-fits"),
    "namespace": (lambda d: d.update(namespace="doors"), "", "names"),
    "namespace without version": (lambda d: d.update(namespace="inferlog.doors"), "", "names"),
    "record in lower case": (lambda d: d.update(name="door_opened"), "", "names"),
    "field in camel case": (
        lambda d: d["fields"].append({"name": "doorColour", "type": "int", "default": 0, "doc": "x"}),
        "doorColour",
        "names",
    ),
    "no record": (lambda d: (d.clear(), d.update(type="enum", name="E", symbols=["A"])), "", "record"),
    "no such type": (adding(type="strin", default=""), "", "avro"),
    "a field twice": (adding(name="door", type="string", default=""), "door", "names"),
    "a symbol twice": (lambda d: field(d, "state")["type"]["symbols"].append("SHUT"), "state.SHUT", "names"),
    "no fields": (lambda d: d.pop("fields"), "event_id", "envelope"),
}


@pytest.mark.parametrize("name", MAY)
def test_what_may_follow(name: str) -> None:
    assert found(BASE, changed(MAY[name])) == []


@pytest.mark.parametrize("name", MAY_NOT)
def test_what_may_not_follow(name: str) -> None:
    change, path, rule = MAY_NOT[name]
    (finding,) = may_follow(Version(number=2, definition=changed(change)), [version(1, BASE)])
    assert (finding.path, finding.rule) == (path, rule)
    assert finding.record == "inferlog.doors.v1.DoorOpened"
    assert finding.problem.endswith(".")
    assert finding.remedy.endswith(".")
    assert path in finding.text()


@pytest.mark.parametrize("name", FORM)
def test_what_no_schema_may_look_like(name: str) -> None:
    change, path, rule = FORM[name]
    findings = may_follow(Version(number=1, definition=changed(change)), [])
    assert (path, rule) in [(f.path, f.rule) for f in findings]
    assert all(f.problem and f.remedy for f in findings)


def test_a_changed_default_is_found_for_every_kind_of_it() -> None:
    for was, now in (([], [1]), ({"a": 1}, {"a": 2})):
        kind = {"type": "array", "items": "int"} if isinstance(was, list) else {"type": "map", "values": "int"}
        base = changed(adding(type=kind, default=was))
        assert found(base, changed(setting("colour", default=now), base=base)) == [("colour", "default-change")]


def test_a_field_may_go_only_when_no_version_needs_it() -> None:
    given_a_default = changed(setting("width_mm", default=900))
    gone = changed(lambda d: without(d, "width_mm"), base=given_a_default)
    assert found(given_a_default, gone) == []
    assert found(BASE, given_a_default, gone) == [("width_mm", "field-removed")]


def test_a_field_may_come_back_only_as_it_was() -> None:
    gone = changed(lambda d: without(d, "times"))
    back = changed(lambda d: d["fields"].append(deepcopy(field(BASE, "times"))), base=gone)
    other = changed(setting("times", default=7), base=back)
    assert found(BASE, gone, changed(setting("door", doc="Which."), base=back)) == []
    assert found(BASE, gone, other) == [("times", "default-change")]


def test_two_changes_in_two_versions_are_no_rename() -> None:
    gone = changed(lambda d: without(d, "note"))
    other = changed(adding(type=["null", "string"], default=None), base=gone)
    assert found(BASE, gone, other) == []
    assert found(BASE, other) == [("note", "rename")]


BROKEN_FOR_A_READER = ("a field without default removed", "a field without default added", "int to long")


@pytest.mark.parametrize("name", BROKEN_FOR_A_READER)
def test_apache_avros_checker_is_asked_for_every_pair_both_ways(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evolution, "change_findings", lambda *_, **__: ())
    broken = changed(MAY_NOT[name][0])
    (finding,) = may_follow(Version(number=3, definition=broken), [Version(number=1, definition=BASE)])
    assert finding.rule == "avro-checker"
    # The same seen from the other side: the broken one came first.
    (mirrored,) = may_follow(Version(number=3, definition=BASE), [Version(number=1, definition=broken)])
    assert mirrored.rule == "avro-checker"
    assert finding.problem != mirrored.problem


@pytest.mark.parametrize("name", BROKEN_FOR_A_READER)
def test_golden_records_are_really_decoded_by_every_other_version(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evolution, "change_findings", lambda *_, **__: ())
    monkeypatch.setattr(evolution, "avro_refusals", lambda *_: ())
    findings = may_follow(version(2, changed(MAY_NOT[name][0])), [version(1, BASE)])
    assert {f.rule for f in findings} == {"golden-decode"}


def test_a_golden_record_that_reads_as_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Avro lets text be read as bytes and bytes as text; its checker is content."""
    monkeypatch.setattr(evolution, "change_findings", lambda *_, **__: ())
    changed_type = changed(MAY_NOT["string to bytes"][0])
    assert avro_refusals(BASE, changed_type) == avro_refusals(changed_type, BASE) == ()
    findings = may_follow(version(2, changed_type), [version(1, BASE)])
    assert [f.rule for f in findings] == ["golden-decode"] * 2
    assert "door was 'a door' and reads as b'a door'" in findings[0].problem


def test_an_enum_default_reads_unknown_symbols_although_avros_own_decoder_would_not() -> None:
    newer = changed(MAY["a symbol at the end"])
    assert avro_refusals(BASE, newer) == ()
    datum = datum_of(outline(newer), {"state": "AJAR"}, name="")
    read = evolution.read(write(newer, datum), writer=newer, reader=BASE)
    assert read["state"] == "UNKNOWN"


def test_a_stranger_is_told_what_stands_against_a_schema() -> None:
    assert compatibility_messages(changed(MAY["a nullable field"]), BASE) == []
    (said,) = compatibility_messages(changed(MAY_NOT["a field without default removed"][0]), BASE)
    assert said.startswith("cannot be read by it: ")
    assert "door" in said
    (said,) = compatibility_messages({"type": "record", "name": "X"}, BASE)
    assert said.startswith("no Avro schema: ")


def test_the_next_golden_record_is_the_one_before_with_samples_for_what_is_new() -> None:
    old = json.loads(golden_text(3, BASE))
    newer = changed(
        adding(type=["null", "string"], default=None),
        lambda d: hand(d)["fields"].append({"name": "ring", "type": "int", "default": 0, "doc": "Rings."}),
    )
    new = json.loads(golden_text(4, newer, {**old["record"], "door": "front"}))
    assert new["record"]["door"] == "front"
    assert new["record"]["event_id"] == old["record"]["event_id"]
    assert new["record"]["colour"] == "a colour"
    assert new["record"]["hands"][0]["ring"] == 1
    golden_body(new, 4, newer)
