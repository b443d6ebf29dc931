"""The worker's loop: poll, batch, run, record, commit. It decides the order and leaves every act to three ports.

    inbox -> batcher -> runner -> outcomes -> inbox        take, wait in line, run together, record, commit
                 \\-> runner.prepare                        in the meantime, versions that are not loaded yet

One batch runs at a time; polling, loading and recording go on meanwhile, so that none of them delays another version.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Protocol

from gpu_worker.batching import Batch, Batcher, Limits, waiting
from gpu_worker.endings import Ended, Failure, Ran, Run
from gpu_worker.errors import MachineError, ModelError
from schemas.ids import new_request_id
from schemas.records import InferenceFinished, InferenceRequested, Outcome

log = logging.getLogger(__name__)

#: A version that failed to load is not tried again for this long; its requests fail at once meanwhile.
BROKEN_FOR_S = 10.0
_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """An admitted request and its place on the log. `claim` tells deliveries before and after a rebalance apart.

    `ended` is there when an earlier owner of the partition has recorded the request's end: then that is the result,
    and the request is neither run nor expired again.
    """

    request: InferenceRequested
    partition: int
    offset: int
    generation: int
    size_bytes: int
    ended: Ended | None = None


class Inbox(Protocol):
    """Where requests come from."""

    async def take(self) -> Sequence[Delivery]:
        """What has arrived; may be empty. Must be called again soon, also while batches run."""

    def claim(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Those that are still this worker's to end; from now until `done` it is busy with them."""

    def done(self, deliveries: Sequence[Delivery]) -> None:
        """These ended and their ends are on the log: their offsets may be committed."""


class Runner(Protocol):
    """What runs models."""

    def ready(self, version: str) -> bool:
        """Whether `run` can be called for this version now."""

    async def prepare(self, version: str) -> None:
        """Make a version ready. Raises ModelError when it never will be, MachineError when it may be later."""

    async def run(self, version: str, requests: Sequence[InferenceRequested]) -> Ran:
        """Run requests of a ready version together. Raises MachineError when nothing will ever run here again."""


class Outcomes(Protocol):
    """Where ends of requests go."""

    async def record(self, ended: Sequence[Ended]) -> None:
        """Returns when all of it is on the log; until then it holds and retries.

        What is recorded past its deadline becomes EXPIRED; what is on the log already stays as it is.
        """


class Worker:
    """One worker of one pool. `clock` gives Unix seconds."""

    def __init__(
        self,
        *,
        name: str,
        inbox: Inbox,
        runner: Runner,
        outcomes: Outcomes,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._inbox = inbox
        self._runner = runner
        self._outcomes = outcomes
        self._clock = clock
        self._batcher: Batcher[Delivery] = Batcher(limits)
        self._wake = asyncio.Event()
        self._running = False
        self._stopping = False
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._broken: dict[str, tuple[ModelError, float]] = {}
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
            tasks = [intake, dispatch, stopper, *self._loads.values(), *self._recordings]
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
            now_s = self._clock()
            self._repeat([d for d in arrived if d.ended is not None])
            for delivery in arrived:
                if delivery.ended is not None:
                    continue
                one = waiting(delivery, delivery.request, arrived_s=now_s)
                self._batcher.add(one, idle=not self._running)
            if arrived:
                self.counts["taken"] += len(arrived)
                self._wake.set()

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
        now = self._now()
        self._record(mine, [run.end(d.request, r, now) for d, r in zip(mine, ran.results, strict=True)])

    def _end_expired(self, now_s: float) -> None:
        expired = Failure(code="deadline_exceeded", message="the deadline passed before the request could be run")
        self._end_unrun(self._batcher.expired(now_s), expired, Outcome.EXPIRED)

    def _end_unrun(self, deliveries: Sequence[Delivery], failure: Failure, outcome: Outcome) -> None:
        mine = self._inbox.claim(deliveries)
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
        # 1 results, 2 usage and copies: both inside `record`. Die before the log has the results: the batch runs
        # again. Die before the usage: whoever inherits the request finds its result and sends both again.
        await self._outcomes.record(ended)
        # 3 offsets. Die before: the requests are inherited, their results are found and they do not run again.
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
