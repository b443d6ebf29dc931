"""Requests that nobody wants any more, before, while and after they run."""

from __future__ import annotations

import asyncio

from schemas.records import Outcome
from tests.conditions import eventually
from tests.unit.gpu_worker.test_worker import GOOD, SLOW, Bench, at_work


async def test_what_is_cancelled_before_it_starts_is_not_run_costs_nothing_and_is_committed() -> None:
    async with at_work() as bench:
        wanted, gone = bench.request(), [bench.request() for _ in range(5)]
        bench.cancelled = {r.request_id for r in gone}
        bench.inbox.put(gone[0], wanted, *gone[1:])
        await bench.ended(6)
        assert bench.runner.runs == [(GOOD, 1)]
        assert bench.outcome_of(wanted) is Outcome.SUCCEEDED
        ends = [e.finished for e in bench.outcomes.ended if e.finished.request_id in bench.cancelled]
        assert {f.outcome for f in ends} == {Outcome.CANCELLED}
        assert all(not f.quantities and not f.outputs and f.error_code == "cancelled" for f in ends)
        assert bench.worker.counts["cancelled"] == 5


async def test_a_batch_of_nothing_but_cancelled_requests_does_not_run() -> None:
    async with at_work() as bench:
        gone = [bench.request() for _ in range(3)]
        bench.cancelled = {r.request_id for r in gone}
        bench.inbox.put(*gone)
        await bench.ended(3)
        assert bench.runner.runs == []


async def test_what_waits_for_its_version_is_still_cancelled_and_the_load_is_no_reason_to_run_it() -> None:
    async with at_work() as bench:
        gone, wanted = bench.request(SLOW), bench.request(SLOW)
        bench.inbox.put(gone, wanted)
        await eventually(lambda: len(bench.worker._batcher) == 2)
        bench.cancelled = {gone.request_id}
        bench.runner.may_load.set()
        await bench.ended(2)
        assert (bench.outcome_of(gone), bench.outcome_of(wanted)) == (Outcome.CANCELLED, Outcome.SUCCEEDED)
        assert bench.runner.runs == [(SLOW, 1)]


async def test_what_has_started_runs_on_and_is_billed_as_it_is() -> None:
    bench, started, go = Bench(), asyncio.Event(), asyncio.Event()
    run = bench.runner.run

    async def slow(version: str, requests: object) -> object:
        started.set()
        await go.wait()
        return await run(version, requests)  # type: ignore[arg-type]

    bench.runner.run = slow  # type: ignore[assignment, method-assign]
    work = asyncio.create_task(bench.worker.run(bench.stop))
    one = bench.request()
    bench.inbox.put(one)
    await started.wait()
    bench.cancelled = {one.request_id}
    go.set()
    await bench.ended(1)
    assert bench.outcome_of(one) is Outcome.SUCCEEDED
    assert bench.outcomes.ended[0].finished.quantities
    bench.stop.set()
    await asyncio.wait_for(work, 5)


async def test_a_batch_that_is_taken_apart_has_started() -> None:
    async with at_work() as bench:
        poison, good = bench.request(model="poison"), bench.request()
        bench.inbox.put(poison, good)
        await eventually(lambda: bench.runner.runs)
        bench.cancelled = {good.request_id}
        await bench.ended(2)
        assert bench.outcome_of(good) is Outcome.SUCCEEDED


async def test_a_late_one_expired_whoever_cancelled_it() -> None:
    async with at_work() as bench:
        late = bench.request(within_s=-1.0)
        bench.cancelled = {late.request_id}
        bench.inbox.put(late)
        await bench.ended(1)
        assert bench.outcome_of(late) is Outcome.EXPIRED


async def test_inputs_that_were_fetched_for_a_cancelled_request_are_let_go() -> None:
    async with at_work() as bench:
        large = bench.large_request()
        bench.cancelled = {large.request_id}
        bench.inbox.put(large)
        await bench.ended(1)
        assert bench.outcome_of(large) is Outcome.CANCELLED
        assert bench.claims.released == [large]
        assert bench.outcomes.ended[0].finished.outputs == ()


async def test_cancelled_requests_of_a_lost_partition_are_left_to_their_next_owner() -> None:
    async with at_work() as bench:
        gone, wanted = bench.request(), bench.request()
        bench.cancelled = {gone.request_id}
        bench.inbox.lost = {0}
        bench.inbox.put(gone, wanted)
        await bench.ended(1)
        assert bench.outcome_of(gone) is None
        assert bench.outcome_of(wanted) is Outcome.SUCCEEDED
