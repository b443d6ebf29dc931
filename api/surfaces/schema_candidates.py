"""A stranger's schema held against the published ones: which of them it is, and whether it could follow them.

Both only read. The schema is the caller's, so its text is bounded and it is looked at in another process.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from api.errors import Unprocessable
from api.registry_catalogue import INVALID_SCHEMA, without_context
from api.services import CATALOGUE, TURNS
from api.surfaces.http import json_kind, parse_object, read_body
from api.surfaces.schema_registry import answer, asked, document_of

MAX_BODY_BYTES = 64 * 1024
#: A body that small comes at once from whoever means it.
_BODY_WITHIN_S = 3.0


async def look_up(request: web.Request) -> web.Response:
    """`POST /subjects/{subject}`: under which id and version a schema is known; how serializers work that do not
    publish. The same is what writes the same bytes."""
    catalogue, subject = request.app[CATALOGUE], request.match_info["subject"]
    catalogue.versions(subject)
    text = await _schema_text(request)
    entry = catalogue.matching(subject, await request.app[TURNS].candidate(text))
    return answer(document_of(entry, without_context(subject)))


async def compatibility(request: web.Request) -> web.Response:
    """`POST /compatibility/subjects/{subject}/versions[/{version}]`: whether a schema could follow that version, or
    all of them: each must read what the other writes. With `verbose=true` also what stands against it."""
    catalogue, subject = request.app[CATALOGUE], request.match_info["subject"]
    known = catalogue.versions(subject)
    if "version" in request.match_info:
        known = [catalogue.version(subject, request.match_info["version"])]
    text = await _schema_text(request)
    messages = await request.app[TURNS].objections(text, known)
    document: dict[str, Any] = {"is_compatible": not messages}
    if asked(request, "verbose"):
        document["messages"] = messages
    return answer(document)


async def _schema_text(request: web.Request) -> str:
    """The schema in a body. Raises BadInput, TooLarge, Unprocessable."""
    document = parse_object(await read_body(request.clone(client_max_size=MAX_BODY_BYTES), within_s=_BODY_WITHIN_S))
    text, kind = document.get("schema"), document.get("schemaType") or "AVRO"
    if not isinstance(text, str):
        raise Unprocessable(
            f"schema: expected an Avro schema as JSON text in a string, found {json_kind(text)}", code=INVALID_SCHEMA
        )
    if kind != "AVRO":
        raise Unprocessable(f"schemaType: expected 'AVRO', found '{str(kind)[:40]}'", code=INVALID_SCHEMA)
    if document.get("references"):
        raise Unprocessable("references: there are none here; a schema is whole in itself", code=INVALID_SCHEMA)
    return text


_CHECK = "/registry/compatibility/subjects/{subject}/versions"
CHECKS = (
    web.post("/registry/subjects/{subject}", look_up),
    web.post(_CHECK, compatibility),
    web.post(_CHECK + "/{version}", compatibility),
)
