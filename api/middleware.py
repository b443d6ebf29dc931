"""Around every call: its request id and trace context, and errors written in the shape of the surface it came by.

Its connection is told when the call begins and ends, calls that take no tokens take turns, and what is left of a
question when it is answered is not read.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable
from contextlib import suppress

from aiohttp import web
from aiohttp.typedefs import Handler

from api.access.key_shape import public_id, shown
from api.door.answers import marks, written
from api.door.connections import MOST_UNWANTED_BYTES
from api.door.pace import TURNS_JUDGED, Refused, peer_at
from api.errors import (
    ApiError,
    BadInput,
    HeadTooLarge,
    MethodNotAllowed,
    NotFound,
    Surface,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedEncoding,
    surface_of,
)
from api.services import CONNECTIONS, FREE, REQUEST_ID, STRANGERS, TOOK_TOKENS, TRACEPARENT
from api.surfaces.http import drop_body
from schemas.ids import new_request_id

logger = logging.getLogger(__name__)

_PATHS = (
    "POST /v1/embeddings, POST /v2/models/<model>/infer, GET /v1/models, GET /v1/requests/<id>, GET /v1/usage and "
    "GET /registry/subjects"
)
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


#: What a call's headers may come to; the usual ones are below 1 KiB.
MOST_HEAD_BYTES = 32 * 1024
#: Reading and dropping so many bytes costs this process about what answering a call does.
_BYTES_PER_TURN = 256 * 1024
#: And reading it as JSON before it was refused; more than its share, for everybody waits while a large one is read.
_PARSED_BYTES_PER_TURN = 16 * 1024
#: Colon, space and line end; two spaces, the version, line end and the empty line.
_HEADER_MARKS, _LINE_MARKS = 4, 14

#: How long, at most, a connection of a key with too many refusals is left unread before the last one on it: closed at
#: once it would come again at once. Shorter than SPOILT_S.
HUNG_UP_S = 4.0
_HANGS_UP = web.RequestKey("hangs_up", bool)

_READS = frozenset({"GET", "HEAD"})

#: Asked without a key by whoever supervises this process.
_HEALTH_PATHS = frozenset({"/healthz", "/readyz", "/v2", "/v2/health/live", "/v2/health/ready"})


@web.middleware
async def connected(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: tell the call's connection that its head is there, and that it is answered."""
    connections, transport = request.app[CONNECTIONS], request.transport
    line_bytes = len(request.method) + len(request.raw_path) + _LINE_MARKS
    connections.asked(transport, line_bytes + head_size_bytes(request))
    try:
        response = await handler(request)
    finally:
        drop_body(request)
        if request.content.is_eof():
            connections.answered(transport, request.content.total_bytes)
        else:
            connections.leaving(transport)
    if not request.content.is_eof():
        response.force_close()  # whatever else comes of the body is no question
    return response


@web.middleware
async def paced(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Innermost: let calls that take no tokens wait for their turn, those that need no key before they are handled, and
    reads with one that was found good lately; others before they are told; by their key if it is good.

    Raises Refused when there are too many.
    """
    strangers = request.app[STRANGERS]
    peer = peer_at(request.transport)
    if request.path in _HEALTH_PATHS:
        await strangers.turn(peer, health=True)
        return await handler(request)
    if request.match_info.http_exception is not None or surface_of(request.path) is Surface.REGISTRY:
        await strangers.turn(peer)
        return await handler(request)
    free, key_id = request.app[FREE], public_id(request.headers.get("Authorization"))
    turns_taken = 0.0
    try:
        if (head_bytes := head_size_bytes(request)) > MOST_HEAD_BYTES:
            raise HeadTooLarge(f"the headers come to {head_bytes} bytes, at most {MOST_HEAD_BYTES} are taken")
        if request.method in _READS:
            if _is_known(request):
                turns_taken = 1.0
                await _by_its_key(request, peer, free.turn(key_id, turns=turns_taken))
        elif free.is_behind(key_id) and _is_known(request):
            await _by_its_key(request, peer, free.refuse(key_id))
        response = await handler(request)
    except ApiError as raised:
        refusal = raised
    else:
        strangers.welcome(peer)
        if not request.get(TOOK_TOKENS, False) and not turns_taken:
            drop_body(request)
            if request.method in _READS:
                free.vouch(*shown(request.headers.get("Authorization")))
            # What has been told already, a repetition's outcome, only keeps the next call on its connection waiting.
            with suppress(*([Refused] if response.prepared else [])):
                await _by_its_key(request, peer, free.turn(key_id, turns=1.0))
        return response
    # The body and what was made of it are held by the frames that the refusal came through, and by what it came from.
    # They must not be while it waits: many do.
    drop_body(request)
    refusal.__cause__ = refusal.__context__ = refusal.__traceback__ = None
    try:
        if _is_nobodys(refusal):
            await strangers.turn(peer, turns=1 + _unread_bytes(request) / _BYTES_PER_TURN)
        elif not (isinstance(refusal, Refused) or refusal.took_tokens or refusal.code == ApiError.code):
            strangers.welcome(peer)
            free.vouch(*shown(request.headers.get("Authorization")))
            with suppress(Refused):  # what it is told is why it was refused in the first place
                read_turns = request.content.total_bytes / _PARSED_BYTES_PER_TURN
                turns = TURNS_JUDGED + read_turns - turns_taken
                await _by_its_key(request, peer, free.turn(key_id, turns=turns))
        raise refusal
    finally:
        del refusal  # or this frame and the refusal would hold each other


def _is_known(request: web.Request) -> bool:
    """Whether the call shows a key that was good when it last read something or was refused: whoever makes one up, also
    one with another's public id, takes no turns of that key."""
    key_id, key_sha256 = shown(request.headers.get("Authorization"))
    return key_id != "" and request.app[FREE].vouches(key_id, key_sha256)


async def _by_its_key(request: web.Request, peer: str, wait: Awaitable[None]) -> None:
    """Wait as the pace of the call's key has it. Raises Refused; too many of one key are kept on their connections,
    unread."""
    try:
        await wait
    except Refused as refused:
        if refused.hang_up:
            request[_HANGS_UP] = True
            request.app[STRANGERS].wasted(peer)  # who does not wait for it comes again from the same address
            request.app[CONNECTIONS].spoilt(request.transport)
            # Not all for the same time, or they would all come again at once.
            await asyncio.sleep(HUNG_UP_S * random.uniform(0.5, 1.0))  # noqa: S311
        raise


def _is_nobodys(refusal: ApiError) -> bool:
    """Whether nobody's key was looked at, or the call is none that anybody would take: it costs its sender no tokens
    either, and this process the reading of it."""
    if isinstance(refusal, Unavailable):
        return refusal.code in ("keys_busy", "registry_away")
    return isinstance(refusal, Unauthorized | HeadTooLarge | TooLarge | UnsupportedEncoding)


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
        if error.request_id is not None:
            request[REQUEST_ID] = request_id = error.request_id
        if error.status == 500 and not isinstance(raised, ApiError):
            fields = {"request_id": request_id, "method": request.method, "path": request.path}
            logger.exception("a call failed for a reason nobody foresaw", extra={"fields": fields})
        told, headers = written(error, surface_of(request.path), request_id)
        response = web.Response(body=told, status=error.status, headers=headers)
        if isinstance(error, HeadTooLarge) or (isinstance(error, Refused) and error.hang_up):
            response.force_close()
    if request.get(_HANGS_UP, False):
        response.force_close()
    response.headers.update(marks(request[REQUEST_ID]))
    return response


def head_size_bytes(request: web.Request) -> int:
    """What the headers of a call take, as they were sent."""
    return sum(len(name) + len(value) + _HEADER_MARKS for name, value in request.raw_headers)


def _unread_bytes(request: web.Request) -> int:
    """What will be read of a body that nobody wants."""
    if request.content.is_eof():
        return 0
    return min(MOST_UNWANTED_BYTES, MOST_UNWANTED_BYTES if request.content_length is None else request.content_length)


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
