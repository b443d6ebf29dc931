from __future__ import annotations

from uuid import UUID

import pytest

from api.errors import (
    ApiError,
    BadInput,
    DeadlinePassed,
    NotFound,
    RateLimited,
    Surface,
    Unauthorized,
    Unavailable,
    body,
    retry_after,
    surface_of,
)

ID = UUID(int=7)


@pytest.mark.parametrize(
    ("path", "surface"),
    [
        ("/v2", Surface.OIP),
        ("/v2/models/digits/infer", Surface.OIP),
        ("/v2x", Surface.PROBLEM),
        ("/v1/embeddings", Surface.OPENAI),
        ("/v1/models", Surface.OPENAI),
        ("/v1/models/minilm", Surface.OPENAI),
        ("/v1/chat/completions", Surface.OPENAI),
        ("/embeddings", Surface.OPENAI),
        ("/v1/usage", Surface.PROBLEM),
        ("/nowhere", Surface.PROBLEM),
    ],
)
def test_a_path_decides_the_shape_of_its_errors(path: str, surface: Surface) -> None:
    assert surface_of(path) is surface


def test_each_surface_has_its_own_shape() -> None:
    error = BadInput("input 'x': wrong", code="invalid_tensor", param="x")
    assert body(error, Surface.OIP, ID) == ({"error": "input 'x': wrong"}, "application/json")
    document, kind = body(error, Surface.OPENAI, ID)
    assert kind == "application/json"
    assert document == {
        "error": {
            "message": "input 'x': wrong",
            "type": "invalid_request_error",
            "param": "x",
            "code": "invalid_tensor",
        }
    }
    document, kind = body(error, Surface.PROBLEM, ID)
    assert kind == "application/problem+json"
    assert document["status"] == 400
    assert document["detail"] == "input 'x': wrong"
    assert document["param"] == "x"
    assert document["request_id"] == str(ID)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadInput("x"), 400),
        (Unauthorized("x"), 401),
        (NotFound("x"), 404),
        (RateLimited("x"), 429),
        (ApiError("x"), 500),
        (Unavailable("x"), 503),
        (DeadlinePassed("x"), 504),
    ],
)
def test_statuses(error: ApiError, status: int) -> None:
    assert error.status == status


def test_retry_after_is_rounded_up_so_that_coming_back_then_succeeds() -> None:
    assert retry_after(0.0101) == {"Retry-After": "1", "retry-after-ms": "11"}
    assert retry_after(2.0) == {"Retry-After": "2", "retry-after-ms": "2000"}
    assert retry_after(0) == {"Retry-After": "1", "retry-after-ms": "1"}


def test_unavailable_always_says_when_to_come_back() -> None:
    assert Unavailable("x", retry_after_s=4.2).headers["Retry-After"] == "5"


def test_no_error_leaks_its_headers_into_another() -> None:
    Unauthorized("x").headers["extra"] = "1"
    assert "extra" not in Unauthorized("x").headers
