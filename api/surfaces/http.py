"""What every surface needs of HTTP: a bounded body, its JSON, and JSON answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from api.access.key_shape import public_id
from api.door.bodies import WITHIN_S
from api.errors import BadInput, TooLarge, UnsupportedEncoding
from api.services import BODIES, CONNECTIONS

_BODY = web.RequestKey("body", bytes)


async def read_body(request: web.Request, *, within_s: float = WITHIN_S) -> bytes:
    """The whole body; it is kept for who asks again, until `drop_body`.

    Raises UnsupportedEncoding; TooLarge, also for a chunked body without a length; BadInput when it does not arrive;
    Unavailable when too much is arriving.
    """
    known: bytes | None = request.get(_BODY)
    if known is not None:
        return known
    encoding = request.headers.getall("Content-Encoding", [])
    if any(coding.strip().lower() not in ("", "identity") for line in encoding for coding in line.split(",")):
        raise UnsupportedEncoding(
            f"Content-Encoding: expected none, found '{', '.join(encoding)[:100]}'; send the body as it is",
            param="Content-Encoding",
        )
    limit = request.client_max_size
    if request.content_length is not None and request.content_length > limit:
        raise TooLarge(f"the body is larger than {limit} bytes")
    try:
        if request.content.is_eof():  # it came with the headers: reading cannot wait
            body = await request.content.read()
            if len(body) > limit:
                raise TooLarge(f"the body is larger than {limit} bytes")
        else:
            body = await _arriving(request, limit, within_s)
    except web.RequestPayloadError as error:
        raise BadInput(f"the body cannot be read: {error}", code="body_unreadable") from error
    request[_BODY] = body
    return body


async def _arriving(request: web.Request, limit: int, within_s: float) -> bytes:
    connections, transport = request.app[CONNECTIONS], request.transport

    async def next_piece() -> bytes:
        piece = await request.content.readany()
        connections.took(transport)
        return piece

    # By key, which was found to be good before any body is read; the little that is read without one is as by one key.
    return await request.app[BODIES].read(
        public_id(request.headers.get("Authorization")),
        next_piece,
        size_bytes=request.content_length,
        limit_bytes=limit,
        within_s=within_s,
    )


def drop_body(request: web.Request) -> None:
    """Forget the body: a call may wait long for its answer, and holds its inputs by then."""
    request.pop(_BODY, None)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, whatever its Content-Type says. Raises BadInput."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"the body is not JSON: {error}", code="invalid_json") from None  # the cause holds the body
    if not isinstance(document, dict):
        raise BadInput(f"the body is a JSON {json_kind(document)}, expected an object", code="invalid_json")
    return document


def json_kind(value: object) -> str:
    """What a parsed JSON value is called in messages."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), type(value).__name__)


def json_answer(document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A JSON answer. Numbers that JSON cannot carry (NaN, infinity) become null."""
    return web.Response(
        body=orjson.dumps(document), status=status, headers={"Content-Type": "application/json", **(headers or {})}
    )
