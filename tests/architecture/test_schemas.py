"""The schemas, the classes, the golden records and the page about them say the same."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest

from schemas.codec import decode
from schemas.facts import RECORD_TYPES
from schemas.gate.check import gate_findings
from schemas.gate.checkout import Checkout
from schemas.gate.classes import class_findings
from schemas.gate.event_page import event_page
from schemas.ids import cancelled_id, dead_letter_id, finished_id, requested_id, schema_id_event, usage_id
from schemas.lockfile import latest, locked_schemas, text_digest
from schemas.manifest import Manifest
from schemas.outline import outline
from schemas.plain import to_plain
from schemas.ranges import Count, Quantity
from schemas.records import Outcome
from tests.processes import ROOT

CHECKOUT = Checkout(root=ROOT)
PUBLISHED = CHECKOUT.catalogue()
KINDS = {kind.SCHEMA: kind for kind in RECORD_TYPES}


def golden(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "schemas" / "golden" / file).read_text(encoding="utf-8"))
    return found


def test_what_is_published_passes_the_gate_and_its_own_past() -> None:
    found = gate_findings(PUBLISHED, older=CHECKOUT.remembered().locks)
    assert not found, "\n".join(f.text() for f in found)


def test_the_page_is_the_one_made_from_the_schemas() -> None:
    assert CHECKOUT.page.read_text(encoding="utf-8") == event_page(PUBLISHED), "docs/events.md is stale: make docs"


def test_every_link_within_the_page_leads_somewhere() -> None:
    page = CHECKOUT.page.read_text(encoding="utf-8")
    anchors = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= anchors
    for file in re.findall(r"\]\(([^#)]+)\)", page):
        assert (ROOT / "docs" / file).exists(), file


def test_the_reader_on_the_page_reads_every_golden_record(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [b for b in re.findall(r"```python\n(.*?)```", CHECKOUT.page.read_text(), re.DOTALL) if "fastavro" in b]
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(code, names)
    for entry in PUBLISHED.entries:
        document = golden(entry["file"].replace(".avsc", ".json"))
        assert to_plain(names["decode"](bytes.fromhex(document["hex"]))) == document["record"]


@pytest.mark.parametrize("kind", RECORD_TYPES, ids=lambda kind: kind.__name__)
def test_the_class_has_the_fields_of_the_newest_schema_in_name_and_type(kind: Any) -> None:
    found = class_findings(kind.SCHEMA, kind, outline(latest(kind.SCHEMA).definition()))
    assert not found, "\n".join(f.text() for f in found)


def test_every_record_has_a_class() -> None:
    assert {s.record for s in locked_schemas()} == set(KINDS)


@dataclass(frozen=True, kw_only=True)
class Part:
    size: Quantity


@dataclass(frozen=True, kw_only=True)
class Whole:
    event_id: UUID
    occurred_at: datetime
    count: Count
    note: str | None = None
    meters: Mapping[str, Quantity] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    outcome: Outcome


MICROS = {"type": "long", "logicalType": "timestamp-micros"}
FIELDS: dict[str, Any] = {
    "event_id": {"type": {"type": "string", "logicalType": "uuid"}},
    "occurred_at": {"type": MICROS},
    "count": {"type": "int"},
    "note": {"type": ["null", "string"], "default": None},
    "meters": {"type": {"type": "map", "values": "long"}},
    "parts": {
        "type": {
            "type": "array",
            "items": {"type": "record", "name": "P", "fields": [{"name": "size", "type": "long"}]},
        }
    },
    "outcome": {"type": {"type": "enum", "name": "O", "symbols": [one.value for one in Outcome]}},
}


def differences(**changes: Any) -> list[str]:
    fields = {n: f for n, f in {**FIELDS, **changes}.items() if f}
    definition = {"type": "record", "name": "W", "fields": [{"name": n, **f} for n, f in fields.items()]}
    return [f.path for f in class_findings("W", Whole, outline(definition))]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"more": {"type": "int", "default": 0}}, "more"),
        ({"note": None}, "note"),
        ({"event_id": {"type": "string"}}, "event_id"),
        ({"occurred_at": {"type": "long"}}, "occurred_at"),
        ({"count": {"type": "long", "default": 0}}, "count"),
        ({"count": {"type": "string"}}, "count"),
        ({"count": {"type": ["null", "int"], "default": None}}, "count"),
        ({"note": {"type": "string"}}, "note"),
        ({"note": {"type": ["null", "bytes"], "default": None}}, "note"),
        ({"meters": {"type": {"type": "map", "values": "int"}}}, "meters{}"),
        ({"meters": {"type": {"type": "array", "items": "long"}}}, "meters"),
        ({"parts": {"type": {"type": "array", "items": "long"}}}, "parts[]"),
        (
            {
                "parts": {
                    "type": {
                        "type": "array",
                        "items": {"type": "record", "name": "P", "fields": [{"name": "size", "type": "int"}]},
                    }
                }
            },
            "parts[].size",
        ),
        ({"outcome": {"type": {"type": "enum", "name": "O", "symbols": ["UNKNOWN", "SUCCEEDED"]}}}, "outcome"),
        ({"outcome": {"type": "string"}}, "outcome"),
    ],
)
def test_a_class_that_differs_from_its_schema_is_found(changes: dict[str, Any], path: str) -> None:
    assert differences() == []
    assert set(differences(**changes)) == {path}


def test_the_golden_records_tell_one_story() -> None:
    """Their ids derive from each other as in production, so that the examples on the page can be followed."""
    request, result = golden("inference_requested.v2.json")["record"], golden("inference_finished.v2.json")["record"]
    usage, cancelled = golden("usage_recorded.json")["record"], golden("request_cancelled.json")["record"]
    model, route = golden("model_published.json")["record"], golden("route_changed.json")["record"]
    key, price = golden("key_changed.json")["record"], golden("price_book_published.json")["record"]
    number = UUID(request["request_id"])
    assert {r["request_id"] for r in (result, usage, cancelled)} == {str(number)}
    made = [requested_id(number), finished_id(number), usage_id(number), cancelled_id(number)]
    assert [r["event_id"] for r in (request, result, usage, cancelled)] == list(map(str, made))
    assert {r["version"] for r in (request, result, usage, route)} == {model["version"]}
    manifest = Manifest.from_bytes(model["manifest"].encode(), version=model["version"])
    assert [t.name for t in manifest.inputs] == [t["name"] for t in request["inputs"]]
    assert request["key_id"] == key["key_id"]
    assert {r["price_id"] for r in (request, result, usage, route)} == {price["price_id"]}
    assert result["quantities"] == usage["quantities"]
    assert request["occurred_at"] == usage["occurred_at"] == result["admitted_at"]
    assert [bool(t["blob"]) for t in request["inputs"]] == [False, True]


def test_golden_records_have_the_ids_of_their_places() -> None:
    for file in ("dead_letter.json", "dead_letter.v2.json"):
        letter = golden(file)["record"]
        expected = dead_letter_id(letter["topic"], letter["partition"], letter["offset"])
        assert letter["event_id"] == str(expected)
    published = golden("schema_published.json")["record"]
    (schema,) = [s for s in locked_schemas() if s.id == published["schema_id"]]
    assert published["event_id"] == str(schema_id_event(schema.id))
    assert text_digest(json.loads(published["definition"])) == schema.sha256


def test_todays_codec_reads_every_golden_record() -> None:
    for schema in locked_schemas():
        document = golden(schema.file.replace(".avsc", ".json"))
        read = to_plain(decode(bytes.fromhex(document["hex"]), KINDS[schema.record]))
        shared = {name: value for name, value in read.items() if name in document["record"]}
        if schema.version == latest(schema.record).version:
            assert shared == read == document["record"]
        assert shared.keys() == document["record"].keys()
