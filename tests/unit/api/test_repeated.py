"""Calls that repeat an earlier one, from the gate to the answer, over stand-ins for every server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest

from api.access.key_record import Terms
from api.errors import (
    AcceptanceUnknown,
    AnswerLost,
    ApiError,
    DeadlinePassed,
    Forbidden,
    RateLimited,
    Unauthorized,
    Unavailable,
)
from api.once.claims import OWNER_S, Entry
from api.once.once import Once
from api.repeated import Repeated
from schemas.records import InferenceFinished, InferenceRequested, Outcome
from tests.claims import MemoryBook, accepted, call, decisions
from tests.conditions import eventually
from tests.factories import finished
from tests.fakes import manifest, registered, routed
from tests.unit.api.test_gate import changed
from tests.unit.api.test_inference import Desk, ended, run, running

DIGEST = b"d" * 32


class Word:
    """Implements LastWord: what the log says in the end, or that it does not answer."""

    def __init__(self) -> None:
        self.says: InferenceFinished | None = None
        self.away = False
        self.asked: list[UUID] = []

    async def of(self, request_id: UUID, customer_id: str, *, since: datetime, until: datetime) -> Any:
        self.asked.append(request_id)
        if self.away:
            raise AnswerLost("the log is away", code="log_away")
        return self.says and replace(self.says, request_id=request_id)


class Told(Desk):
    """A desk whose calls say which call they are, and whose log ends every request well."""

    def __init__(self, **said: Any) -> None:
        super().__init__()
        self.book = MemoryBook()
        self.word = Word()
        self.once = self.world.once = Once(self.book, horizon_s=3600)
        self.repeated = Repeated(self.results, once=self.once, last_word=self.word)
        self.ends = ended()
        self.world.said = {"key": "k", "retry": None, "digest": DIGEST, **said}

    @property
    def ids(self) -> list[UUID]:
        return [record.request_id for record in self.published]

    def send_again(self) -> None:
        """The next call says that it is a repetition, if it counts them."""
        if self.world.said["key"] is None:
            self.world.said["retry"] += 1

    async def written(self) -> None:
        """What became of claims is in the book."""
        await self.once._notes.write()


KEYED: dict[str, Any] = {"key": "k"}
COUNTED: dict[str, Any] = {"key": None, "retry": 0}


@pytest.mark.parametrize("said", [KEYED, COUNTED])
async def test_a_repetition_is_given_the_first_outcome_takes_nothing_and_says_so(said: dict[str, Any]) -> None:
    desk = Told(**said)
    async with running(desk) as (inference, _):
        first = await run(inference, desk)
        await desk.written()
        desk.send_again()
        # Another version is routed by now, and the rate is used up.
        newer = manifest(producer="newer")
        desk.world.registry.all_versions.append(registered("digits", newer))
        desk.world.registry.all_routes = [routed("digits", newer)]
        desk.world.script.answer = [0, 1, 5, 0, 9, 0, 9]
        async with running(desk) as (elsewhere, _):
            again = await run(elsewhere, desk)
    assert desk.ids == [first.request_id] == [again.request_id]
    assert again.finished == first.finished
    assert again.admission.deployment.version == first.finished.version
    assert (first.headers.get("Idempotent-Replayed"), again.headers) == (None, {"Idempotent-Replayed": "true"})
    assert sum(desk.world.script.batches) == 1


async def test_who_sends_a_call_again_is_looked_up_anew_because_no_limiter_reads_the_revoked_set_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Told()
    async with running(desk) as (inference, gate):
        await run(inference, desk)
        await desk.written()

        async def revoked(authorization: str | None, operation: str) -> Any:
            raise Unauthorized("this key was revoked", code="revoked_api_key")

        monkeypatch.setattr(gate, "caller", revoked)
        with pytest.raises(Unauthorized):
            await run(inference, desk)


async def test_who_sends_a_call_again_with_a_key_that_may_not_call_its_model_any_more_is_not_told_its_outcome() -> None:
    desk = Told()
    async with running(desk) as (inference, _):
        await run(inference, desk)
        await desk.written()
        desk.world.meanwhile = lambda: changed(desk.world, terms=Terms(rates=(), models=frozenset({"other"})))
        with pytest.raises(Forbidden):
            await run(inference, desk)


async def test_twins_that_wait_for_one_request_are_both_told() -> None:
    desk = Told()
    desk.ends = lambda _: None
    async with running(desk) as (inference, _):
        calls = [asyncio.ensure_future(run(inference, desk)) for _ in range(3)]
        await eventually(lambda: desk.published)
        await desk.written()
        await eventually(lambda: desk.results.waiting == 3)
        desk.ends = ended()
        await desk.publish(desk.published.pop(), pool="default", spread=1)
        answers = await asyncio.gather(*calls)
        assert [a.request_id for a in answers] == desk.ids * 3
        assert desk.results.waiting == 0


async def test_a_call_whose_acceptance_is_unknown_is_published_again_as_it_was_decided_and_may_be_repeated() -> None:
    desk = Told(**COUNTED)
    desk.fails = AcceptanceUnknown("not confirmed")
    async with running(desk) as (inference, _):
        with pytest.raises(AcceptanceUnknown) as refused:
            await run(inference, desk)
        assert "x-should-retry" not in refused.value.headers
        (row,) = desk.book.rows
        # It was admitted at a price that has changed since.
        row.entry = replace(row.entry, decisions=replace(row.entry.decisions, price_id="older"))
        await desk.written()
        await desk.book.pass_s(OWNER_S)
        desk.fails = None
        desk.send_again()
        answer = await run(inference, desk)
        (record,) = desk.published
    decided = row.entry.decisions
    assert decided.price_id == "older"
    assert (record.request_id, record.occurred_at, record.deadline_at, record.version, record.price_id) == (
        decided.request_id,
        decided.admitted_at,
        decided.deadline_at,
        decided.version,
        decided.price_id,
    )
    assert "Idempotent-Replayed" not in answer.headers, "it took tokens of its own"


async def test_without_a_claim_a_client_is_told_not_to_repeat_what_may_have_been_accepted() -> None:
    desk = Desk()
    desk.fails = AcceptanceUnknown("not confirmed")
    async with running(desk) as (inference, _):
        with pytest.raises(AcceptanceUnknown) as refused:
            await run(inference, desk)
    assert refused.value.headers["x-should-retry"] == "false"


def over_the_rate(desk: Told) -> None:
    desk.world.script.answer = [0, 1, 5, 0, 9, 0, 9]


def the_log_is_away(desk: Told) -> None:
    desk.fails = Unavailable("the log is away", code="log_away")


@pytest.mark.parametrize("refuse", [over_the_rate, the_log_is_away])
async def test_a_refused_call_leaves_no_claim(refuse: Any) -> None:
    desk = Told()
    refuse(desk)
    async with running(desk) as (inference, _):
        with pytest.raises((RateLimited, Unavailable)):
            await run(inference, desk)
        await desk.written()
        assert desk.book.rows == []
        desk.world.script.answer, desk.fails = None, None
        await run(inference, desk)
        assert len(desk.ids) == 1


#: Outcome, error code, whether whoever repeats the call is told it.
ENDS = [
    (Outcome.FAILED, "invalid_input", True),
    (Outcome.FAILED, "result_too_large", True),
    (Outcome.FAILED, "run_failed", True),
    (Outcome.FAILED, "a code of tomorrow", True),
    (Outcome.EXPIRED, "deadline_exceeded", False),
    (Outcome.CANCELLED, None, False),
    (Outcome.FAILED, "unavailable", False),
    (Outcome.FAILED, "input_lost", False),
    (Outcome.FAILED, "internal", False),
    (Outcome.FAILED, "model_unavailable", False),
]


@pytest.mark.parametrize(("outcome", "code", "is_kept"), ENDS)
async def test_what_is_not_the_requests_own_fault_and_not_billed_is_not_kept(
    outcome: Outcome, code: str | None, is_kept: bool
) -> None:
    desk = Told()
    failed = ended(outcome=outcome, outputs=(), quantities={}, error_code=code, error_message="because")
    desk.ends = failed
    async with running(desk) as (inference, _):
        with pytest.raises(ApiError) as first:
            await run(inference, desk)
        await desk.written()
        desk.ends = ended()
        if not is_kept:
            assert (await run(inference, desk)).finished.outcome is Outcome.SUCCEEDED
            assert first.value.headers.get("x-should-retry") != "false"
        else:
            with pytest.raises(type(first.value)) as again:
                await run(inference, desk)
            assert (again.value.message, again.value.request_id) == (first.value.message, desk.ids[0])
    assert len(desk.ids) == (1 if is_kept else 2)
    assert len(set(desk.ids)) == len(desk.ids)


async def test_a_twin_of_a_request_that_came_to_nothing_runs_in_its_place() -> None:
    """In the same call, and one of several twins for all of them."""
    desk = Told()
    desk.ends = lambda _: None
    async with running(desk) as (inference, _):
        first = asyncio.ensure_future(run(inference, desk))
        await eventually(lambda: desk.published)
        await desk.written()
        twins = [asyncio.ensure_future(run(inference, desk)) for _ in range(3)]
        await eventually(lambda: desk.results.waiting == 4)
        desk.ends = ended(outcome=Outcome.CANCELLED, outputs=(), quantities={})
        cancelled = desk.published.pop()
        await desk.publish(cancelled, pool="default", spread=1)
        desk.ends = ended()
        with pytest.raises(ApiError):
            await first
        writing = asyncio.ensure_future(desk.once.run())
        answers = await asyncio.gather(*twins)
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
    assert len(desk.ids) == 2
    assert {a.request_id for a in answers} == {desk.ids[1]} != {desk.ids[0]}


def _long_ago() -> Entry:
    """The claim of a call an hour ago; nobody has heard of its request."""
    decided = decisions(version=manifest().version)
    hour = timedelta(hours=1)
    decided = replace(decided, admitted_at=decided.admitted_at - hour, deadline_at=decided.deadline_at - hour)
    return Entry.of(call(key="k", body=DIGEST), decided)


@pytest.mark.parametrize("is_accepted", [True, False])
async def test_a_request_of_which_the_log_knows_no_end_is_run_again_under_another_id(is_accepted: bool) -> None:
    desk = Told()
    earlier = _long_ago()
    await desk.book.enter([earlier])
    if is_accepted:
        await desk.book.note([accepted(earlier)])
    await desk.book.pass_s(OWNER_S)
    async with running(desk) as (inference, _):
        await run(inference, desk)
    assert desk.word.asked == [earlier.decisions.request_id]
    assert len(desk.ids) == 1
    assert desk.ids != [earlier.decisions.request_id]


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.EXPIRED])
async def test_the_end_that_the_log_knows_counts(outcome: Outcome) -> None:
    desk = Told()
    earlier = _long_ago()
    desk.word.says = finished(outcome=outcome)
    await desk.book.enter([earlier])
    await desk.book.pass_s(OWNER_S)
    async with running(desk) as (inference, _):
        answer = await run(inference, desk)
    assert (answer.request_id == earlier.decisions.request_id) is (outcome is Outcome.SUCCEEDED)
    assert len(desk.ids) == (0 if outcome is Outcome.SUCCEEDED else 1)


async def test_without_the_log_nothing_is_run_that_may_have_run() -> None:
    desk = Told()
    desk.word.away = True
    await desk.book.enter([_long_ago()])
    await desk.book.pass_s(OWNER_S)
    async with running(desk) as (inference, _):
        with pytest.raises(AnswerLost) as refused:
            await run(inference, desk)
    assert "x-should-retry" not in refused.value.headers
    assert desk.ids == []


async def test_a_request_that_may_still_succeed_is_not_run_again() -> None:
    """Its deadline has just passed: a worker may be handing over its result."""
    desk = Told()
    earlier = _long_ago()
    now = datetime.now(timezone.utc)
    earlier = replace(earlier, decisions=replace(earlier.decisions, deadline_at=now - timedelta(seconds=1)))
    await desk.book.enter([earlier])
    await desk.book.pass_s(OWNER_S)
    desk.world.timeout_s = 0.2
    async with running(desk) as (inference, _):
        with pytest.raises(DeadlinePassed):
            await run(inference, desk)
    assert (desk.ids, desk.word.asked) == ([], [])


async def test_a_caller_that_leaves_while_its_request_is_published_finds_it_accepted_when_it_comes_again() -> None:
    desk = Told()
    reached, may_go_on = asyncio.Event(), asyncio.Event()

    async def slow(record: InferenceRequested, *, pool: str, spread: int) -> None:
        reached.set()
        await may_go_on.wait()
        await Desk.publish(desk, record, pool=pool, spread=spread)

    desk.publish = slow  # type: ignore[method-assign]
    async with running(desk) as (inference, _):
        leaves = asyncio.ensure_future(run(inference, desk))
        await reached.wait()
        leaves.cancel()
        with suppress(asyncio.CancelledError):
            await leaves
        may_go_on.set()
        await eventually(lambda: desk.published)
        await desk.written()
        answer = await run(inference, desk)
    assert desk.ids == [answer.request_id]


async def test_an_answer_counts_once_it_was_told() -> None:
    desk = Told(**COUNTED)
    async with running(desk) as (inference, _):
        answer = await run(inference, desk)
        await desk.written()
        assert [r.answered_s for r in desk.book.rows] == [None]
        inference.answered(answer)
        await desk.written()
        assert [r.answered_s for r in desk.book.rows] == [desk.book.clock.now_s]
