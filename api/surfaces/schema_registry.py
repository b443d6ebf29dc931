"""The schemas of the log, in the words of Confluent's registry, so that its clients read them unchanged.

Reads only, open to everybody: what is served is published with the code, and there is nothing secret in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from api.errors import REGISTRY_TYPE, BadInput, Forbidden
from api.registry_catalogue import Catalogue, Entry, without_context
from api.services import CATALOGUE, VERSIONS
from api.surfaces.http import json_answer
from api.surfaces.oip import server_version

LEVEL, MODE = "FULL_TRANSITIVE", "READONLY"
_REFUSED = (
    "this registry is read only: schemas are published with a release of inferlog, by 'inferlog schemas add' in its "
    "repository. Let serializers look schemas up instead: auto.register.schemas=false"
)


def answer(document: Any) -> web.Response:
    """As clients of a registry expect it."""
    return json_answer(document, headers={"Content-Type": REGISTRY_TYPE})


def _text(entry: Entry) -> web.Response:
    return web.Response(body=entry.text.encode(), headers={"Content-Type": REGISTRY_TYPE})


def _catalogue(request: web.Request) -> Catalogue:
    return request.app[CATALOGUE]


def _pools(request: web.Request) -> frozenset[str]:
    return request.app[VERSIONS].pools()


def _entry(request: web.Request) -> Entry:
    return _catalogue(request).version(request.match_info["subject"], request.match_info["version"])


def document_of(entry: Entry, subject: str) -> dict[str, Any]:
    """One version of a subject."""
    return {
        "subject": subject,
        "version": entry.version,
        "id": entry.id,
        "guid": entry.guid,
        "schemaType": "AVRO",
        "schema": entry.text,
    }


def asked(request: web.Request, name: str) -> bool:
    """Whether a flag of the query is set."""
    return request.query.get(name, "false").lower() == "true"


def _page(request: web.Request, found: Sequence[Any]) -> list[Any]:
    """The part of a list that was asked for; a negative limit means all of it."""
    numbers = []
    for name, default in (("offset", "0"), ("limit", "-1")):
        text = request.query.get(name, default)
        if not text.removeprefix("-").isdecimal() or len(text) > 10:
            raise BadInput(f"{name}: expected a whole number, found '{text[:40]}'")
        numbers.append(int(text))
    first, limit = max(0, numbers[0]), numbers[1]
    return list(found[first:] if limit < 0 else found[first : first + limit])


async def root(_request: web.Request) -> web.Response:
    """`GET /registry`: an empty object, by which some clients see that it lives."""
    return answer({})


async def subjects(request: web.Request) -> web.Response:
    """`GET /subjects`: all of them, or those that begin with `subjectPrefix`; none was ever deleted."""
    start = without_context(request.query.get("subjectPrefix", ""))
    names = [s for s in _catalogue(request).subjects(_pools(request)) if s.startswith(start)]
    return answer(_page(request, [] if asked(request, "deletedOnly") else names))


async def versions(request: web.Request) -> web.Response:
    """`GET /subjects/{subject}/versions`: their numbers."""
    return answer(_page(request, [e.version for e in _catalogue(request).versions(request.match_info["subject"])]))


async def version(request: web.Request) -> web.Response:
    """`GET /subjects/{subject}/versions/{version}`: a number or `latest`."""
    return answer(document_of(_entry(request), without_context(request.match_info["subject"])))


async def version_schema(request: web.Request) -> web.Response:
    """`GET /subjects/{subject}/versions/{version}/schema`: the schema alone."""
    return _text(_entry(request))


async def referenced_by(request: web.Request) -> web.Response:
    """`GET /subjects/{subject}/versions/{version}/referencedby`: none, every schema is whole in itself."""
    _entry(request)
    return answer([])


async def schemas(request: web.Request) -> web.Response:
    """`GET /schemas`: every version of every subject, or the newest ones with `latestOnly=true`."""
    catalogue, start = _catalogue(request), without_context(request.query.get("subjectPrefix", ""))
    since = -1 if asked(request, "latestOnly") else 0
    named = [s for s in catalogue.subjects(_pools(request)) if s.startswith(start)]
    return answer(_page(request, [document_of(e, s) for s in named for e in catalogue.versions(s)[since:]]))


async def types(_request: web.Request) -> web.Response:
    """`GET /schemas/types`."""
    return answer(["AVRO"])


async def schema_by_id(request: web.Request) -> web.Response:
    """`GET /schemas/ids/{id}`: what every reader of a framed record asks for."""
    catalogue = _catalogue(request)
    entry = catalogue.by_id(request.match_info["id"])
    document: dict[str, Any] = {"schemaType": "AVRO", "schema": entry.text, "guid": entry.guid}
    if asked(request, "fetchMaxId"):
        document["maxId"] = catalogue.newest_id()
    return answer(document)


async def schema_text_by_id(request: web.Request) -> web.Response:
    """`GET /schemas/ids/{id}/schema`: the schema alone."""
    return _text(_catalogue(request).by_id(request.match_info["id"]))


async def subjects_of_id(request: web.Request) -> web.Response:
    """`GET /schemas/ids/{id}/subjects`."""
    return answer(_page(request, [place["subject"] for place in _places(request)]))


async def versions_of_id(request: web.Request) -> web.Response:
    """`GET /schemas/ids/{id}/versions`: subject and version, wherever it is one."""
    return answer(_page(request, _places(request)))


def _places(request: web.Request) -> list[Mapping[str, Any]]:
    catalogue = _catalogue(request)
    entry = catalogue.by_id(request.match_info["id"])
    named = catalogue.subjects_of(entry, _pools(request))
    only = without_context(request.query.get("subject", ""))
    return [{"subject": s, "version": entry.version} for s in named if only in ("", s)]


async def schema_by_guid(request: web.Request) -> web.Response:
    """`GET /schemas/guids/{guid}`."""
    entry = _catalogue(request).by_guid(request.match_info["guid"])
    return answer({"schemaType": "AVRO", "schema": entry.text, "guid": entry.guid, "id": entry.id})


async def config(request: web.Request) -> web.Response:
    """`GET /config[/{subject}]`: the rule that every new version has passed."""
    if "subject" in request.match_info:
        _catalogue(request).versions(request.match_info["subject"])
    return answer({"compatibilityLevel": LEVEL})


async def mode(request: web.Request) -> web.Response:
    """`GET /mode[/{subject}]`."""
    if "subject" in request.match_info:
        _catalogue(request).versions(request.match_info["subject"])
    return answer({"mode": MODE})


async def contexts(_request: web.Request) -> web.Response:
    """`GET /contexts`: the default one."""
    return answer(["."])


async def metadata_id(request: web.Request) -> web.Response:
    """`GET /v1/metadata/id`: which installation this is the registry of."""
    name = _catalogue(request).namespace or "inferlog"
    return answer({"id": name, "scope": {"path": [], "clusters": {"schema-registry-cluster": name}}})


async def metadata_version(_request: web.Request) -> web.Response:
    """`GET /v1/metadata/version`: of this program."""
    return answer({"version": server_version(), "commitId": ""})


async def refuse(_request: web.Request) -> web.Response:
    """Everything that would change something: 403, and what to do instead."""
    raise Forbidden(_REFUSED, code="40301")


_PREFIX = "/registry"
_SUBJECT, _VERSION = _PREFIX + "/subjects/{subject}", _PREFIX + "/subjects/{subject}/versions/{version}"
_ID, _CONFIG, _MODE = _PREFIX + "/schemas/ids/{id}", _PREFIX + "/config", _PREFIX + "/mode"

READS = (
    web.get(_ID, schema_by_id),
    web.get(_ID + "/schema", schema_text_by_id),
    web.get(_ID + "/subjects", subjects_of_id),
    web.get(_ID + "/versions", versions_of_id),
    web.get(_PREFIX + "/schemas/guids/{guid}", schema_by_guid),
    web.get(_PREFIX + "/schemas/types", types),
    web.get(_PREFIX + "/schemas", schemas),
    web.get(_PREFIX + "/subjects", subjects),
    web.get(_SUBJECT + "/versions", versions),
    web.get(_VERSION, version),
    web.get(_VERSION + "/schema", version_schema),
    web.get(_VERSION + "/referencedby", referenced_by),
    web.get(_CONFIG, config),
    web.get(_CONFIG + "/{subject}", config),
    web.get(_MODE, mode),
    web.get(_MODE + "/{subject}", mode),
    web.get(_PREFIX + "/contexts", contexts),
    web.get(_PREFIX + "/v1/metadata/id", metadata_id),
    web.get(_PREFIX + "/v1/metadata/version", metadata_version),
    web.get(_PREFIX, root),
    web.get(_PREFIX + "/", root),
)
WRITES = (
    web.post(_SUBJECT + "/versions", refuse),
    web.delete(_SUBJECT, refuse),
    web.delete(_VERSION, refuse),
    *(web.put(path, refuse) for path in (_CONFIG, _CONFIG + "/{subject}", _MODE, _MODE + "/{subject}")),
    *(web.delete(path, refuse) for path in (_CONFIG, _CONFIG + "/{subject}", _MODE, _MODE + "/{subject}")),
    web.post(_PREFIX + "/associations", refuse),
)
