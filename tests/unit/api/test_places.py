"""For how long a request has its place among the unfinished: until its end was seen, or its deadline has passed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from api import inference as module
from api.errors import AcceptanceUnknown, AnswerLost, ApiError, RateLimited, TooLarge, Unavailable
from api.inference import Inference
from api.limits.limiter import LimiterAway
from api.limits.plans import DECIDE, RELEASE
from api.once.claims import OWNER_S
from infra.redis import LuaCall
from schemas.claims import checked_in
from schemas.records import InferenceFinished, InferenceRequested, Outcome
from tests.conditions import eventually
from tests.factories import finished
from tests.fakes import FakeScript
from tests.unit.api.test_inference import Desk, ended, run, running
from tests.unit.api.test_repeated import Told

_ID = re.compile(rb"[0-9a-f]{32}")


class Places(FakeScript):
    """Keeps places as the scripts do, `most` of them; with `loses_answers` what it has taken is not told."""

    def __init__(self, most: int = 1) -> None:
        super().__init__()
        self.most = most
        self.held: set[UUID] = set()
        self.loses_answers = False

    async def run(self, calls: Sequence[LuaCall]) -> Sequence[Any]:
        answers = await super().run(calls)
        answers = [self._kept(c, a) for c, a in zip(calls, answers, strict=True)]
        if self.loses_answers:
            raise LimiterAway("no answer in time")
        return answers

    def _kept(self, c: LuaCall, answer: Any) -> Any:
        found = _ID.search(c.tail)
        if found is None:  # nothing about a request
            return answer
        request_id = UUID(found[0].decode())
        if c.start.script is RELEASE:
            self.held.discard(request_id)
        elif c.start.script is DECIDE:
            if request_id not in self.held and len(self.held) >= self.most:
                return [-2, 1, 1]
            self.held.add(request_id)
        return answer


@asynccontextmanager
async def with_one_place(desk: Desk) -> AsyncIterator[tuple[Inference, Places]]:
    """A desk for a key that may have one unfinished request."""
    desk.world.script = places = Places()
    records = desk.world.keys.records
    record = records[desk.world.key.key_id]
    records[record.key_id] = replace(record, terms=replace(record.terms, max_concurrent=1))
    async with running(desk) as (inference, _):
        yield inference, places


async def settled(desk: Desk, places: Places) -> int:
    """How many requests have places, here and by Redis, once what was said about them has arrived."""
    limiter = desk.world.gate_made._limiter
    await eventually(lambda: not limiter._releases and (limiter._sender is None or limiter._sender.done()))
    here = {UUID(r) for held in limiter._local._places.values() for r in held}
    assert here == places.held
    return len(places.held)


async def left(inference: Inference, desk: Desk, until: Callable[[], object]) -> None:
    """A call whose caller hangs up then."""
    call = asyncio.ensure_future(run(inference, desk))
    await eventually(until)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()


@pytest.mark.parametrize("told", [False, True])
async def test_callers_that_hang_up_have_no_more_requests_unfinished_than_they_may(told: bool) -> None:
    desk = Told() if told else Desk()
    desk.ends = lambda _: None
    async with with_one_place(desk) as (inference, places):
        await left(inference, desk, lambda: desk.results.waiting and desk.published)
        for n in range(3):
            desk.world.said["key"] = f"another {n}" if told else None
            with pytest.raises(RateLimited, match="1 unfinished request"):
                await run(inference, desk)
        assert len(desk.published) == 1
        assert await settled(desk, places) == 1


@pytest.mark.parametrize("told", [False, True])
async def test_who_hangs_up_while_the_request_is_published_has_a_request_that_may_run(told: bool) -> None:
    desk = Told() if told else Desk()
    reached, may_go_on = asyncio.Event(), asyncio.Event()

    async def slow(record: InferenceRequested, *, pool: str, spread: int) -> None:
        reached.set()
        await may_go_on.wait()

    desk.publish = slow  # type: ignore[method-assign]
    async with with_one_place(desk) as (inference, places):
        await left(inference, desk, reached.is_set)
        assert await settled(desk, places) == 1
        may_go_on.set()


async def test_who_hangs_up_before_the_request_is_published_leaves_its_place() -> None:
    desk = Desk()
    desk.inline_bytes = 0
    desk.store.open.clear()
    async with with_one_place(desk) as (inference, places):
        await left(inference, desk, lambda: desk.store.calls)
        assert await settled(desk, places) == 0
        desk.store.open.set()


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("slow", [False, True])
async def test_a_call_that_may_have_been_overtaken_does_not_free_the_place_of_whoever_overtook_it(
    told: bool, slow: bool
) -> None:
    desk = Told() if told else Desk()
    desk.inline_bytes = 0
    desk.store.open.clear()
    async with with_one_place(desk) as (inference, places):
        now = desk.world.gate_made._now
        call = asyncio.ensure_future(run(inference, desk))
        await eventually(lambda: desk.store.calls)
        desk.world.gate_made._now = lambda: now() + timedelta(seconds=OWNER_S * slow)  # as if it had been frozen
        call.cancel()
        await asyncio.wait([call])
        assert await settled(desk, places) == int(told and slow)
        desk.store.open.set()


def answered(desk: Desk) -> None:
    desk.ends = ended()


def failed(desk: Desk) -> None:
    desk.ends = ended(outcome=Outcome.FAILED, outputs=(), quantities={}, error_code="x", error_message="y")


def expired(desk: Desk) -> None:
    desk.ends = ended(outcome=Outcome.EXPIRED, outputs=(), quantities={})


def outputs_away(desk: Desk) -> None:
    desk.store.away = True
    desk.world.timeout_s = 0.1

    def ends(record: InferenceRequested) -> InferenceFinished:
        carried, _ = checked_in(finished(record).outputs, record.request_id, inline_bytes=0)
        return finished(record, outputs=carried)

    desk.ends = ends


def log_away(desk: Desk) -> None:
    desk.fails = Unavailable("the log is away", code="log_away")


def too_large(desk: Desk) -> None:
    desk.fails = TooLarge("9 MB")


def unknown(desk: Desk) -> None:
    desk.fails = AcceptanceUnknown("not confirmed")


def never(desk: Desk) -> None:
    desk.world.timeout_s = 0.05


def result_lost(desk: Desk) -> None:
    async def lost(_waiter: object, *, within_s: float) -> InferenceFinished:
        raise AnswerLost("its result cannot be told", code="answer_lost")

    desk.results.wait = lost  # type: ignore[assignment,method-assign]


SEEN = [answered, failed, expired, outputs_away, log_away, too_large]
UNSEEN = [unknown, never, result_lost]


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("end", SEEN + UNSEEN)
async def test_a_place_is_free_once_the_end_was_seen_or_the_log_has_refused_the_request(
    end: Callable[[Desk], None], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.01)
    desk = Told() if told else Desk()
    if told:
        desk.ends = lambda _: None
    end(desk)
    async with with_one_place(desk) as (inference, places):
        if end is answered:
            await run(inference, desk)
        else:
            with pytest.raises(ApiError):
                await run(inference, desk)
        assert await settled(desk, places) == (1 if end in UNSEEN else 0)


@pytest.mark.parametrize("end", ["refused by the log", "refused by the limiter", "gone"])
async def test_who_takes_a_call_over_and_is_refused_leaves_the_place_of_the_one_before(end: str) -> None:
    """The gateway that had it first may have put it on the log."""
    desk = Told()
    desk.fails = AcceptanceUnknown("not confirmed")
    async with with_one_place(desk) as (inference, places):
        with pytest.raises(AcceptanceUnknown):
            await run(inference, desk)
        await desk.written()
        await desk.book.pass_s(OWNER_S)
        if end == "refused by the log":
            log_away(desk)
        places.loses_answers = end == "refused by the limiter"
        if end == "gone":
            places.hold.clear()
            asked = len(places.calls)
            await left(inference, desk, lambda: len(places.calls) > asked)
            places.hold.set()
        else:
            with pytest.raises(ApiError):
                await run(inference, desk)
        places.loses_answers = False
        assert await settled(desk, places) == 1


async def test_a_call_that_joins_another_frees_nothing_when_it_leaves() -> None:
    desk = Told()
    desk.ends = lambda _: None
    async with with_one_place(desk) as (inference, places):
        first = asyncio.ensure_future(run(inference, desk))
        await eventually(lambda: desk.published)
        await desk.written()
        await left(inference, desk, lambda: desk.results.waiting == 2)
        assert await settled(desk, places) == 1
        desk.ends = ended()
        await desk.publish(desk.published.pop(), pool="default", spread=1)
        await first
        assert await settled(desk, places) == 0
