"""What the gate says of a lock file, schema files and golden files that were tampered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from schemas.gate.catalogue import Catalogue
from schemas.gate.check import gate_findings
from schemas.gate.checkout import Checkout
from schemas.gate.golden import golden_text

PUBLISHED = Checkout().catalogue()
LOCK = json.loads(PUBLISHED.lock)
Entries = list[dict[str, Any]]


def with_lock(change: Callable[[Entries], Any]) -> Catalogue:
    entries = json.loads(PUBLISHED.lock)
    change(entries)
    return replace(PUBLISHED, lock=json.dumps(entries))


def with_text(kind: str, name: str, change: Callable[[str], str]) -> Catalogue:
    texts = dict(getattr(PUBLISHED, kind))
    texts[name] = change(texts[name])
    return replace(PUBLISHED, **{kind: texts})


def less(kind: str, name: str) -> Catalogue:
    return replace(PUBLISHED, **{kind: {n: t for n, t in getattr(PUBLISHED, kind).items() if n != name}})


def more(kind: str, name: str, text: str) -> Catalogue:
    return replace(PUBLISHED, **{kind: {**getattr(PUBLISHED, kind), name: text}})


USAGE = "usage_recorded.avsc"
BROKEN: dict[str, tuple[Catalogue, str, str]] = {
    "an id used twice": (with_lock(lambda e: e[3].update(id=3)), "id 3", "id"),
    "ids that descend": (with_lock(lambda e: e.insert(0, e.pop())), "id 1 ", "id"),
    "a version left out": (with_lock(lambda e: e[4].update(version=3)), "id 5", "version"),
    "a version twice": (with_lock(lambda e: e[4].update(version=1)), "id 5", "version"),
    "a record that moves": (with_lock(lambda e: e[4].update(subject="other.v1-value")), "id 5", "subject"),
    "two records on a topic": (
        with_lock(lambda e: e[8].update(subject="inference.usage.v1-value")),
        "id 9",
        "subject",
    ),
    "a subject of another form": (with_lock(lambda e: e[8].update(subject="inference.models.v1")), "id 9", "subject"),
    "a fingerprint": (with_lock(lambda e: e[2].update(fingerprint="0" * 16)), "id 3", "published"),
    "a digest": (with_lock(lambda e: e[2].update(sha256="0" * 64)), "id 3", "published"),
    "a digest missing": (with_lock(lambda e: e[2].pop("sha256")), "id 3", "entry"),
    "an id that is text": (with_lock(lambda e: e[2].update(id="3")), "id 3", "entry"),
    "another record's file": (with_lock(lambda e: e[2].update(file="dead_letter.avsc")), "id 3", "published"),
    "one file twice": (with_lock(lambda e: e[4].update(file=e[0]["file"])), "id 1", "file"),
    "an entry without file": (less("avro", USAGE), "id 3", "file"),
    "a file without entry": (with_lock(lambda e: e.pop()), f"avro/{LOCK[-1]['file']}", "file"),
    "a published field edited": (
        with_text("avro", USAGE, lambda t: t.replace('"price_id"', '"price"')),
        "id 3",
        "published",
    ),
    "only a doc edited": (
        with_text("avro", USAGE, lambda t: t.replace("Who is billed.", "Who pays.")),
        "id 3",
        "published",
    ),
    "a schema that is no JSON": (with_text("avro", USAGE, lambda t: t[:-3]), f"avro/{USAGE}", "file"),
    "a schema that is no schema": (
        with_text("avro", USAGE, lambda t: t.replace('"long"', '"lang"')),
        "id 3",
        "published",
    ),
    "another version of what teaches versions": (
        with_lock(lambda e: e.append({**e[13], "id": 99, "version": 2, "file": "schema_published.v2.avsc"})),
        "SchemaPublished",
        "never-changes",
    ),
    "a lock that is no JSON": (replace(PUBLISHED, lock="[{"), "schemas.lock.json", "file"),
    "no golden record": (less("golden", "usage_recorded.json"), "id 3", "golden"),
    "a golden record too many": (more("golden", "x.json", "{}"), "golden/x.json", "golden"),
    "a golden record cut off": (
        with_text("golden", "usage_recorded.json", lambda t: t.replace('0200",', '02",')),
        "id 3",
        "golden",
    ),
    "a golden record that says something else": (
        with_text("golden", "usage_recorded.json", lambda t: t.replace('"items": 1', '"items": 2')),
        "id 3",
        "golden",
    ),
    "a golden record of another id": (
        with_text("golden", "usage_recorded.json", lambda t: t.replace('"hex": "0000000003', '"hex": "0000000002')),
        "id 3",
        "golden",
    ),
    "a golden record that is no hex": (
        with_text("golden", "usage_recorded.json", lambda t: t.replace('"hex": "00', '"hex": "zz')),
        "id 3",
        "golden",
    ),
}


def test_what_is_published_passes() -> None:
    assert gate_findings(PUBLISHED, older=[("now", LOCK)]) == ()


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named_with_its_rule_and_a_way_out(name: str) -> None:
    catalogue, record, rule = BROKEN[name]
    findings = gate_findings(catalogue)
    assert any(record in f.record and f.rule == rule for f in findings), [f.text() for f in findings]
    assert all(f.problem and f.remedy for f in findings)


def test_a_class_that_cannot_be_made_from_old_bytes_is_found() -> None:
    """A tensor without its elements: well-formed for every schema, and refused by the class."""
    name = "inference_finished.json"
    document = json.loads(PUBLISHED.golden[name])
    document["record"]["outputs"][0]["data"] = ""
    entry = next(e for e in PUBLISHED.entries if e["id"] == document["schema_id"])
    text = golden_text(entry["id"], PUBLISHED.definitions[entry["file"]], document["record"])
    (finding,) = gate_findings(more("golden", name, text))
    assert finding.rule == "typed-class"
    assert "cannot be made from version 1's golden record" in finding.problem


GROWN: dict[str, tuple[Callable[[Entries], Any], str]] = {
    "an entry removed": (lambda e: e.pop(2), "id 3"),
    "the newest entry removed": (lambda e: e.pop(), f"id {LOCK[-1]['id']}"),
    "an id given to another schema": (lambda e: e[13].update(e[2], id=14), "id 14"),
    "a schema and its digest edited together": (lambda e: e[2].update(sha256="0" * 64), "id 3"),
    "a subject changed": (lambda e: e[2].update(subject="x-value"), "id 3"),
    "a key lost": (lambda e: e[2].pop("sha256"), "id 3"),
    "entries reordered": (lambda e: e.insert(0, e.pop(1)), "schemas.lock.json"),
    "one put in between": (lambda e: e.insert(3, {**e[3], "id": 99}), "schemas.lock.json"),
}


@pytest.mark.parametrize("name", GROWN)
def test_a_lock_file_that_did_more_than_grow_is_found_by_its_past(name: str) -> None:
    change, record = GROWN[name]
    findings = gate_findings(with_lock(change), older=[("1234567", LOCK)])
    ours = [f for f in findings if f.rule == "append-only"]
    assert any(record in f.record and "1234567" in f.problem for f in ours), [f.text() for f in findings]


def test_a_lock_file_that_cannot_be_read_is_one_finding_whatever_came_before() -> None:
    (finding,) = gate_findings(replace(PUBLISHED, lock=PUBLISHED.lock[:-3]), older=[("1234567", LOCK)])
    assert (finding.record, finding.rule) == ("schemas.lock.json", "file")


def test_an_entry_may_gain_a_key_and_the_list_new_entries() -> None:
    before = [{k: v for k, v in e.items() if k != "sha256"} for e in LOCK[:4]]
    assert gate_findings(PUBLISHED, older=[("1234567", before)]) == ()


def test_what_many_older_lock_files_have_is_told_once_by_the_newest() -> None:
    older = [("bbbbbbb", LOCK), ("aaaaaaa", LOCK)]
    findings = gate_findings(with_lock(lambda e: e[2].update(subject="x-value")), older=older)
    ours = [f for f in findings if f.rule == "append-only"]
    assert len(ours) == 1
    assert "bbbbbbb" in ours[0].problem
