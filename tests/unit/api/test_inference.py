from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock
from uuid import UUID

import pytest

from api import inference as module
from api.errors import (
    AcceptanceUnknown,
    AnswerLost,
    ApiError,
    BadInput,
    DeadlinePassed,
    ModelFailed,
    ResultLost,
    TooLarge,
    Unavailable,
)
from api.gate import Gate
from api.inference import Answer, Inference, failure
from api.large_tensors import LargeTensors
from api.repeated import Repeated
from api.request_log import RequestLog
from api.results.waiting import Results
from schemas.claims import checked_in
from schemas.codec import encode
from schemas.ids import new_request_id
from schemas.keys import RedisKeys
from schemas.records import InferenceFinished, InferenceRequested, Outcome
from tests.blob_store import FakeBlobStore, claim_check
from tests.conditions import eventually
from tests.factories import finished
from tests.fake_log import result_log
from tests.fakes import FakeCache
from tests.unit.api.test_gate import World, space_of

KEYS = RedisKeys(namespace="n")


@pytest.mark.parametrize(
    ("outcome", "code", "kind"),
    [
        (Outcome.FAILED, "invalid_input", BadInput),
        (Outcome.FAILED, "result_too_large", BadInput),
        (Outcome.FAILED, "unavailable", Unavailable),
        (Outcome.FAILED, "input_lost", Unavailable),
        (Outcome.FAILED, "input_altered", Unavailable),
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


class Desk:
    """The use case over stand-ins: `ends` is how the worker ends each request, `published` what reached the log."""

    def __init__(self) -> None:
        self.world = World()
        self.cache = FakeCache()
        self.results = Results(self.cache, KEYS, result_log(), instance="api-1")
        self.published: list[InferenceRequested] = []
        self.ends: Callable[[InferenceRequested], InferenceFinished | None] = lambda _: None
        self.fails: ApiError | None = None
        self.store = FakeBlobStore()
        self.inline_bytes = 256 * 1024
        self.gone: list[tuple[UUID, str]] = []
        self.repeated: Repeated | None = None

    async def publish(self, record: InferenceRequested, *, pool: str, spread: int) -> None:
        if self.fails is not None:
            raise self.fails
        self.published.append(record)
        result = self.ends(record)
        if result is not None:
            self.cache.values[KEYS.result(record.request_id)] = encode(result)
            self.cache.hints.put_nowait(record.request_id.bytes)


@asynccontextmanager
async def running(desk: Desk, *, deadline_s: float = 20.0) -> AsyncIterator[tuple[Inference, Gate]]:
    desk.world.deadline_s = deadline_s
    gate = await desk.world.gate()
    log = cast(RequestLog, desk)
    inference = Inference(
        gate=gate,
        request_log=log,
        results=desk.results,
        large=LargeTensors(claim_check(desk.store, inline_bytes=desk.inline_bytes)),
        instance="api-1",
        repeated=desk.repeated,
        gone=lambda request_id, customer_id: desk.gone.append((request_id, customer_id)),
    )
    listening = asyncio.ensure_future(desk.results.listen())
    await eventually(lambda: desk.cache.subscriptions)
    yield inference, gate
    listening.cancel()
    with suppress(asyncio.CancelledError):
        await listening


async def run(inference: Inference, desk: Desk) -> Answer:
    async with inference.run(desk.world, new_request_id(), None) as answer:
        return answer


def ended(**changes: Any) -> Callable[[InferenceRequested], InferenceFinished]:
    return lambda record: finished(record, **changes)


def unaccepted(desk: Desk) -> None:
    desk.fails = Unavailable("the log is away", code="log_away")


def unknown(desk: Desk) -> None:
    desk.fails = AcceptanceUnknown("not confirmed")


def failed(desk: Desk) -> None:
    desk.ends = ended(outcome=Outcome.FAILED, outputs=(), quantities={}, error_code="x", error_message="y")


def at_fault(desk: Desk) -> None:
    desk.ends = ended(outcome=Outcome.FAILED, outputs=(), quantities={}, error_code="invalid_input", error_message="y")


def expired(desk: Desk) -> None:
    desk.ends = ended(outcome=Outcome.EXPIRED, outputs=(), quantities={})


def never(desk: Desk) -> None:
    desk.world.timeout_s = 0.05


RATE_HEADERS = {
    "RateLimit-Policy",
    "RateLimit",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
}


@pytest.mark.parametrize("end", [unaccepted, unknown, failed, at_fault, expired, never])
async def test_whatever_the_end_once_tokens_were_taken_the_caller_hears_what_is_left(
    end: Callable[[Desk], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.01)
    desk = Desk()
    end(desk)
    async with running(desk) as (inference, gate):
        with pytest.raises(ApiError) as refused:
            await run(inference, desk)
        assert set(refused.value.headers) >= RATE_HEADERS
        assert (desk.results.waiting, space_of(gate).in_flight) == (0, 0)


async def test_callers_that_hang_up_leave_nothing_behind() -> None:
    """At any point: while tokens are taken, before the log has it, while waiting."""
    desk = Desk()
    async with running(desk) as (inference, gate):
        desk.world.script.hold.clear()
        charged = [asyncio.ensure_future(run(inference, desk)) for _ in range(30)]
        await eventually(lambda: space_of(gate).in_flight == 30)
        for call in charged:
            call.cancel()
        await asyncio.wait(charged)
        desk.world.script.hold.set()
        waiting = [asyncio.ensure_future(run(inference, desk)) for _ in range(100)]
        await eventually(lambda: desk.results.waiting == 100)
        for call in waiting:
            call.cancel()
        await asyncio.wait(waiting)
        assert all(call.cancelled() for call in (*charged, *waiting))
        # What the log has is not wanted any more; what it never had is nobody's work.
        assert sorted(desk.gone) == sorted((r.request_id, r.customer_id) for r in desk.published)
        assert (desk.results.waiting, space_of(gate).in_flight) == (0, 0)
        desk.ends = ended()
        assert (await run(inference, desk)).finished.outcome is Outcome.SUCCEEDED
        assert len(desk.gone) == 100


@pytest.mark.parametrize(("claim", "is_repeated"), [(True, False), (False, True), (True, True)])
async def test_who_can_come_again_for_the_outcome_or_repeats_a_call_gives_nothing_up(
    claim: bool, is_repeated: bool
) -> None:
    desk = Desk()
    async with running(desk) as (inference, gate), gate.admitted(desk.world, new_request_id()) as admission:
        changed = replace(admission, claim=cast(Any, Mock()) if claim else None)
        if is_repeated:
            changed = replace(changed, charge=None)
        call = asyncio.ensure_future(inference._finished(changed, None))
        await eventually(lambda: desk.results.waiting == 1)
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert desk.gone == []


async def test_large_inputs_are_in_the_store_before_the_log_has_their_request() -> None:
    desk = Desk()
    desk.inline_bytes = 0
    desk.store.open.clear()
    desk.ends = ended()
    async with running(desk) as (inference, _):
        call = asyncio.ensure_future(run(inference, desk))
        await eventually(lambda: desk.store.calls)
        assert desk.published == []
        desk.store.open.set()
        assert (await call).is_large, "its outputs are more than nothing too"
        (record,) = desk.published
        assert [t.blob.key for t in record.inputs if t.blob] == list(desk.store.objects)


async def test_without_the_store_the_record_carries_its_inputs_and_is_refused_only_if_the_log_does_not_take_it() -> (
    None
):
    desk = Desk()
    desk.inline_bytes = 0
    desk.store.away = True
    desk.ends = ended()
    async with running(desk) as (inference, _):
        await run(inference, desk)
        assert [t.blob for t in desk.published[0].inputs] == [None]
        desk.fails = TooLarge("9 MB")
        with pytest.raises(Unavailable, match="was not accepted") as refused:
            await run(inference, desk)
        assert refused.value.code == "large_inputs_away"
        assert "Retry-After" in refused.value.headers


@pytest.mark.parametrize(("away", "kind"), [(False, ResultLost), (True, AnswerLost)])
async def test_outputs_are_fetched_and_told_when_they_cannot_be(
    away: bool, kind: type[ApiError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.01)
    desk = Desk()

    def ends(record: InferenceRequested) -> InferenceFinished:
        whole = finished(record)
        carried, kept = checked_in(whole.outputs, record.request_id, inline_bytes=0)
        desk.store.objects.update(kept)
        return finished(record, outputs=carried)

    desk.ends = ends
    async with running(desk) as (inference, gate):
        answer = await run(inference, desk)
        assert answer.finished.outputs == finished().outputs
        assert not answer.is_large
        desk.store.away = away
        desk.store.objects = desk.store.objects if away else Forgetful()
        desk.world.timeout_s = 0.1 if away else None
        with pytest.raises(kind) as refused:
            await run(inference, desk)
        assert set(refused.value.headers) >= RATE_HEADERS
        assert (desk.results.waiting, space_of(gate).in_flight) == (0, 0)


class Forgetful(dict[str, bytes]):
    """Keeps nothing."""

    def __contains__(self, key: object) -> bool:
        return False
