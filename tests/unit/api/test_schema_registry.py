from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any
from uuid import UUID

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from api import checker
from api.door.bodies import Bodies
from api.door.connections import Connections
from api.errors import NotFound, Unprocessable
from api.middleware import envelope
from api.registry_catalogue import Candidate, Catalogue
from api.routes import ROUTES
from api.routing.versions import Versions
from api.services import BODIES, CATALOGUE, CONNECTIONS, TURNS, VERSIONS
from api.surfaces.schema_candidates import MAX_BODY_BYTES
from api.turns import Turns
from schemas.facts import SchemaPublished
from schemas.frame import fingerprint
from schemas.lockfile import locked_schemas, versions_of
from schemas.records import InferenceRequested
from schemas.topics import all_topics
from tests.factories import NOON
from tests.fakes import FakeRegistry, manifest, registered, routed

USAGE_SUBJECT = "t1.inference.usage.v1-value"
QUEUE = "t1.inference.requests.default.v1-value"
TYPE = "application/vnd.schemaregistry.v1+json"


@pytest.fixture
def catalogue() -> Catalogue:
    return Catalogue(locked_schemas(), namespace="t1")


class InThisProcess(Turns):
    """Asks no child; that it says the same is told in test_turns.py."""

    async def _in_turn(self, question: bytes) -> bytes:
        return orjson.dumps(checker.answer(question))


NUMBERS = [s.version for s in versions_of(InferenceRequested.SCHEMA)]


class Registrar:
    """Calls the gateway's own application, of which nothing but /registry is connected to anything."""

    def __init__(self, client: TestClient[Any, Any]) -> None:
        self.client = client

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = json.dumps(body) if isinstance(body, (dict, list)) else body
        async with self.client.request(method, "/registry" + path, data=data) as answer:
            assert answer.headers["Content-Type"].split(";")[0] == TYPE
            text = await answer.text()
            return answer.status, json.loads(text)


@pytest.fixture
async def registrar(catalogue: Catalogue) -> AsyncIterator[Registrar]:
    registry = FakeRegistry()
    registry.all_versions = [registered("digits", manifest())]
    registry.all_routes = [routed("digits", manifest(), pool="gpu-2")]
    app = web.Application(middlewares=[envelope])
    app.add_routes(ROUTES)
    app[CATALOGUE], app[TURNS], app[VERSIONS] = catalogue, InThisProcess(), Versions(registry)
    app[BODIES], app[CONNECTIONS] = Bodies(most_bytes=2**20), Connections(asyncio.Protocol, most=8)
    await app[VERSIONS].refresh()
    async with TestClient(TestServer(app)) as client:
        yield Registrar(client)


def test_every_topic_has_its_subject_and_no_other(catalogue: Catalogue) -> None:
    assert catalogue.subjects() == sorted(f"t1.{t.name}-value" for t in all_topics())
    assert catalogue.subjects(["default", "gpu-2"]) == sorted(
        f"t1.{t.name}-value" for t in all_topics(("default", "gpu-2"))
    )
    for topic in all_topics(("default", "gpu-2")):
        assert catalogue.versions(f"t1.{topic.name}-value")[-1].id == max(
            s.id for s in locked_schemas() if s.record == topic.record.SCHEMA
        )
    # Other installations' topics are not ours, and a queue's name has a pool in it.
    for stranger in (
        "inference.usage.v1-value", "t2.inference.usage.v1-value", "t1.inference.usage.v1", "t1.inference.usage.v1-key",
        "t1.inference.requests.v1-value", "t1.inference.requests..v1-value", "t1.inference.requests.A.v1-value",
        "t1.inference.requests.a.b.v1-value", "t1.", "",
    ):  # fmt: skip
        with pytest.raises(NotFound) as refused:
            catalogue.versions(stranger)
        assert refused.value.code == "40401"


def test_without_a_namespace_names_stand_alone() -> None:
    catalogue = Catalogue(locked_schemas())
    assert catalogue.versions("inference.usage.v1-value")
    with pytest.raises(NotFound):
        catalogue.versions(USAGE_SUBJECT)


def test_the_same_schema_is_found_whatever_its_docs_spacing_and_order(catalogue: Catalogue) -> None:
    (usage,) = catalogue.versions(USAGE_SUBJECT)
    definition = json.loads(usage.text)
    for field in definition["fields"]:
        del field["doc"]
    reordered = dict(reversed(list(definition.items())))
    assert catalogue.matching(USAGE_SUBJECT, Candidate.parse(json.dumps(reordered, indent=3))) is usage
    definition["fields"].pop()
    with pytest.raises(NotFound) as refused:
        catalogue.matching(USAGE_SUBJECT, Candidate.parse(json.dumps(definition)))
    assert refused.value.code == "40403"


def test_of_two_versions_with_the_same_bytes_the_one_that_was_meant_is_found() -> None:
    """Docs and defaults may change without a change of the bytes."""
    catalogue = Catalogue(locked_schemas())
    (first,) = catalogue.versions("inference.usage.v1-value")
    clearer = {**json.loads(first.text), "doc": "Clearer words."}
    assert catalogue.learn(published(900, 2, clearer))
    second = catalogue.by_id("900")
    assert catalogue.matching("inference.usage.v1-value", Candidate.parse(first.text)) is first
    assert catalogue.matching("inference.usage.v1-value", Candidate.parse(json.dumps(clearer))) is second
    third = {**clearer, "doc": "Others."}
    assert catalogue.matching("inference.usage.v1-value", Candidate.parse(json.dumps(third))) is second


def test_a_schema_of_newer_programs_is_shown_and_a_known_id_keeps_its_meaning() -> None:
    catalogue = Catalogue(locked_schemas(), namespace="t1")
    newer = {**json.loads(catalogue.by_id("3").text), "doc": "Newer."}
    assert catalogue.learn(published(900, 2, newer))
    assert catalogue.version(USAGE_SUBJECT, "latest").id == 900
    assert catalogue.newest_id() == 900
    assert not catalogue.learn(published(3, 3, newer))
    assert "Newer." not in catalogue.by_id("3").text
    assert [e.version for e in catalogue.versions(USAGE_SUBJECT)] == [1, 2]


def test_a_version_that_is_there_already_is_shown_by_its_id_only() -> None:
    catalogue = Catalogue(locked_schemas())
    (first,) = catalogue.versions("inference.usage.v1-value")
    assert catalogue.learn(published(900, 1, {**json.loads(first.text), "doc": "Another first."}))
    assert list(catalogue.versions("inference.usage.v1-value")) == [first]
    assert catalogue.version("inference.usage.v1-value", "latest") is first
    assert "Another first." in catalogue.by_id("900").text


def published(number: int, version: int, definition: Any) -> SchemaPublished:
    return SchemaPublished(
        event_id=UUID(int=number), occurred_at=NOON, schema_id=number, subject="inference.usage.v1-value",
        version=version, record="r", fingerprint=fingerprint(definition), definition=json.dumps(definition),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("", {}),
        ("/", {}),
        (f"/subjects?subjectPrefix={USAGE_SUBJECT[:14]}", [USAGE_SUBJECT]),
        (f"/subjects?subjectPrefix=:*:{USAGE_SUBJECT}&deleted=true", [USAGE_SUBJECT]),
        ("/subjects?subjectPrefix=nothing", []),
        ("/subjects?deletedOnly=true", []),
        ("/subjects?limit=1&offset=0", ["t1.inference.adjustments.v1-value"]),
        ("/subjects?offset=999", []),
        (f"/subjects/{QUEUE}/versions", NUMBERS),
        (f"/subjects/:.:{QUEUE}/versions", NUMBERS),
        (f"/subjects/{QUEUE}/versions/latest/referencedby", []),
        ("/schemas/types", ["AVRO"]),
        ("/schemas/ids/3/subjects?deleted=true", [USAGE_SUBJECT]),
        ("/schemas/ids/5/subjects", [QUEUE, QUEUE.replace("default", "gpu-2")]),
        ("/schemas/ids/3/versions", [{"subject": USAGE_SUBJECT, "version": 1}]),
        (f"/schemas/ids/5/versions?subject={QUEUE}", [{"subject": QUEUE, "version": 2}]),
        ("/config", {"compatibilityLevel": "FULL_TRANSITIVE"}),
        (f"/config/{QUEUE}?defaultToGlobal=true", {"compatibilityLevel": "FULL_TRANSITIVE"}),
        ("/mode", {"mode": "READONLY"}),
        (f"/mode/{QUEUE}", {"mode": "READONLY"}),
        ("/contexts", ["."]),
    ],
)
async def test_reads(registrar: Registrar, path: str, answer: Any) -> None:
    assert await registrar.call("GET", path) == (200, answer)


async def test_schemas_by_every_way(registrar: Registrar) -> None:
    usage = locked_schemas()[2]
    status, by_version = await registrar.call("GET", f"/subjects/{USAGE_SUBJECT}/versions/1")
    assert status == 200
    assert json.loads(by_version.pop("schema")) == usage.definition()
    assert (by_version["subject"], by_version["version"], by_version["id"], by_version["schemaType"]) == (
        USAGE_SUBJECT, 1, 3, "AVRO",
    )  # fmt: skip
    assert (await registrar.call("GET", f"/subjects/{USAGE_SUBJECT}/versions/-1"))[1]["id"] == 3
    for path in ("/schemas/ids/3/schema", f"/subjects/{USAGE_SUBJECT}/versions/latest/schema"):
        assert await registrar.call("GET", path) == (200, usage.definition())
    for path in ("/schemas/ids/3", f"/schemas/ids/3?subject={USAGE_SUBJECT}", f"/schemas/guids/{by_version['guid']}"):
        assert json.loads((await registrar.call("GET", path))[1]["schema"]) == usage.definition()
    assert (await registrar.call("GET", "/schemas/ids/3?fetchMaxId=true"))[1]["maxId"] == locked_schemas()[-1].id
    _, everything = await registrar.call("GET", "/schemas")
    assert {e["id"] for e in everything} == {s.id for s in locked_schemas()}
    _, newest = await registrar.call("GET", f"/schemas?latestOnly=true&subjectPrefix={QUEUE}")
    assert [(e["subject"], e["version"]) for e in newest] == [(QUEUE, NUMBERS[-1])]
    assert (await registrar.call("GET", "/v1/metadata/id"))[1]["id"] == "t1"
    assert (await registrar.call("GET", "/v1/metadata/version"))[1]["version"]


OWN = {"schema": json.dumps(locked_schemas()[2].definition())}
# A published schema with an attribute that means nothing and that no recursion gets to the end of.
OVERLADEN = OWN["schema"][:-1] + ', "x": ' + "[" * 1000 + "]" * 1000 + "}"
CHECK = f"/compatibility/subjects/{USAGE_SUBJECT}/versions"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "words"),
    [
        ("GET", "/subjects/nobody-value/versions", None, 404, 40401, "GET /registry/subjects"),
        ("GET", "/subjects/a%2Fb/versions", None, 404, 40401, "a/b"),
        ("GET", f"/subjects/{USAGE_SUBJECT}/versions/9", None, 404, 40402, "has 1"),
        ("GET", f"/subjects/{USAGE_SUBJECT}/versions/0", None, 422, 42202, "'latest'"),
        ("GET", f"/subjects/{USAGE_SUBJECT}/versions/new", None, 422, 42202, "'latest'"),
        ("GET", f"/subjects/{USAGE_SUBJECT}/versions/٣", None, 422, 42202, "'latest'"),
        ("GET", f"/subjects/{USAGE_SUBJECT}/versions/{'9' * 5000}", None, 422, 42202, "'latest'"),
        ("GET", "/schemas/ids/900", None, 404, 40403, "900"),
        ("GET", "/schemas/ids/x/subjects", None, 404, 40403, "x"),
        ("GET", "/schemas/guids/x", None, 404, 40403, "x"),
        ("GET", "/config/nobody-value", None, 404, 40401, "nobody"),
        ("GET", "/mode/nobody-value", None, 404, 40401, "nobody"),
        ("GET", "/subjects?limit=ten", None, 400, 400, "limit"),
        ("GET", "/nowhere", None, 404, 404, "GET /registry/subjects"),
        ("PATCH", "/subjects", None, 405, 405, "GET"),
        ("POST", "/subjects/nobody-value", OWN, 404, 40401, "nobody"),
        ("POST", f"/subjects/{QUEUE}", OWN, 404, 40403, "the same bytes"),
        ("POST", f"/subjects/{USAGE_SUBJECT}", b"{", 400, 400, "not JSON"),
        ("POST", f"/subjects/{USAGE_SUBJECT}", b"", 400, 400, "not JSON"),
        ("POST", f"/subjects/{USAGE_SUBJECT}", [], 400, 400, "array"),
        ("POST", f"/subjects/{USAGE_SUBJECT}", {}, 422, 42201, "found null"),
        ("POST", f"/subjects/{USAGE_SUBJECT}", {"schema": {}}, 422, 42201, "found object"),
        ("POST", f"/subjects/{USAGE_SUBJECT}", {"schema": "record"}, 422, 42201, "JSON text"),
        ("POST", f"/subjects/{USAGE_SUBJECT}", {"schema": '{"type": "recrod"}'}, 422, 42201, "valid Avro"),
        ("POST", f"/subjects/{USAGE_SUBJECT}", {"schema": "[" * 90 + "]" * 90}, 404, 40403, "bytes"),
        ("POST", f"/subjects/{USAGE_SUBJECT}", {"schema": "[" * 101 + "]" * 101}, 422, 42201, "at most 100"),
        ("POST", f"/subjects/{USAGE_SUBJECT}", {"schema": OVERLADEN}, 422, 42201, "at most 100"),
        ("POST", CHECK, {"schema": OVERLADEN}, 422, 42201, "at most 100"),
        ("POST", f"/subjects/{USAGE_SUBJECT}", {"schema": "[" * 9000 + "]" * 9000}, 422, 42201, "JSON text"),
        ("POST", f"/subjects/{USAGE_SUBJECT}", {**OWN, "schemaType": "PROTOBUF"}, 422, 42201, "'AVRO'"),
        ("POST", f"/subjects/{USAGE_SUBJECT}", {**OWN, "references": [{}]}, 422, 42201, "references"),
        ("POST", f"/subjects/{USAGE_SUBJECT}", {"schema": "x" * MAX_BODY_BYTES}, 413, 413, str(MAX_BODY_BYTES)),
        ("POST", CHECK, {"schema": "{}"}, 422, 42201, "valid Avro"),
        ("POST", CHECK + "/7", OWN, 404, 40402, "7"),
        ("POST", CHECK.replace("usage", "nothing"), OWN, 404, 40401, "nothing"),
        ("POST", f"/subjects/{USAGE_SUBJECT}/versions", OWN, 403, 40301, "inferlog schemas add"),
        ("POST", "/subjects/new-value/versions?normalize=true", b"\xff", 403, 40301, "auto.register.schemas=false"),
        ("DELETE", f"/subjects/{USAGE_SUBJECT}?permanent=true", None, 403, 40301, "read only"),
        ("DELETE", f"/subjects/{USAGE_SUBJECT}/versions/1", None, 403, 40301, "read only"),
        ("PUT", "/config", {"compatibility": "NONE"}, 403, 40301, "read only"),
        ("DELETE", f"/config/{USAGE_SUBJECT}", None, 403, 40301, "read only"),
        ("PUT", "/mode", {"mode": "IMPORT"}, 403, 40301, "read only"),
        ("PUT", f"/mode/{USAGE_SUBJECT}", {"mode": "READWRITE"}, 403, 40301, "read only"),
    ],
)  # fmt: skip
async def test_refusals(
    registrar: Registrar, method: str, path: str, body: Any, status: int, code: int, words: str
) -> None:
    got, document = await registrar.call(method, path, body)
    assert (got, document["error_code"]) == (status, code), document
    assert set(document) == {"error_code", "message"}
    assert words in document["message"]
    assert len(document["message"]) < 500


async def test_what_stands_against_a_schema_is_told_per_version(registrar: Registrar) -> None:
    definition = locked_schemas()[4].definition()
    definition["fields"][-1]["type"] = "string"
    body, check = {"schema": json.dumps(definition)}, f"/compatibility/subjects/{QUEUE}/versions"
    status, answer = await registrar.call("POST", check + "?verbose=true", body)
    assert (status, answer["is_compatible"]) == (200, False)
    assert {m[:9] for m in answer["messages"]} == {f"version {n}" for n in NUMBERS}
    assert any("limiter_buckets" in m or "/fields/" in m for m in answer["messages"])
    _, answer = await registrar.call("POST", check + "/1?verbose=true", body)
    assert {m[:9] for m in answer["messages"]} == {"version 1"}
    assert await registrar.call("POST", check + "/latest", body) == (200, {"is_compatible": False})
    known = {"schema": json.dumps(locked_schemas()[0].definition())}
    assert await registrar.call("POST", check + "?verbose=true", known) == (
        200,
        {"is_compatible": True, "messages": []},
    )


_names = st.sampled_from(["", "A", "ns.B", "UsageRecorded", "1", "null", "é"])
_types = st.recursive(
    st.one_of(st.sampled_from(["int", "string", "null", "A", "record", "nonsense", ""]), st.none(), st.integers()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.fixed_dictionaries(
            {"type": st.one_of(st.sampled_from(["record", "enum", "fixed", "array", "map", "error", "union"]), inner)},
            optional={
                "name": _names, "namespace": _names, "items": inner, "values": inner, "size": st.integers(-1, 9),
                "symbols": st.lists(_names, max_size=2), "default": inner,
                "logicalType": st.sampled_from(["uuid", "timestamp-micros", "", "é"]),
                "aliases": inner, "fields": st.one_of(
                    inner, st.lists(st.fixed_dictionaries({"name": _names}, optional={"type": inner}), max_size=3)
                ),
            },
        ),
    ),
    max_leaves=4,
)  # fmt: skip


@given(definition=_types)
def test_whatever_a_stranger_calls_a_schema_is_answered(definition: Any) -> None:
    known = [(e.version, e.text) for e in Catalogue(locked_schemas()).versions("inference.usage.v1-value")]
    with suppress(Unprocessable):
        assert all(isinstance(m, str) for m in checker.objections(json.dumps(definition), known))
