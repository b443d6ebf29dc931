"""The worker's loop: poll, batch, run, record, commit. It decides the order and leaves every act to its ports.

    inbox -> batcher -> runner -> outcomes -> inbox        take, wait in line, run together, record, commit
       \\-> claims -/\\-> runner.prepare                    in the meantime, large inputs and versions not loaded yet

One batch runs at a time; polling, fetching, loading and recording go on meanwhile, so that none delays another version.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

from gpu_worker.batching import Batch, Batcher, Limits, waiting
from gpu_worker.blame import Blame
from gpu_worker.endings import Answer, Ended, Failure, Run, no_run
from gpu_worker.errors import MachineError
from gpu_worker.loads import Loads
from gpu_worker.ports import Claims, Delivery, Inbox, Outcomes, Runner
from gpu_worker.soundness import require_sound
from gpu_worker.suspects import Suspects
from schemas.ids import new_request_id
from schemas.records import InferenceFinished, InferenceRequested, Outcome

log = logging.getLogger(__name__)

#: How long the last result of a worker that lost its device may take to be recorded.
_LAST_WORDS_S = 5.0
_CANCELLED = Failure(code="cancelled", message="cancelled before it was run")
_LATE = Failure(code="deadline_exceeded", message="the deadline passed before the request could be run")


class Worker:
    """One worker of one pool. `clock` gives Unix seconds; `blame` decides whose an error is, for the outcomes too.

    `is_cancelled` says what nobody wants any more; it is asked when a batch is about to run.
    """

    def __init__(
        self,
        *,
        name: str,
        inbox: Inbox,
        claims: Claims,
        runner: Runner,
        outcomes: Outcomes,
        limits: Limits,
        clock: Callable[[], float],
        blame: Blame,
        suspects: Suspects,
        is_cancelled: Callable[[InferenceRequested], bool] = lambda _request: False,
    ) -> None:
        self._name = name
        self._inbox = inbox
        self._claims = claims
        self._runner = runner
        self._outcomes = outcomes
        self._clock = clock
        self._blame = blame
        self._suspects = suspects
        self._is_cancelled = is_cancelled
        self._batcher: Batcher[Delivery] = Batcher(limits)
        self._wake = asyncio.Event()
        self._running = False
        self._stopping = False
        self._loads = Loads(
            runner,
            blame,
            spawn=self._spawn,
            is_wanted=lambda version: version in self._batcher.versions(),
            ended=self._wake.set,
            clock=clock,
        )
        self._fetches: set[asyncio.Task[None]] = set()
        self._recordings: set[asyncio.Task[None]] = set()
        self._crash: asyncio.Future[None] | None = None
        self._counts: Counter[str] = Counter()
        self.turned_at_s = clock()

    @property
    def counts(self) -> Counter[str]:
        """What was done, by name."""
        return self._counts + self._loads.counts + self._blame.counts

    async def run(self, stop: asyncio.Event, *, drain_s: float = 5.0) -> None:
        """Work until `stop` is set, then end what runs and is being recorded, for at most `drain_s`.

        Raises what is the process's (gpu_worker.blame): nothing was committed for it, so the next worker does it again.
        """
        self._crash = asyncio.get_running_loop().create_future()
        intake = asyncio.create_task(self._take_in(), name="intake")
        dispatch = asyncio.create_task(self._dispatch(), name="dispatch")
        stopper = asyncio.create_task(stop.wait(), name="stop")
        try:
            ending: set[asyncio.Future[Any]] = {intake, dispatch, stopper, self._crash}
            done, _ = await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
            for ended in done - {stopper}:
                ended.result()
            self._stopping = True
            self._wake.set()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._drain(dispatch), drain_s)
        finally:
            tasks = [intake, dispatch, stopper, *self._loads.tasks(), *self._fetches, *self._recordings]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self._crash.cancel():
                self._crash.exception()  # raised above, or met while draining, where nothing of it was committed

    async def _drain(self, dispatch: asyncio.Task[None]) -> None:
        await dispatch
        while self._recordings:
            await asyncio.gather(*self._recordings)

    async def _take_in(self) -> None:
        while True:
            arrived = await self._inbox.take()
            self._counts["taken"] += len(arrived)
            self._repeat([d for d in arrived if d.ended is not None])
            new, now_s = [d for d in arrived if d.ended is None], self._clock()
            self._end_unrun([d for d in new if d.deadline_s <= now_s], _LATE, Outcome.EXPIRED)
            for delivery in new:
                if delivery.deadline_s > now_s:
                    self._admit(delivery, now_s)

    def _admit(self, delivery: Delivery, now_s: float) -> None:
        with self._blame.judging("checking it", partial(self._end_unrun, [delivery])):
            require_sound(delivery.request, now_s)
            if any(t.blob for t in delivery.request.inputs):
                self._fetches.add(task := self._spawn(self._fetch(delivery)))
                task.add_done_callback(self._fetches.discard)
            else:
                self._line_up(delivery)

    async def _fetch(self, delivery: Delivery) -> None:
        """Get the inputs that a request refers to, for as long as its deadline allows, and let it wait in line."""
        try:
            with self._blame.judging("fetching its inputs", partial(self._end_unrun, [delivery])):
                whole = await self._claims.redeem(delivery.request, within_s=delivery.deadline_s - self._clock())
                self._line_up(replace(delivery, request=whole, logged=delivery.request))
        except MachineError as error:
            words = f"the deadline passed before the request's inputs were fetched: {error}"
            self._end_unrun([delivery], Failure(code="deadline_exceeded", message=words), Outcome.EXPIRED)

    def _line_up(self, delivery: Delivery) -> None:
        with self._blame.judging("putting it in line", partial(self._end_unrun, [delivery])):
            one = waiting(delivery, delivery.request, arrived_s=self._clock())
            if delivery.request.request_id in self._suspects:
                one = replace(one, lane=delivery.request.request_id)
            self._batcher.add(one, idle=not self._running)
            self._wake.set()

    def _let_go(self, deliveries: Sequence[Delivery]) -> None:
        """What was fetched for them is needed no more, and others may wait for its room."""
        for delivery in deliveries:
            if delivery.logged is not None:
                self._claims.release(delivery.logged)

    async def _dispatch(self) -> None:
        while not self._stopping:
            self._wake.clear()
            now_s = self.turned_at_s = self._clock()
            self._end_unrun(self._batcher.expired(now_s), _LATE, Outcome.EXPIRED)
            for version in self._batcher.versions():
                if (failure := self._loads.want(version, now_s)) is not None:
                    self._end_unrun(self._batcher.drop(version), failure)
            batch = self._batcher.take(now_s, ready=self._runner.ready)
            if batch is None:
                await self._pause(self._batcher.next_at_s(ready=self._runner.ready), now_s)
            else:
                await self._run(batch)

    async def _pause(self, until_s: float | None, now_s: float) -> None:
        """Until something arrives, a version is loaded or `until_s`; at most a second, so that progress shows."""
        wait_s = min(1.0, (math.inf if until_s is None else until_s) - now_s)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), max(0.0, wait_s))

    async def _run(self, batch: Batch[Delivery]) -> None:
        gone = [d for d in batch.members if self._is_cancelled(d.request)]
        if gone:
            self._end_unrun(gone, _CANCELLED, Outcome.CANCELLED)
        wanted = [d for d in batch.members if d not in gone] if gone else batch.members
        mine = self._inbox.claim(wanted)
        if mine:
            self._counts[f"batches_{batch.closed.value}"] += 1
            self._running = True
            try:
                await self._run_claimed(batch.version, mine)
            finally:
                self._running = False
        self._let_go(wanted)

    async def _run_claimed(self, version: str, mine: Sequence[Delivery]) -> None:
        """Run these together and record their ends. If that fails each runs alone: nothing of it was recorded yet."""
        started_s, failures = self._clock(), list[Failure]()
        try:
            with self._blame.judging("running it", failures.append, requests=len(mine)):
                ran = await self._runner.run(version, [d.request for d in mine])
                if len(ran.results) != len(mine):
                    raise RuntimeError(f"{len(mine)} requests ran and {len(ran.results)} results came back")
        except MachineError as error:
            await self._lose_device(mine, error)
            raise
        if not failures:
            items = sum(d.request.item_count for d in mine)
            run = no_run(self._name, started_s, new_request_id())
            run = replace(run, version=ran.version, items=items, run_us=ran.run_us)
            if any(isinstance(result, Answer) for result in ran.results):
                self._blame.served()
            self._end(run, mine, ran.results)
        elif len(mine) == 1:
            self._end(no_run(self._name, started_s, new_request_id()), mine, failures)
        else:
            self._counts["batches_taken_apart"] += 1
            for one in mine:
                await self._run_claimed(version, [one])

    async def _lose_device(self, mine: Sequence[Delivery], error: MachineError) -> None:
        """Nothing will run here again. Whoever does next what these were at must not lose its device over and over."""
        ids = [d.request.request_id for d in mine]
        if len(ids) > 1 or ids[0] not in self._suspects:
            self._suspects.add(ids)
            return
        words = f"the device was lost again while this request ran alone on it: {error}"
        self._end(
            no_run(self._name, self._clock(), new_request_id()), mine, [Failure(code="run_failed", message=words)]
        )
        await asyncio.wait(self._recordings, timeout=_LAST_WORDS_S)

    def _end_unrun(self, deliveries: Sequence[Delivery], failure: Failure, outcome: Outcome = Outcome.FAILED) -> None:
        self._let_go(deliveries)
        if mine := self._inbox.claim(deliveries):
            self._end(no_run(self._name, self._clock(), new_request_id()), mine, [failure] * len(mine), outcome)

    def _end(
        self,
        run: Run,
        claimed: Sequence[Delivery],
        results: Sequence[Answer | Failure],
        failed: Outcome = Outcome.FAILED,
    ) -> None:
        """Record what became of requests that were claimed; `failed` is the outcome of those that failed."""
        now = datetime.fromtimestamp(self._clock(), timezone.utc)
        mine = [d.as_logged() for d in claimed]
        ended = [self._told(run, d.request, r, now, failed) for d, r in zip(mine, results, strict=True)]
        for finished in ended:
            self._counts[finished.outcome.value.lower()] += 1
        self._commit_recorded(mine, [d.ended_by(finished) for d, finished in zip(mine, ended, strict=True)])

    def _told(
        self, run: Run, request: InferenceRequested, result: Answer | Failure, now: datetime, failed: Outcome
    ) -> InferenceFinished:
        failures: list[Failure] = []
        with self._blame.judging("telling its result", failures.append):
            return run.end(request, result, now, failed)
        return run.end(request, failures[0], now)

    def _repeat(self, deliveries: Sequence[Delivery]) -> None:
        """Finish what an earlier owner began: its results are on the log, what follows from them may not be."""
        mine = self._inbox.claim(deliveries)
        if mine:
            self._counts["recovered"] += len(mine)
            self._commit_recorded(mine, [d.ended for d in mine if d.ended is not None])

    def _commit_recorded(self, deliveries: Sequence[Delivery], ended: Sequence[Ended]) -> None:
        self._recordings.add(task := self._spawn(self._record_and_commit(deliveries, ended)))
        task.add_done_callback(self._recordings.discard)

    async def _record_and_commit(self, deliveries: Sequence[Delivery], ended: Sequence[Ended]) -> None:
        # 1 blobs, 2 results, 3 usage and copies: inside `record`. Die before the log has the results: the batch runs
        # again. Die before the usage: whoever inherits the request finds its result and sends both again.
        await self._outcomes.record(ended)
        # 4 suspicions. Die before: they stay in the file until whoever inherits the requests gets here. Not sooner:
        # that one lost the device again is not known anywhere else before its failure is on the log.
        self._suspects.clear([one.finished.request_id for one in ended])
        # 5 offsets. Die before: the requests are inherited, their results are found and they do not run again.
        self._inbox.done(deliveries)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose unexpected end ends the worker, because nobody else waits for it."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._watch)
        return task

    def _watch(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() and self._crash is not None and not self._crash.done():
            self._crash.set_exception(task.exception() or RuntimeError("unreachable"))
