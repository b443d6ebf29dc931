"""What every answer says beside its body, and how an error is written, by whoever gives it: a handler or the door."""

from __future__ import annotations

from uuid import UUID

import orjson

from api.errors import ERROR_CODE, ApiError, Surface, body

ID_HEADER = "x-request-id"


def marks(request_id: UUID) -> dict[str, str]:
    """Headers of every answer."""
    return {ID_HEADER: str(request_id), "Server": "inferlog"}  # not which library in which version


def written(error: ApiError, surface: Surface, request_id: UUID) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of an error as the surface's own clients expect it."""
    document, content_type = body(error, surface, request_id)
    return orjson.dumps(document), {**error.headers, ERROR_CODE: error.code, "Content-Type": content_type}
