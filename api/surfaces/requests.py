"""What became of a request: `GET /v1/requests/{id}`, for the customer it belongs to.

Its id is in `x-request-id` of the call's answer, and in every error that says that a call may have been accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import orjson
from aiohttp import web

from api.errors import AnswerLost, ApiError, NotFound, Unavailable
from api.inference import failure
from api.results.status import Accepted
from api.services import GATE, LARGE, REQUESTS
from api.surfaces.http import json_answer
from api.surfaces.pieces import require_text, tell_in_pieces, tensor_pieces
from api.surfaces.tensor_json import render_tensor
from schemas.records import InferenceFinished, Outcome

#: How long a status read may take for outputs that lie in S3.
_OUTPUTS_WITHIN_S: Final = 10.0
#: It is nobody else's, and an unfinished one changes by itself.
_HEADERS: Final = {"Cache-Control": "private, no-store"}
_AGAIN: Final = {**_HEADERS, "Retry-After": "1"}


async def request_status(request: web.Request) -> web.StreamResponse:
    """`GET /v1/requests/{id}`: 200 with its status, also for one that failed; 404 for none of the caller's."""
    caller = await request.app[GATE].caller(request.headers.get("Authorization"), "requests")
    request_id = _request_id(request.match_info["id"])
    found = await request.app[REQUESTS].of(request_id, caller.customer_id)
    if isinstance(found, Accepted):
        return json_answer(_accepted(found), headers=_AGAIN)
    if found.outcome is not Outcome.SUCCEEDED:
        return json_answer(_failed(found), headers=_HEADERS)
    large = request.app[LARGE]
    try:
        async with large.whole(found, within_s=_OUTPUTS_WITHIN_S) as whole:
            if large.is_large_answer(whole):
                return await tell_in_pieces(request, _pieces(whole), headers=_HEADERS)
            return json_answer(_succeeded(whole), headers=_HEADERS)
    except AnswerLost as error:  # unlike a call, a look may be repeated
        words = f"request {request_id} succeeded; its outputs cannot be read now, ask again"
        raise Unavailable(words, code=error.code) from error


def _request_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError as error:
        raise NotFound(f"there is no request '{text[:100]}'", code="request_not_found") from error


def _shown(moment: datetime) -> str:
    """ISO 8601 in UTC, to the millisecond."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _head(found: InferenceFinished | Accepted, status: str) -> dict[str, Any]:
    return {
        "id": str(found.request_id),
        "object": "request",
        "status": status,
        "model": found.model,
        "version": found.version,
        "admitted_at": _shown(found.admitted_at),
    }


def _accepted(found: Accepted) -> dict[str, Any]:
    return {**_head(found, "accepted"), "deadline_at": _shown(found.deadline_at)}


def _finished(found: InferenceFinished) -> dict[str, Any]:
    return {
        **_head(found, found.outcome.value.lower()),
        "finished_at": _shown(found.occurred_at),
        "usage": dict(found.quantities),
    }


def _failed(found: InferenceFinished) -> dict[str, Any]:
    error = failure(found)
    return {**_finished(found), "error": {"code": error.code, "message": error.message}}


def _succeeded(found: InferenceFinished) -> dict[str, Any]:
    try:
        outputs = [render_tensor(tensor) for tensor in found.outputs]
    except UnicodeDecodeError as error:
        raise _not_text(found, error) from error
    return {**_finished(found), "outputs": outputs}


def _pieces(found: InferenceFinished) -> Iterator[bytes]:
    """The same document, piece by piece. Raises ApiError before the first piece or not at all."""
    try:
        for tensor in found.outputs:
            require_text(tensor)
    except UnicodeDecodeError as error:
        raise _not_text(found, error) from error
    yield orjson.dumps(_finished(found))[:-1] + b',"outputs":['
    for at, tensor in enumerate(found.outputs):
        if at:
            yield b","
        yield from tensor_pieces(tensor)
    yield b"]}"


def _not_text(found: InferenceFinished, error: UnicodeDecodeError) -> ApiError:
    words = f"request {found.request_id} succeeded; an output holds bytes that are not text, which JSON cannot carry"
    return ApiError(f"{words}: {error}", code="output_not_text")
