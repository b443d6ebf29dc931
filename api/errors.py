"""Every refusal the gateway can answer with: its status, its code, its words, and how each surface writes it.

Handlers raise; one middleware renders. Nothing here knows HTTP libraries, so the whole table can be read and tested.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar
from uuid import UUID


class Surface(Enum):
    """Whose error shape a path speaks."""

    OIP = "oip"
    OPENAI = "openai"
    PROBLEM = "problem"
    REGISTRY = "registry"


#: The content type that clients of schema registries send and ask for.
REGISTRY_TYPE = "application/vnd.schemaregistry.v1+json"

# What of /v1 is no part of OpenAI's API.
_OURS = ("/v1/usage", "/v1/requests/")
# Where the `openai` client calls when its base_url lacks /v1; it shows no message in any other shape than its own.
_WITHOUT_V1 = frozenset({"/embeddings", "/models", "/chat/completions", "/completions"})


def surface_of(path: str) -> Surface:
    """The surface a path belongs to; everything that is neither protocol's speaks problem+json (RFC 9457)."""
    if path.startswith("/v2/") or path == "/v2":
        return Surface.OIP
    if path.startswith("/registry/") or path == "/registry":
        return Surface.REGISTRY
    if path in _WITHOUT_V1 or (path.startswith("/v1/") and not path.startswith(_OURS)):
        return Surface.OPENAI
    return Surface.PROBLEM


class ApiError(Exception):
    """A refusal. `code` is stable and for machines, the message is for people, `param` names the field at fault."""

    status: ClassVar[int] = 500
    code: str = "internal_error"
    #: OpenAI's coarse class of the error.
    kind: ClassVar[str] = "server_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        #: Whether its call had taken tokens, and so is bounded by its key's own limits.
        self.took_tokens = False
        #: The request that this is about, where it is not the call's own.
        self.request_id: UUID | None = None
        if code is not None:
            self.code = code


class BadInput(ApiError):
    """The caller sent something that can never succeed as it is."""

    status = 400
    code = "invalid_input"
    kind = "invalid_request_error"


class Unauthorized(ApiError):
    """No key, or not one that may call."""

    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message, code=code, headers={"WWW-Authenticate": 'Bearer realm="inferlog"'})


class PaymentRequired(ApiError):
    """The customer's own cap on what it spends leaves no room for the call; waiting helps within the month only where
    what is in the way are reservations."""

    status = 402
    code = "spend_cap_reached"
    kind = "insufficient_quota"


class NotFound(ApiError):
    """There is nothing by this name."""

    status = 404
    code = "not_found"
    kind = "invalid_request_error"


class MethodNotAllowed(ApiError):
    """The path exists, but not for this method."""

    status = 405
    code = "method_not_allowed"
    kind = "invalid_request_error"


class Forbidden(ApiError):
    """It exists, but not for anybody who calls from outside."""

    status = 403
    code = "forbidden"
    kind = "permission_error"


class Unprocessable(ApiError):
    """Well-formed, but it does not say anything that makes sense here."""

    status = 422
    code = "unprocessable"
    kind = "invalid_request_error"


class TooLarge(ApiError):
    """The body is larger than this gateway, or the log, takes."""

    status = 413
    code = "body_too_large"
    kind = "invalid_request_error"


class UnsupportedEncoding(ApiError):
    """The body is packed in some way; it would have to be unpacked before anybody could tell how large it is."""

    status = 415
    code = "encoding_unsupported"
    kind = "invalid_request_error"


class HeadTooLarge(ApiError):
    """The headers come to more than any client of ours sends."""

    status = 431
    code = "headers_too_large"
    kind = "invalid_request_error"


class RateLimited(ApiError):
    """The caller's own limit; never the system's."""

    status = 429
    code = "rate_limit_exceeded"
    kind = "rate_limit_error"


#: The stable code of every error, for surfaces whose errors are only a sentence too.
ERROR_CODE = "x-error-code"
#: For clients that repeat a failed call by themselves (OpenAI's reads it): a repetition is another request and is
#: billed as one. On every refusal of a call that was, or may have been, accepted, unless its repetition is given the
#: outcome (api.repeated).
SHOULD_RETRY = "x-should-retry"
NO_RETRY: Mapping[str, str] = {SHOULD_RETRY: "false"}


class Unavailable(ApiError):
    """Something here is away or full; the same call may succeed later, and nothing was accepted."""

    status = 503
    code = "unavailable"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        retry_after_s: float = 1.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, code=code, headers={**retry_after(retry_after_s), **(headers or {})})


class AcceptanceUnknown(ApiError):
    """The log did not say in time whether it has the request; the message holds its id."""

    status = 503
    code = "acceptance_unknown"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers=NO_RETRY)


class AnswerLost(ApiError):
    """The request was accepted, but its result cannot be told to this caller; the message holds its id."""

    status = 503
    code = "answer_lost"

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, code=code, headers=NO_RETRY)


class ResultLost(ApiError):
    """The request has run and is billed, but its outputs are gone or not the ones it made; the message holds its id."""

    status = 502
    code = "output_lost"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message, code=code, headers=NO_RETRY)


class DeadlinePassed(ApiError):
    """The answer did not come in time; the message holds the request id."""

    status = 504
    code = "deadline_passed"


class ModelFailed(ApiError):
    """The model could not answer this input; not billed."""

    status = 500
    code = "model_failed"


def retry_after(seconds: float) -> dict[str, str]:
    """Headers that say when to come back: whole seconds rounded up, and milliseconds for clients that read them."""
    return {"Retry-After": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, math.ceil(seconds * 1000)))}


def body(error: ApiError, surface: Surface, request_id: UUID) -> tuple[dict[str, Any], str]:
    """The error as the surface's own clients expect it: a JSON document and its content type."""
    if surface is Surface.OIP:
        return {"error": error.message}, "application/json"
    if surface is Surface.OPENAI:
        inner = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
        return {"error": inner}, "application/json"
    if surface is Surface.REGISTRY:
        # Clients of schema registries know errors by number: the status, or the status and two more digits.
        number = int(error.code) if error.code.isdecimal() else error.status
        return {"error_code": number, "message": error.message}, REGISTRY_TYPE
    document: dict[str, Any] = {
        "type": "about:blank",
        "title": error.code.replace("_", " ").capitalize(),
        "status": error.status,
        "detail": error.message,
        "code": error.code,
        "request_id": str(request_id),
    }
    if error.param is not None:
        document["param"] = error.param
    return document, "application/problem+json"
