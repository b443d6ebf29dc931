"""The loop's order of acts, with ports that only remember: what is committed when, who fails with whom, what waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from gpu_worker import endings
from gpu_worker import worker as module
from gpu_worker.batching import Limits
from gpu_worker.blame import MOST_IN_A_ROW, Blame, Unserviceable
from gpu_worker.endings import Answer, Ended, Failure, Ran
from gpu_worker.errors import InputLost, MachineError, ModelError
from gpu_worker.ports import Delivery
from gpu_worker.suspects import Suspects
from gpu_worker.worker import Worker
from schemas.records import InferenceRequested, Outcome, Task
from schemas.tensors import Blob
from tests.conditions import eventually
from tests.factories import finished, floats, requested

GOOD = "a" * 64
SLOW = "b" * 64
BROKEN = "c" * 64


class RememberingInbox:
    def __init__(self) -> None:
        self.arriving: asyncio.Queue[list[Delivery]] = asyncio.Queue()
        self.finished: list[Delivery] = []
        self.lost: set[int] = set()
        self._offset = 0

    def put(self, *requests: InferenceRequested, ended: Ended | None = None) -> None:
        arrived = []
        for request in requests:
            place = {"partition": 0, "offset": self._offset, "generation": 1, "size_bytes": 1}
            arrived.append(Delivery(request=request, ended=ended, **place))
            self._offset += 1
        self.arriving.put_nowait(arrived)

    async def take(self) -> Sequence[Delivery]:
        return await self.arriving.get()

    def claim(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        return [d for d in deliveries if d.offset not in self.lost]

    def done(self, deliveries: Sequence[Delivery]) -> None:
        self.finished += deliveries


class ScriptedRunner:
    def __init__(self) -> None:
        self.loaded = {GOOD}
        self.runs: list[tuple[str, int]] = []
        self.may_load = asyncio.Event()
        self.away = 0
        self.explode = False
        self.fault: BaseException | None = None
        self.gives: int | None = None
        self.tokens: dict[str, int] = {}
        self.loses: UUID | None = None
        self.runs_as: str | None = None
        self.counted = 1

    def ready(self, version: str) -> bool:
        return version in self.loaded

    async def prepare(self, version: str) -> None:
        if version == BROKEN:
            raise self.fault or ModelError("the bytes are not the version's")
        if self.away:
            self.away -= 1
            raise MachineError("S3 is away")
        await self.may_load.wait()
        self.loaded.add(version)

    async def run(self, version: str, requests: Sequence[InferenceRequested]) -> Ran:
        await asyncio.sleep(0)
        if self.explode or any(r.request_id == self.loses for r in requests):
            raise MachineError("the device is lost")
        self.runs.append((version, len(requests)))
        if any(r.model == "poison" for r in requests):
            raise self.fault or RuntimeError("poison")
        results: list[Answer | Failure] = []
        for request in requests:
            bad = request.inputs[0].name == "bad"
            answer = Answer(
                outputs=(floats("logits", 1.0),), items=self.counted, tokens=self.tokens.get(request.model, 7)
            )
            results.append(Failure(code="invalid_input", message="bad") if bad else answer)
        return Ran(version=self.runs_as or version, results=results[: self.gives], run_us=5)


class GatedClaims:
    """Inputs are there once `open` is set, unless they are `lost` or the store is `away` until the deadline."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.lost = False
        self.away = False
        self.fault: Exception | None = None
        self.allowed_s: list[float] = []
        self.released: list[InferenceRequested] = []

    async def redeem(self, request: InferenceRequested, *, within_s: float) -> InferenceRequested:
        self.allowed_s.append(within_s)
        await self.open.wait()
        if self.fault:
            raise self.fault
        if self.lost:
            raise InputLost("tensor 'pixels' is gone")
        if self.away:
            raise MachineError("S3 is away")
        return replace(request, inputs=(floats("pixels", 1.0),))

    def release(self, request: InferenceRequested) -> None:
        self.released.append(request)


class GatedOutcomes:
    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.ended: list[Ended] = []
        self.broken = False

    async def record(self, ended: Sequence[Ended]) -> None:
        await self.open.wait()
        if self.broken:
            raise RuntimeError("a bug")
        self.ended += ended


class Bench:
    """A worker at work, and its ports."""

    def __init__(self, suspects: Suspects | None = None) -> None:
        self.inbox = RememberingInbox()
        self.runner = ScriptedRunner()
        self.claims = GatedClaims()
        self.outcomes = GatedOutcomes()
        self.cancelled: set[UUID] = set()
        self.now = datetime.now(timezone.utc).timestamp()
        self.worker = Worker(
            name="w",
            inbox=self.inbox,
            claims=self.claims,
            runner=self.runner,
            outcomes=self.outcomes,
            limits=Limits(linger_s=0.0),
            clock=lambda: self.now,
            blame=Blame(),
            suspects=suspects or Suspects(),
            is_cancelled=lambda request: request.request_id in self.cancelled,
        )
        self.stop = asyncio.Event()

    def request(self, version: str = GOOD, *, within_s: float = 10.0, **changes: Any) -> InferenceRequested:
        at = datetime.fromtimestamp(self.now, timezone.utc)
        return requested(version=version, occurred_at=at, deadline_at=at + timedelta(seconds=within_s), **changes)

    def large_request(self, **changes: Any) -> InferenceRequested:
        """One whose input lies in S3."""
        lying = replace(floats("pixels", 1.0), data=b"", blob=Blob(key="blobs/x/y", sha256="0" * 64, size_bytes=4))
        return self.request(inputs=(lying,), **changes)

    def outcome_of(self, request: InferenceRequested) -> Outcome | None:
        found = [e.finished.outcome for e in self.outcomes.ended if e.finished.request_id == request.request_id]
        assert len(found) < 2
        return found[0] if found else None

    def ends(self) -> dict[UUID, Outcome]:
        return {e.finished.request_id: e.finished.outcome for e in self.outcomes.ended}

    async def ended(self, count: int) -> None:
        await eventually(lambda: len(self.outcomes.ended) == count and len(self.inbox.finished) == count)


@asynccontextmanager
async def at_work() -> AsyncIterator[Bench]:
    bench = Bench()
    task = asyncio.create_task(bench.worker.run(bench.stop))
    try:
        yield bench
        bench.stop.set()
        await asyncio.wait_for(task, 5)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_request_is_answered_billed_and_committed() -> None:
    async with at_work() as bench:
        request = bench.request(task=Task.TENSORS)
        bench.inbox.put(request)
        await bench.ended(1)
        finished = bench.outcomes.ended[0].finished
        assert finished.outcome is Outcome.SUCCEEDED
        assert finished.version == request.version
        assert finished.admitted_at == request.occurred_at
        assert finished.quantities == {"requests": 1, "items": 1}
        assert bench.outcomes.ended[0].reply_to == request.reply_to


async def test_the_version_in_the_record_is_the_one_that_ran() -> None:
    async with at_work() as bench:
        bench.runner.runs_as = SLOW
        bench.inbox.put(bench.request(GOOD))
        await bench.ended(1)
        assert bench.outcomes.ended[0].finished.version == SLOW


async def test_what_did_not_run_names_the_version_that_was_asked_for() -> None:
    async with at_work() as bench:
        bench.inbox.put(bench.request(GOOD, within_s=0))
        await bench.ended(1)
        assert bench.outcomes.ended[0].finished.version == GOOD


async def test_outcomes_are_told_until_when_a_run_counts() -> None:
    async with at_work() as bench:
        request = bench.request(within_s=3)
        bench.inbox.put(request)
        await bench.ended(1)
        assert bench.outcomes.ended[0].deadline_at == request.deadline_at


@pytest.mark.parametrize("within_s", [10.0, 0.0])
async def test_what_an_earlier_owner_ended_is_finished_and_neither_run_nor_expired(within_s: float) -> None:
    async with at_work() as bench:
        request = bench.request(within_s=within_s)
        first = finished(request, worker="predecessor")
        end = Ended(finished=first, reply_to="a", deadline_at=request.deadline_at, logged=b"its bytes")
        bench.inbox.put(request, ended=end)
        await bench.ended(1)
        assert bench.outcomes.ended == [end]
        assert bench.runner.runs == []
        assert bench.worker.counts["recovered"] == 1


async def test_texts_are_billed_by_their_tokens_too() -> None:
    async with at_work() as bench:
        bench.inbox.put(bench.request(task=Task.EMBEDDINGS, inputs=(_texts(b"hello"),)))
        await bench.ended(1)
        assert bench.outcomes.ended[0].finished.quantities == {"requests": 1, "items": 1, "tokens": 7}


def _texts(*texts: bytes) -> Any:
    from schemas.tensors import bytes_tensor

    return bytes_tensor("text", texts)


async def test_nothing_is_committed_before_it_is_recorded() -> None:
    async with at_work() as bench:
        bench.outcomes.open.clear()
        bench.inbox.put(bench.request())
        await eventually(lambda: bench.runner.runs)
        assert bench.inbox.finished == []
        bench.outcomes.open.set()
        await bench.ended(1)


async def test_the_next_batch_runs_while_results_wait_for_the_log() -> None:
    async with at_work() as bench:
        bench.outcomes.open.clear()
        bench.inbox.put(bench.request())
        await eventually(lambda: len(bench.runner.runs) == 1)
        bench.inbox.put(bench.request())
        await eventually(lambda: len(bench.runner.runs) == 2)
        bench.outcomes.open.set()
        await bench.ended(2)


async def test_a_bad_request_fails_and_its_neighbour_does_not() -> None:
    async with at_work() as bench:
        bad, good = bench.request(inputs=(floats("bad", 1.0),)), bench.request()
        bench.inbox.put(bad, good)
        await bench.ended(2)
        assert bench.outcome_of(bad) is Outcome.FAILED
        assert bench.outcome_of(good) is Outcome.SUCCEEDED
        assert [e.finished.quantities for e in bench.outcomes.ended if e.finished.outcome is Outcome.FAILED] == [{}]


async def test_an_expired_request_is_answered_and_not_run() -> None:
    async with at_work() as bench:
        request = bench.request(within_s=0)
        bench.inbox.put(request)
        await bench.ended(1)
        assert bench.outcome_of(request) is Outcome.EXPIRED
        assert bench.runner.runs == []


async def test_a_version_that_loads_holds_no_other_up() -> None:
    async with at_work() as bench:
        slow, good = bench.request(SLOW), bench.request()
        bench.inbox.put(slow, good)
        await bench.ended(1)
        assert bench.outcome_of(good) is Outcome.SUCCEEDED
        bench.runner.may_load.set()
        await bench.ended(2)
        assert bench.runner.runs == [(GOOD, 1), (SLOW, 1)]


async def test_a_version_is_tried_again_while_the_store_is_away() -> None:
    async with at_work() as bench:
        bench.runner.away = 2
        bench.runner.may_load.set()
        bench.inbox.put(bench.request(SLOW))
        await bench.ended(1)
        assert bench.runner.runs == [(SLOW, 1)]


async def test_while_the_store_stays_away_requests_expire() -> None:
    async with at_work() as bench:
        bench.runner.away = 10**6
        request = bench.request(SLOW)
        bench.inbox.put(request)
        await eventually(lambda: bench.runner.away < 10**6)
        bench.now += 11
        await bench.ended(1)
        assert bench.outcome_of(request) is Outcome.EXPIRED


async def test_a_broken_version_fails_its_requests_and_no_others() -> None:
    async with at_work() as bench:
        broken, good = bench.request(BROKEN), bench.request()
        bench.inbox.put(broken, good)
        await bench.ended(2)
        assert bench.outcome_of(broken) is Outcome.FAILED
        assert bench.outcome_of(good) is Outcome.SUCCEEDED
        failed = next(e.finished for e in bench.outcomes.ended if e.finished.outcome is Outcome.FAILED)
        assert failed.error_code == "model_unavailable"
        assert failed.error_message == "the bytes are not the version's"


async def test_requests_of_a_lost_partition_are_left_to_their_next_owner() -> None:
    async with at_work() as bench:
        bench.inbox.lost = {0}
        bench.inbox.put(bench.request(), bench.request())
        await bench.ended(1)
        assert bench.runner.runs == [(GOOD, 1)]
        assert [d.offset for d in bench.inbox.finished] == [1]


@pytest.mark.parametrize(
    "breakage",
    [
        pytest.param(lambda bench: setattr(bench.outcomes, "broken", True), id="recording fails"),
        pytest.param(lambda bench: setattr(bench.runner, "explode", True), id="the device is lost"),
    ],
)
async def test_what_nobody_expected_ends_the_worker_with_nothing_committed(breakage: Callable[[Bench], None]) -> None:
    bench = Bench()
    breakage(bench)
    bench.inbox.put(bench.request())
    with pytest.raises((RuntimeError, MachineError)):
        await asyncio.wait_for(bench.worker.run(bench.stop), 5)
    assert bench.inbox.finished == []


async def test_stopping_ends_what_is_being_recorded() -> None:
    bench = Bench()
    bench.outcomes.open.clear()
    task = asyncio.create_task(bench.worker.run(bench.stop))
    bench.inbox.put(bench.request())
    await eventually(lambda: bench.runner.runs)
    bench.stop.set()
    bench.outcomes.open.set()
    await asyncio.wait_for(task, 5)
    assert len(bench.inbox.finished) == 1


async def test_a_request_whose_inputs_are_being_fetched_holds_nobody_up_and_then_runs_with_them() -> None:
    async with at_work() as bench:
        bench.claims.open.clear()
        large, small = bench.large_request(), bench.request()
        bench.inbox.put(large, small)
        await bench.ended(1)
        assert bench.outcome_of(small) is Outcome.SUCCEEDED
        bench.claims.open.set()
        await bench.ended(2)
        assert bench.outcome_of(large) is Outcome.SUCCEEDED
        assert bench.claims.allowed_s == [10.0]
        assert bench.claims.released == [large], "what was fetched makes room for others"


async def test_lost_inputs_fail_their_request_alone() -> None:
    async with at_work() as bench:
        bench.claims.lost = True
        large, small = bench.large_request(), bench.request()
        bench.inbox.put(large, small)
        await bench.ended(2)
        failed = next(e.finished for e in bench.outcomes.ended if e.finished.request_id == large.request_id)
        assert (failed.outcome, failed.error_code, failed.quantities) == (Outcome.FAILED, "input_lost", {})
        assert "tensor 'pixels'" in (failed.error_message or "")
        assert bench.outcome_of(small) is Outcome.SUCCEEDED


async def test_inputs_that_cannot_be_fetched_in_time_let_their_request_expire_and_others_go_on() -> None:
    async with at_work() as bench:
        bench.claims.away = True
        large, small = bench.large_request(), bench.request()
        bench.inbox.put(large, small)
        await bench.ended(2)
        assert bench.outcome_of(large) is Outcome.EXPIRED
        assert bench.outcome_of(small) is Outcome.SUCCEEDED


@pytest.mark.parametrize("lost", [False, True])
async def test_what_was_fetched_is_let_go_when_its_request_expires_or_its_partition_is_lost(lost: bool) -> None:
    async with at_work() as bench:
        large = bench.large_request(version=SLOW)
        bench.inbox.lost = {0} if lost else set()
        bench.inbox.put(large)
        await eventually(lambda: bench.worker._batcher.versions() == [SLOW])
        bench.now += 11
        await eventually(lambda: bench.claims.released == [large])
        await bench.ended(0 if lost else 1)


async def test_what_is_recorded_does_not_hold_the_inputs_that_were_fetched() -> None:
    async with at_work() as bench:
        bench.outcomes.open.clear()
        large = bench.large_request()
        bench.inbox.put(large)
        await eventually(lambda: bench.claims.released == [large])
        bench.outcomes.open.set()
        await bench.ended(1)
        assert [d.request for d in bench.inbox.finished] == [large]


async def test_stopping_does_not_wait_for_inputs() -> None:
    bench = Bench()
    bench.claims.open.clear()
    task = asyncio.create_task(bench.worker.run(bench.stop))
    bench.inbox.put(bench.large_request())
    await eventually(lambda: bench.claims.allowed_s)
    bench.stop.set()
    await asyncio.wait_for(task, 5)
    assert bench.inbox.finished == []


class Panic(BaseException):
    """As native code's panics come to Python: no Exception."""


@pytest.mark.parametrize("fault", [RuntimeError("poison"), Panic("poison"), MemoryError(), RecursionError("deep")])
async def test_a_batch_that_fails_is_run_again_one_by_one_and_each_is_billed_once(fault: BaseException) -> None:
    async with at_work() as bench:
        bench.runner.fault = fault
        good = [bench.request() for _ in range(3)]
        poison = bench.request(model="poison")
        bench.inbox.put(good[0], poison, *good[1:])
        await bench.ended(4)
        assert bench.runner.runs == [(GOOD, 4)] + [(GOOD, 1)] * 4
        assert [bench.outcome_of(r) for r in good] == [Outcome.SUCCEEDED] * 3
        failed = next(e.finished for e in bench.outcomes.ended if e.finished.request_id == poison.request_id)
        assert (failed.outcome, failed.error_code, failed.quantities) == (Outcome.FAILED, "internal", {})
        assert type(fault).__name__ in (failed.error_message or "")
        assert {e.finished.batch_items for e in bench.outcomes.ended if e.finished.outcome is Outcome.SUCCEEDED} == {1}
        assert bench.worker.counts["batches_taken_apart"] == 1


async def test_results_too_few_are_nobodys_result() -> None:
    async with at_work() as bench:
        bench.runner.gives = 1
        requests = [bench.request() for _ in range(3)]
        bench.inbox.put(*requests)
        await bench.ended(3)
        assert [bench.outcome_of(r) for r in requests] == [Outcome.SUCCEEDED] * 3, "alone each got its own"


async def test_a_request_that_contradicts_itself_fails_before_it_is_run_or_fetched() -> None:
    async with at_work() as bench:
        forged, large = bench.request(item_count=100), bench.large_request(item_count=2)
        bench.inbox.put(forged, bench.request(), large)
        await bench.ended(3)
        assert bench.runner.runs == [(GOOD, 1)]
        assert bench.claims.allowed_s == []
        failed = next(e.finished for e in bench.outcomes.ended if e.finished.request_id == forged.request_id)
        assert (failed.outcome, failed.error_code, failed.quantities) == (Outcome.FAILED, "invalid_input", {})
        assert (failed.error_message or "").startswith("item_count: expected what the inputs hold, found 100, and in")


async def test_billed_is_what_the_runner_counted() -> None:
    async with at_work() as bench:
        bench.runner.counted = 3
        bench.inbox.put(bench.request(item_count=1))
        await bench.ended(1)
        assert bench.outcomes.ended[0].finished.quantities["items"] == 3


@pytest.mark.parametrize("name", ["require_sound", "waiting"])
async def test_what_nobody_expected_before_the_run_fails_its_request_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = getattr(module, name)

    def unforeseen(*args: Any, **options: Any) -> Any:
        if any(getattr(a, "model", "") == "odd" for a in args):
            raise KeyError("unforeseen")
        return inner(*args, **options)

    monkeypatch.setattr(module, name, unforeseen)
    async with at_work() as bench:
        large, small, good = bench.large_request(model="odd"), bench.request(model="odd"), bench.request()
        bench.inbox.put(large, small, good)
        await bench.ended(3)
        outcomes = [bench.outcome_of(r) for r in (large, small, good)]
        assert outcomes == [Outcome.FAILED, Outcome.FAILED, Outcome.SUCCEEDED]
        assert bench.claims.released == ([large] if name == "waiting" else []), "its room is for others"


async def test_what_nobody_expected_of_a_fetch_fails_its_request_alone() -> None:
    async with at_work() as bench:
        bench.claims.fault = ValueError("a key that no client takes")
        large, good = bench.large_request(), bench.request()
        bench.inbox.put(large, good)
        await bench.ended(2)
        assert [bench.outcome_of(r) for r in (large, good)] == [Outcome.FAILED, Outcome.SUCCEEDED]


async def test_what_nobody_expected_of_a_load_fails_the_version_alone() -> None:
    async with at_work() as bench:
        bench.runner.fault = ValueError("embedded null byte")
        broken, good = bench.request(BROKEN), bench.request()
        bench.inbox.put(broken, good)
        await bench.ended(2)
        assert [bench.outcome_of(r) for r in (broken, good)] == [Outcome.FAILED, Outcome.SUCCEEDED]


async def test_a_result_that_cannot_be_built_becomes_a_failure_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = endings.quantities

    def unforeseen(task: Task, answer: Answer) -> dict[str, int]:
        if answer.tokens == 13:
            raise OverflowError("thirteen")
        return inner(task, answer)

    monkeypatch.setattr(endings, "quantities", unforeseen)
    async with at_work() as bench:
        bench.runner.tokens = {"odd": 13}
        odd, good = bench.request(model="odd"), bench.request()
        bench.inbox.put(odd, good)
        await bench.ended(2)
        assert [bench.outcome_of(r) for r in (odd, good)] == [Outcome.FAILED, Outcome.SUCCEEDED]


async def test_when_request_after_request_fails_unforeseen_the_worker_ends_and_the_rest_is_left_to_the_next() -> None:
    bench = Bench()
    poison = [bench.request(model="poison") for _ in range(MOST_IN_A_ROW + 5)]
    bench.inbox.put(*poison)
    with pytest.raises(Unserviceable, match=f"{MOST_IN_A_ROW} requests in a row"):
        await asyncio.wait_for(bench.worker.run(bench.stop), 5)
    assert len(bench.inbox.finished) < MOST_IN_A_ROW


async def test_a_success_between_shows_that_the_worker_is_not_at_fault() -> None:
    async with at_work() as bench:
        for number in range(1, MOST_IN_A_ROW + 5):
            bench.inbox.put(bench.request(model="poison"))
            bench.inbox.put(bench.request())
            await bench.ended(2 * number)
        assert bench.worker.counts["unforeseen"] >= MOST_IN_A_ROW


async def test_a_request_that_loses_the_device_ends_two_workers_and_no_more(tmp_path: Path) -> None:
    """As on a GPU: an assertion in a kernel loses the context, and with it whatever the process could still run."""
    at = datetime.now(timezone.utc)
    poison, good = (requested(version=GOOD, occurred_at=at, deadline_at=at + timedelta(seconds=99)) for _ in range(2))
    ended: dict[UUID, Outcome] = {}
    lives = 0
    while len(ended) < 2 and lives < 9:
        lives += 1
        bench = Bench(Suspects(tmp_path / "suspects"))
        bench.runner.loses = poison.request_id
        bench.inbox.put(*(r for r in (poison, good) if r.request_id not in ended))
        running = asyncio.create_task(bench.worker.run(bench.stop))
        await eventually(lambda: running.done() or len(ended | bench.ends()) == 2)  # noqa: B023
        ended |= bench.ends()
        bench.stop.set()
        await asyncio.gather(running, return_exceptions=True)
    assert ended == {poison.request_id: Outcome.FAILED, good.request_id: Outcome.SUCCEEDED}
    assert lives <= 3
    assert poison.request_id not in Suspects(tmp_path / "suspects")


async def test_a_suspicion_lasts_until_the_end_of_its_request_is_on_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Kafka away the failure that was found is not recorded: the next worker must not find it out all over."""
    monkeypatch.setattr("gpu_worker.worker._LAST_WORDS_S", 0.01)
    path, recorded = tmp_path / "suspects", list[bool]()
    at = datetime.now(timezone.utc)
    poison = requested(version=GOOD, occurred_at=at, deadline_at=at + timedelta(seconds=99))
    Suspects(path).add([poison.request_id])
    for kafka_is_there in (False, True):
        bench = Bench(Suspects(path))
        bench.runner.loses = poison.request_id
        if not kafka_is_there:
            bench.outcomes.open.clear()
        bench.inbox.put(poison)
        with pytest.raises(MachineError):
            await asyncio.wait_for(bench.worker.run(bench.stop), 30)
        recorded.append(bench.outcome_of(poison) is Outcome.FAILED)
        assert (poison.request_id in Suspects(path)) is not kafka_is_there
    assert recorded == [False, True]


async def test_an_inherited_end_clears_its_suspicion(tmp_path: Path) -> None:
    """Its first owner died between the log and the file of suspects."""
    path, at = tmp_path / "suspects", datetime.now(timezone.utc)
    request = requested(version=GOOD, occurred_at=at, deadline_at=at + timedelta(seconds=99))
    Suspects(path).add([request.request_id])
    bench = Bench(Suspects(path))
    running = asyncio.create_task(bench.worker.run(bench.stop))
    end = Ended(finished=finished(request), reply_to="a", deadline_at=request.deadline_at, logged=b"its bytes")
    bench.inbox.put(request, ended=end)
    await bench.ended(1)
    bench.stop.set()
    await running
    assert request.request_id not in Suspects(path)
