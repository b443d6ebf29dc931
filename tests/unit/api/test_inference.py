from __future__ import annotations

import pytest

from api.errors import ApiError, BadInput, DeadlinePassed, ModelFailed, Unavailable
from api.inference import failure
from schemas.records import Outcome
from tests.factories import finished


@pytest.mark.parametrize(
    ("outcome", "code", "kind"),
    [
        (Outcome.FAILED, "invalid_input", BadInput),
        (Outcome.FAILED, "result_too_large", BadInput),
        (Outcome.FAILED, "unavailable", Unavailable),
        (Outcome.FAILED, "model_unavailable", ModelFailed),
        (Outcome.FAILED, None, ModelFailed),
        (Outcome.FAILED, "a code of tomorrow", ModelFailed),
        (Outcome.EXPIRED, None, DeadlinePassed),
        (Outcome.CANCELLED, None, BadInput),
        (Outcome.UNKNOWN, None, ModelFailed),
    ],
)
def test_every_end_but_success_is_an_error_that_names_the_request(
    outcome: Outcome, code: str | None, kind: type[ApiError]
) -> None:
    result = finished(outcome=outcome, error_code=code, error_message="because", outputs=())
    error = failure(result)
    assert type(error) is kind
    assert str(result.request_id) in error.message


def test_the_workers_words_reach_the_caller() -> None:
    error = failure(finished(outcome=Outcome.FAILED, error_code="invalid_input", error_message="text 3 is too long"))
    assert "text 3 is too long" in error.message
    assert error.code == "invalid_input"
