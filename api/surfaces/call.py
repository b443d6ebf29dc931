"""What the calls of every surface have in common: who calls, and whether it is a repetition of an earlier call."""

from __future__ import annotations

import hashlib
import re

from aiohttp import web

from api.admission.caller import Caller
from api.admission.once import Sameness
from api.errors import BadInput
from api.surfaces.http import read_body

_IDEMPOTENCY_KEY = re.compile(r"[\x20-\x7e]{1,255}")
#: The `openai` client's own count of its repetitions of a call: 0, 1, 2, ….
_RETRY_COUNT = "x-stainless-retry-count"
_RETRIES = re.compile(r"\d{1,4}")


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
        key = self._request.headers.get("Idempotency-Key")
        if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
            raise BadInput("Idempotency-Key: expected 1 to 255 printable ASCII characters", code="bad_idempotency_key")
        retry = self._request.headers.get(_RETRY_COUNT, "")
        is_counted = _RETRIES.fullmatch(retry) is not None
        told = key is not None or is_counted
        return Sameness(
            customer_id=caller.customer_id,
            key_id=caller.key_id,
            key=key,
            retry=int(retry) if is_counted else None,
            digest=await self._digest() if told else b"",
        )

    async def _digest(self) -> bytes:
        body = await read_body(self._request)
        return hashlib.sha256(self._request.path.encode() + b"\n" + body).digest()
