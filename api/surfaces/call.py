"""What the calls of every surface have in common: who calls, whether it repeats an earlier call, and how it is told.

An answer counts as told once it was handed to its connection in whole; what was lost on the way there is told again.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from functools import partial

from aiohttp import web

from api.admission.caller import Caller
from api.door.answers import marks
from api.errors import BadInput
from api.inference import Answer
from api.once.once import Sameness
from api.services import INFERENCE, REQUEST_ID, TOOK_TOKENS
from api.surfaces.http import drop_body, read_body
from api.surfaces.pieces import tell_in_pieces

_IDEMPOTENCY_KEY = re.compile(r"[\x20-\x7e]{1,255}")
#: The `openai` client's own count of its repetitions of a call: 0, 1, 2, ….
_RETRY_COUNT = "x-stainless-retry-count"
_RETRIES = re.compile(r"\d{1,4}")
#: And how long it waits for an answer before it repeats the call, in seconds.
_READ_TIMEOUT = "x-stainless-read-timeout"
_LONGEST_PATIENCE_S = 3600.0


class HttpCall:
    """The parts of the port Ask that are headers and the body as it came."""

    __slots__ = ("_request",)

    def __init__(self, request: web.Request) -> None:
        self._request = request

    @property
    def authorization(self) -> str | None:
        """See Ask."""
        return self._request.headers.get("Authorization")

    async def sameness(self, caller: Caller) -> Sameness:
        """See Ask. The body is there already, so this does not wait."""
        keys = self._request.headers.getall("Idempotency-Key", [])
        key = keys[0] if keys else None
        if len(keys) > 1 or (key is not None and not _IDEMPOTENCY_KEY.fullmatch(key)):
            expected = "expected one, of 1 to 255 printable ASCII characters"
            raise BadInput(f"Idempotency-Key: {expected}", code="bad_idempotency_key")
        retry = self._request.headers.get(_RETRY_COUNT, "")
        is_counted = _RETRIES.fullmatch(retry) is not None
        told = key is not None or is_counted
        return Sameness(
            customer_id=caller.customer_id,
            key_id=caller.key_id,
            key=key,
            retry=int(retry) if is_counted else None,
            digest=await self._digest() if told else b"",
            patience_s=_patience_s(self._request.headers.get(_READ_TIMEOUT)) if is_counted else 0.0,
        )

    def forget(self) -> None:
        """See Ask: a call may wait long for its answer, and its inputs are held beside its body."""
        drop_body(self._request)

    async def _digest(self) -> bytes:
        body = await read_body(self._request)
        return hashlib.sha256(self._request.path.encode() + b"\n" + body).digest()


def _patience_s(text: str | None) -> float:
    """What the client says, 0 when it says nothing that can be used."""
    try:
        patience_s = float(text or 0)
    except ValueError:
        return 0.0
    return min(patience_s, _LONGEST_PATIENCE_S) if math.isfinite(patience_s) and patience_s > 0 else 0.0


async def tell(request: web.Request, answer: Answer, response: web.Response) -> web.StreamResponse:
    """Hand the answer to the caller's connection; at once, if it matters whether that was done."""
    _note(request, answer)
    if answer.admission.claim is None:
        return response
    response.headers.update(marks(answer.request_id))
    try:
        await response.prepare(request)
        await response.write_eof()
    except ConnectionError:  # the caller has gone, and is told when it comes again
        return response
    request.app[INFERENCE].answered(answer)
    return response


async def tell_whole(request: web.Request, answer: Answer, pieces: Iterator[bytes]) -> web.StreamResponse:
    """The same for a large answer, in pieces."""
    _note(request, answer)
    told = partial(request.app[INFERENCE].answered, answer)
    return await tell_in_pieces(request, pieces, headers=answer.headers, told=told)


def _note(request: web.Request, answer: Answer) -> None:
    request[REQUEST_ID] = answer.request_id
    request[TOOK_TOKENS] = answer.admission.charge is not None
