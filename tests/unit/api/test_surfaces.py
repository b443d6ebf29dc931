from __future__ import annotations

import base64
import json
import struct
from datetime import datetime, timezone
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from api.admission.caller import Caller
from api.errors import BadInput, NotFound
from api.middleware import as_api_error, envelope
from api.services import REQUEST_ID, TRACEPARENT
from api.surfaces.call import HttpCall
from api.surfaces.http import parse_object
from api.surfaces.openai import _texts, _vectors
from schemas.tensors import Tensor

NOW = datetime(2026, 3, 1, 12, 34, 56, tzinfo=timezone.utc)
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def around(path: str, raised: Exception | None = None, **headers: str) -> tuple[web.StreamResponse, web.Request]:
    request = make_mocked_request("POST", path, headers=headers)

    async def handler(_: web.Request) -> web.Response:
        if raised is not None:
            raise raised
        return web.Response(body=b"{}")

    return await envelope(request, handler), request


async def test_every_answer_carries_the_id_of_its_request() -> None:
    response, request = await around("/v2/models/m/infer")
    assert response.headers["x-request-id"] == str(request[REQUEST_ID])
    assert request[REQUEST_ID].version == 7
    refused, request = await around("/v1/usage", NotFound("nothing"))
    assert refused.headers["x-request-id"] == str(request[REQUEST_ID])


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (TRACE, TRACE),
        ("00-" + "0" * 32 + "-00f067aa0ba902b7-01", None),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01", None),
        ("ff" + TRACE[2:], None),
        (TRACE.upper(), None),
        ("x" * 10_000, None),
    ],
)
async def test_only_a_valid_trace_context_is_passed_on(sent: str, kept: str | None) -> None:
    _, request = await around("/v2/models/m/infer", traceparent=sent)
    assert request[TRACEPARENT] == kept


async def test_errors_are_written_in_the_surfaces_shape_with_their_headers() -> None:
    error = BadInput("wrong", headers={"Retry-After": "3"})
    for path, key in (("/v2/models/m/infer", "error"), ("/v1/embeddings", "error"), ("/v1/usage", "detail")):
        response, _ = await around(path, error)
        assert response.status == 400
        assert response.headers["Retry-After"] == "3"
        assert key in json.loads(response.body)  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/models/m/infer", "/v1/usage", "/registry/subjects"])
async def test_every_error_has_its_code_in_a_header(path: str) -> None:
    response, _ = await around(path, BadInput("wrong", code="too_odd"))
    assert response.headers["x-error-code"] == "too_odd"


async def test_two_idempotency_keys_are_refused_as_none_that_fits_is() -> None:
    caller = Caller(customer_id="c", key_id="k", limits=())
    for keys in (["a", "b"], ["a", "a"], [""], ["\u00e9"]):
        request = make_mocked_request(
            "POST", "/v1/embeddings", headers=CIMultiDict(("Idempotency-Key", k) for k in keys)
        )
        with pytest.raises(BadInput, match="Idempotency-Key: expected one, of 1 to 255 printable ASCII") as refused:
            await HttpCall(request).sameness(caller)
        assert refused.value.code == "bad_idempotency_key"


async def test_a_bug_is_answered_without_its_words_and_logged_with_them(caplog: pytest.LogCaptureFixture) -> None:
    response, request = await around("/v2/models/m/infer", RuntimeError("the password is hunter2"))
    assert response.status == 500
    assert b"hunter2" not in response.body  # type: ignore[attr-defined]
    assert "hunter2" in caplog.text
    assert caplog.records[-1].fields["request_id"] == request[REQUEST_ID]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (web.HTTPNotFound(), 404),
        (web.HTTPMethodNotAllowed("PUT", ["GET"]), 405),
        (web.HTTPRequestEntityTooLarge(max_size=1, actual_size=2), 413),
        (web.HTTPBadRequest(), 400),
        (ValueError("x"), 500),
    ],
)
def test_the_librarys_refusals_become_ours(raised: Exception, status: int) -> None:
    assert as_api_error(raised).status == status


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b'{"a": NaN}', b"[" * 5000, b'{"a":"\\ud800"}', b"\xff"]
)
def test_bodies_that_are_not_a_json_object(body: bytes) -> None:
    with pytest.raises(BadInput) as refused:
        parse_object(body)
    assert refused.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "input: expected a string"),
        ([], "input: expected a string or a non-empty array"),
        (7, "input: expected a string"),
        ([1, 2, 3], "tokens are not supported"),
        ([[1, 2]], "tokens are not supported"),
        (["a", None], r"input\[1\]: expected a string, found null"),
        (["a", True], r"input\[1\]: expected a string, found boolean"),
        (["a", ""], r"input\[1\]: .* empty string"),
        ("", r"input\[0\]: .* empty string"),
    ],
)
def test_embedding_inputs_that_are_refused(found: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        _texts(found)


def test_vectors_are_the_same_in_both_encodings() -> None:
    tensor = Tensor(name="embedding", datatype="FP32", shape=(2, 3), data=struct.pack("<6f", *range(6)))
    numbers = list(_vectors(tensor, False))
    assert numbers == [(0.0, 1.0, 2.0), (3.0, 4.0, 5.0)]
    assert [struct.unpack("<3f", base64.b64decode(v)) for v in _vectors(tensor, True)] == numbers
