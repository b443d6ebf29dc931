"""Large tensors on their way to S3 and back, off the event loop, in bounded time, by threads of their own.

What a record may carry and whether a blob is the right one is decided in `schemas.claims`. A store that does not
answer is asked once in a while only, so that requests do not wait for it one after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from uuid import UUID

from infra.breaker import Breaker
from infra.s3 import ObjectMissing, StoreUnavailable
from schemas.claims import BlobAltered, BlobLost, checked_in, data_bytes, redeemed, require_own
from schemas.tensors import Blob, Tensor

T = TypeVar("T")

_PAUSE_S = 2.0
_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 1.0


class BlobStore(Protocol):
    """What is needed of S3 (infra.s3.Store fits)."""

    def put_once(self, key: str, data: bytes) -> bool:
        """Store an object that is not there yet. Raises StoreUnavailable."""

    def get_at_most(self, key: str, size_bytes: int) -> bytes:
        """The object, or so much of it that it is seen to be longer. Raises ObjectMissing, StoreUnavailable."""


class ClaimCheck:
    """Takes tensors in and gives them out again. `inline_bytes` is what a record carries itself.

    `patience_s` is the longest that one call waits for the store; only a wait of that length says that it is away. A
    caller in more of a hurry says nothing about it, nor does one that found all threads at work for others.
    `counts` holds what was done, by name.
    """

    def __init__(
        self,
        store: BlobStore,
        *,
        inline_bytes: int,
        patience_s: float,
        threads: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._inline_bytes = inline_bytes
        self._patience_s = patience_s
        self._clock = clock
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="blobs")
        # A turn is a thread: had by one call until the thread is done and the loop has what it fetched.
        self._turns = asyncio.Semaphore(threads)
        self._under_way: set[asyncio.Future[Any]] = set()
        self._breaker = Breaker("the store of large tensors", pause_s=_PAUSE_S, clock=clock)
        self.counts: Counter[str] = Counter()

    def close(self) -> None:
        """Let no further call start. One under way ends with the process."""
        for future in self._under_way:
            future.cancel()  # nobody is there to hear of its end
        self._threads.shutdown(wait=False, cancel_futures=True)

    def trouble(self) -> str | None:
        """What is wrong with the store, as of the last call; None when nothing is."""
        return self._breaker.trouble()

    def is_due(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these carry more data than a record should."""
        return data_bytes(tensors) > self._inline_bytes

    async def hand_in(self, tensors: Sequence[Tensor], request_id: UUID, *, within_s: float) -> tuple[Tensor, ...]:
        """Keep what is too large, and return the tensors as their record is to carry them.

        Raises StoreUnavailable after `within_s` or earlier, also when other calls take all of that time. What was kept
        by then belongs to no record and expires.
        """
        try:
            carried, count = await self._call(lambda: self._keep(tensors, request_id), within_s)
        except StoreUnavailable:
            self.counts["blobs_not_kept"] += 1
            raise
        self.counts["blobs_kept"] += count
        return carried

    async def redeem(self, tensors: Sequence[Tensor], request_id: UUID, *, within_s: float) -> tuple[Tensor, ...]:
        """The tensors of this request with all their data, verified. While the store is away this tries again.

        Raises StoreUnavailable after `within_s`; BlobLost and BlobAltered at once, since waiting mends neither.
        """
        ends_s = self._clock() + within_s
        try:
            for tensor in tensors:
                require_own(tensor, request_id)
        except BlobAltered:
            self.counts["blobs_broken"] += 1
            raise
        return tuple([await self._redeem(t, t.blob, ends_s) if t.blob else t for t in tensors])

    async def _redeem(self, tensor: Tensor, blob: Blob, ends_s: float) -> Tensor:
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                found = await self._call(lambda: self._fetch(tensor, blob), ends_s - self._clock())
            except (BlobLost, BlobAltered):
                self.counts["blobs_broken"] += 1
                raise
            except StoreUnavailable:
                left_s = ends_s - self._clock()
                if left_s <= 0:
                    self.counts["blobs_not_fetched"] += 1
                    raise
                await asyncio.sleep(min(retry_s, left_s))
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
            else:
                self.counts["blobs_fetched"] += 1
                return found

    def _keep(self, tensors: Sequence[Tensor], request_id: UUID) -> tuple[tuple[Tensor, ...], int]:
        """Runs in a thread: digests of megabytes take milliseconds too."""
        carried, blobs = checked_in(tensors, request_id, inline_bytes=self._inline_bytes)
        for key, data in blobs.items():
            self._store.put_once(key, data)
        return carried, len(blobs)

    def _fetch(self, tensor: Tensor, blob: Blob) -> Tensor:
        """Runs in a thread."""
        try:
            data = self._store.get_at_most(blob.key, blob.size_bytes)
        except ObjectMissing as error:
            raise BlobLost(f"tensor '{tensor.name}': {error}") from error
        return redeemed(tensor, blob, data)

    async def _call(self, work: Callable[[], T], within_s: float) -> T:
        known_away = self._breaker.trouble() is not None
        self._refuse_while_away()
        left_s = await self._take_turn(within_s)
        if not known_away:  # else this is the one that finds out
            try:
                self._refuse_while_away()
            except StoreUnavailable:
                self._turns.release()
                raise
        wait_s = min(left_s, self._patience_s)
        try:
            done = await asyncio.wait_for(asyncio.shield(self._start(work)), max(0.0, wait_s))
        except asyncio.TimeoutError:
            why = f"no answer within {wait_s:.1f} s"
            if wait_s >= self._patience_s:
                self._breaker.failed(why)
            raise StoreUnavailable(why) from None
        except (BlobLost, BlobAltered):
            self._breaker.succeeded()
            raise
        self._breaker.succeeded()
        return done

    async def _take_turn(self, within_s: float) -> float:
        """Wait for a thread; what is left of `within_s` then. That there is none says nothing about the store."""
        if not self._turns.locked():
            await self._turns.acquire()  # at once
            return within_s
        ends_s = self._clock() + within_s
        try:
            await asyncio.wait_for(self._turns.acquire(), max(0.0, within_s))
        except asyncio.TimeoutError:
            raise StoreUnavailable(f"busy: other calls took all of {within_s:.1f} s") from None
        return ends_s - self._clock()

    def _refuse_while_away(self) -> None:
        refusal = self._breaker.refuses()
        if refusal is not None:
            raise StoreUnavailable(refusal)

    def _start(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Begin in a thread, with the turn that was taken, which ends with the work also when nobody waits for it."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._under_way.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._under_way.discard(future)
        error = None if future.cancelled() else future.exception()  # seen, also when whoever asked has gone
        if isinstance(error, StoreUnavailable):
            self._breaker.failed(str(error))  # before the next takes this turn
        self._turns.release()
