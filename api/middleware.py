"""Around every call: its request id and trace context, and errors written in the shape of the surface it came by."""

from __future__ import annotations

import logging
import re
from uuid import UUID

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from api.errors import ApiError, BadInput, MethodNotAllowed, NotFound, TooLarge, body, surface_of
from api.services import REQUEST_ID, TRACEPARENT
from schemas.ids import new_request_id

logger = logging.getLogger(__name__)

ID_HEADER = "x-request-id"
_PATHS = "POST /v1/embeddings, POST /v2/models/<model>/infer, GET /v1/models, GET /v1/usage and GET /registry/subjects"
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@web.middleware
async def envelope(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the call its id, which is also its request's id, and answer whatever it raises."""
    request_id = new_request_id()
    request[REQUEST_ID] = request_id
    traceparent = request.headers.get("traceparent")
    request[TRACEPARENT] = traceparent if traceparent and _TRACEPARENT.fullmatch(traceparent) else None
    try:
        response = await handler(request)
    except Exception as raised:
        error = as_api_error(raised)
        if error.status == 500 and not isinstance(raised, ApiError):
            fields = {"request_id": request_id, "method": request.method, "path": request.path}
            logger.exception("a call failed for a reason nobody foresaw", extra={"fields": fields})
        document, content_type = body(error, surface_of(request.path), request_id)
        response = web.Response(
            body=orjson.dumps(document), status=error.status, headers={**error.headers, "Content-Type": content_type}
        )
    response.headers.update(marks(request_id))
    return response


def marks(request_id: UUID) -> dict[str, str]:
    """Headers of every answer."""
    return {ID_HEADER: str(request_id), "Server": "inferlog"}  # not which library in which version


def as_api_error(raised: Exception) -> ApiError:
    """What is raised while a call is handled, as one of our refusals. The words of a bug stay in the log."""
    if isinstance(raised, ApiError):
        return raised
    if isinstance(raised, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(raised.allowed_methods))
        return MethodNotAllowed(f"{raised.method} is not allowed here; allowed: {allowed}", headers={"Allow": allowed})
    if isinstance(raised, web.HTTPNotFound):
        return NotFound(f"there is nothing at this path; there is {_PATHS}")
    if isinstance(raised, web.HTTPRequestEntityTooLarge):
        return TooLarge("the body is too large")
    if isinstance(raised, web.HTTPException) and 400 <= raised.status < 500:
        return BadInput(raised.reason)
    return ApiError("an error inside the gateway; it was logged under the request id")
