"""Whose an error is: each row of the table, and the bound on unforeseen ones."""

from __future__ import annotations

import asyncio

import pytest

from gpu_worker.blame import Blame, Unserviceable
from gpu_worker.endings import Failure
from gpu_worker.errors import InputLost, ItemError, MachineError, ModelError


def judged(blame: Blame, error: BaseException, *, requests: int = 1) -> Failure:
    failures: list[Failure] = []
    with blame.judging("running it", failures.append, requests=requests):
        raise error
    (failure,) = failures
    return failure


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ItemError("the words"), "invalid_input"),
        (InputLost("the words"), "input_lost"),
        (ModelError("the words"), "model_unavailable"),
    ],
)
def test_what_code_foresaw_is_told_in_its_words_however_often(error: Exception, code: str) -> None:
    blame = Blame(most_in_a_row=2)
    for _ in range(9):
        assert judged(blame, error) == Failure(code=code, message="the words")
    assert not blame.counts


@pytest.mark.parametrize(
    "error", [MachineError("lost"), asyncio.CancelledError(), KeyboardInterrupt(), SystemExit(), GeneratorExit()]
)
def test_what_is_the_processs_passes(error: BaseException) -> None:
    with pytest.raises(type(error)):
        judged(Blame(), error)


def test_the_unforeseen_is_the_requests_and_says_what_it_was(caplog: pytest.LogCaptureFixture) -> None:
    blame = Blame()
    failure = judged(blame, ValueError("embedded null byte\nand more"))
    assert failure.code == "internal"
    assert failure.message == "the worker failed while running it: ValueError: embedded null byte"
    assert "Traceback" in caplog.text
    assert blame.counts == {"unforeseen": 1}


def test_one_too_many_in_a_row_is_the_processs() -> None:
    blame = Blame(most_in_a_row=3)
    for _ in range(2):
        judged(blame, KeyError("x"))
    blame.served()
    for _ in range(2):
        judged(blame, KeyError("x"))
    with pytest.raises(Unserviceable, match=r"3 requests in a row .* while running it: KeyError"):
        judged(blame, KeyError("x"))


def test_of_several_it_is_nobodys_yet() -> None:
    blame = Blame(most_in_a_row=1)
    judged(blame, KeyError("x"), requests=2)
    with pytest.raises(Unserviceable):
        judged(blame, KeyError("x"))


def test_inside_another_judgement_the_bound_still_ends_the_process() -> None:
    blame = Blame(most_in_a_row=1)
    with pytest.raises(Unserviceable, match="1 requests in a row"), blame.judging("checking it", print):
        judged(blame, KeyError("x"))
