"""What every surface needs of HTTP: a bounded body, its JSON, and JSON answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from api.errors import BadInput, TooLarge

BODY_WITHIN_S = 10.0


async def read_body(request: web.Request, *, within_s: float = BODY_WITHIN_S) -> bytes:
    """The whole body. Raises TooLarge, also for a chunked body without a length; BadInput when it does not arrive."""
    limit = request.client_max_size
    if request.content_length is not None and request.content_length > limit:
        raise _too_large(limit)
    try:
        if request.content.is_eof():  # it came with the headers: reading cannot wait
            return await request.read()
        return await asyncio.wait_for(request.read(), within_s)
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(limit) from error
    except asyncio.TimeoutError as error:
        raise BadInput(f"the body did not arrive within {within_s:g} s", code="body_timeout") from error
    except web.RequestPayloadError as error:
        raise BadInput(f"the body cannot be read: {error}", code="body_unreadable") from error


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit} bytes")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, whatever its Content-Type says. Raises BadInput."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"the body is not JSON: {error}", code="invalid_json") from error
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
