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
from typing import Any

from gpu_worker.batching import Batch, Batcher, Limits, waiting
from gpu_worker.endings import Ended, Failure, Run
from gpu_worker.errors import ItemError, MachineError, ModelError
from gpu_worker.ports import Claims, Delivery, Inbox, Outcomes, Runner
from schemas.ids import new_request_id
from schemas.records import InferenceFinished, Outcome

log = logging.getLogger(__name__)

#: A version that failed to load is not tried again for this long; its requests fail at once meanwhile.
BROKEN_FOR_S = 10.0
_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 2.0


class Worker:
    """One worker of one pool. `clock` gives Unix seconds."""

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
    ) -> None:
        self._name = name
        self._inbox = inbox
        self._claims = claims
        self._runner = runner
        self._outcomes = outcomes
        self._clock = clock
        self._batcher: Batcher[Delivery] = Batcher(limits)
        self._wake = asyncio.Event()
        self._running = False
        self._stopping = False
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._broken: dict[str, tuple[ModelError, float]] = {}
        self._fetches: set[asyncio.Task[None]] = set()
        self._recordings: set[asyncio.Task[None]] = set()
        self._crash: asyncio.Future[None] | None = None
        self.counts: Counter[str] = Counter()
        self.turned_at_s = clock()

    async def run(self, stop: asyncio.Event, *, drain_s: float = 5.0) -> None:
        """Work until `stop` is set, then end what runs and is being recorded, for at most `drain_s`.

        Raises what a port raised unexpectedly: nothing was committed for it, so the next worker does it again.
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
            tasks = [intake, dispatch, stopper, *self._loads.values(), *self._fetches, *self._recordings]
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
            self._repeat([d for d in arrived if d.ended is not None])
            for delivery in arrived:
                if delivery.ended is not None:
                    continue
                if any(t.blob for t in delivery.request.inputs):
                    self._fetches.add(task := self._spawn(self._fetch(delivery)))
                    task.add_done_callback(self._fetches.discard)
                else:
                    self._line_up(delivery)
            self.counts["taken"] += len(arrived)

    def _line_up(self, delivery: Delivery) -> None:
        one = waiting(delivery, delivery.request, arrived_s=self._clock())
        self._batcher.add(one, idle=not self._running)
        self._wake.set()

    async def _fetch(self, delivery: Delivery) -> None:
        """Get the inputs that a request refers to, for as long as its deadline allows, and let it wait in line."""
        left_s = delivery.request.deadline_at.timestamp() - self._clock()
        try:
            whole = await self._claims.redeem(delivery.request, within_s=left_s)
        except ItemError as error:
            self._end_unrun([delivery], Failure(code=error.code, message=str(error)), Outcome.FAILED)
        except MachineError as error:
            words = f"the deadline passed before the request's inputs were fetched: {error}"
            self._end_unrun([delivery], Failure(code="deadline_exceeded", message=words), Outcome.EXPIRED)
        else:
            self._line_up(replace(delivery, request=whole, logged=delivery.request))

    def _let_go(self, deliveries: Sequence[Delivery]) -> None:
        """What was fetched for them is needed no more, and others may wait for its room."""
        for delivery in deliveries:
            if delivery.logged is not None:
                self._claims.release(delivery.logged)

    async def _dispatch(self) -> None:
        while not self._stopping:
            self._wake.clear()
            now_s = self.turned_at_s = self._clock()
            self._end_expired(now_s)
            self._load_what_is_missing(now_s)
            batch = self._batcher.take(now_s, ready=self._runner.ready)
            if batch is None:
                await self._pause(self._batcher.next_at_s(ready=self._runner.ready), now_s)
            else:
                await self._run(batch, now_s)

    async def _pause(self, until_s: float | None, now_s: float) -> None:
        """Until something arrives, a version is loaded or `until_s`; at most a second, so that progress shows."""
        wait_s = min(1.0, (math.inf if until_s is None else until_s) - now_s)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), max(0.0, wait_s))

    async def _run(self, batch: Batch[Delivery], now_s: float) -> None:
        mine = self._inbox.claim(batch.members)
        if not mine:
            self._let_go(batch.members)
            return
        self.counts[f"batches_{batch.closed.value}"] += 1
        self._running = True
        try:
            ran = await self._runner.run(batch.version, [d.request for d in mine])
        finally:
            self._running = False
        if len(ran.results) != len(mine):
            raise RuntimeError(f"{len(mine)} requests ran and {len(ran.results)} results came back")
        items = sum(d.request.item_count for d in mine)
        run = Run(
            worker=self._name,
            version=ran.version,
            batch_id=new_request_id(),
            items=items,
            started_s=now_s,
            run_us=ran.run_us,
        )
        self._let_go(batch.members)
        now, mine = self._now(), [d.as_logged() for d in mine]
        self._record(mine, [run.end(d.request, r, now) for d, r in zip(mine, ran.results, strict=True)])

    def _end_expired(self, now_s: float) -> None:
        expired = Failure(code="deadline_exceeded", message="the deadline passed before the request could be run")
        self._end_unrun(self._batcher.expired(now_s), expired, Outcome.EXPIRED)

    def _end_unrun(self, deliveries: Sequence[Delivery], failure: Failure, outcome: Outcome) -> None:
        self._let_go(deliveries)
        mine = [d.as_logged() for d in self._inbox.claim(deliveries)]
        if mine:
            run = Run(
                worker=self._name,
                version=None,
                batch_id=new_request_id(),
                items=0,
                started_s=self._clock(),
                run_us=0,
            )
            self._record(mine, [run.end(d.request, failure, self._now(), outcome) for d in mine])

    def _load_what_is_missing(self, now_s: float) -> None:
        for version in self._batcher.versions():
            if self._runner.ready(version) or version in self._loads:
                continue
            error, until_s = self._broken.get(version, (None, 0.0))
            if error is not None and now_s < until_s:
                self._end_unrun(
                    self._batcher.drop(version), Failure(code=error.code, message=str(error)), Outcome.FAILED
                )
                continue
            self._broken.pop(version, None)
            self._loads[version] = self._spawn(self._load(version))

    async def _load(self, version: str) -> None:
        """Prepare a version for as long as something waits for it; the store may be away for a while."""
        retry_s = _FIRST_RETRY_S
        try:
            while version in self._batcher.versions():
                try:
                    await self._runner.prepare(version)
                except MachineError as error:
                    log.warning("version not loaded yet", extra={"fields": {"version": version, "reason": error}})
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
                except ModelError as error:
                    log.error("version refused", extra={"fields": {"version": version, "reason": error}})
                    self._broken[version] = (error, self._clock() + BROKEN_FOR_S)
                    self.counts["versions_refused"] += 1
                    return
                else:
                    return
        finally:
            del self._loads[version]
            self._wake.set()

    def _record(self, deliveries: Sequence[Delivery], ended: Sequence[InferenceFinished]) -> None:
        for finished in ended:
            self.counts[finished.outcome.value.lower()] += 1
        self._commit_recorded(
            deliveries,
            [
                Ended(
                    finished=f,
                    reply_to=d.request.reply_to,
                    deadline_at=d.request.deadline_at,
                    traceparent=d.request.traceparent,
                )
                for d, f in zip(deliveries, ended, strict=True)
            ],
        )

    def _repeat(self, deliveries: Sequence[Delivery]) -> None:
        """Finish what an earlier owner began: its results are on the log, what follows from them may not be."""
        mine = self._inbox.claim(deliveries)
        if mine:
            self.counts["recovered"] += len(mine)
            self._commit_recorded(mine, [d.ended for d in mine if d.ended is not None])

    def _commit_recorded(self, deliveries: Sequence[Delivery], ended: Sequence[Ended]) -> None:
        self._recordings.add(task := self._spawn(self._record_and_commit(deliveries, ended)))
        task.add_done_callback(self._recordings.discard)

    async def _record_and_commit(self, deliveries: Sequence[Delivery], ended: Sequence[Ended]) -> None:
        # 1 blobs, 2 results, 3 usage and copies: inside `record`. Die before the log has the results: the batch runs
        # again. Die before the usage: whoever inherits the request finds its result and sends both again.
        await self._outcomes.record(ended)
        # 4 offsets. Die before: the requests are inherited, their results are found and they do not run again.
        self._inbox.done(deliveries)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose unexpected end ends the worker, because nobody else waits for it."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._watch)
        return task

    def _watch(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() and self._crash is not None and not self._crash.done():
            self._crash.set_exception(task.exception() or RuntimeError("unreachable"))

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), timezone.utc)
