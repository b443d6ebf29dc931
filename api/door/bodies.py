"""Bodies that are still arriving: how many bytes of them this process holds, and who waits or gives way to others.

Room for a whole body is taken before its first byte is read: for the length it is said to have, or, where none is said,
piece by piece. Who finds no room waits for a moment, and a body that has been arriving for long then gives way to it.
Half of the room is for one key. What is small is read without asking: every connection may hold as much anyway.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from api.errors import BadInput, TooLarge, Unavailable

#: A body of so many bytes needs no room.
SMALL_BYTES = 16 * 1024
#: How long a body may take, how long it may take while others wait for room, and how long these do.
WITHIN_S, YIELD_AFTER_S, PATIENCE_S = 10.0, 2.0, 3.0


class _Reading:
    """One body."""

    __slots__ = ("began_s", "gave_way", "holder", "size_bytes", "task")

    def __init__(self, holder: str, began_s: float) -> None:
        self.holder = holder
        self.began_s = began_s
        self.size_bytes = 0
        self.gave_way = False
        self.task: asyncio.Task[bytes] | None = None


class Bodies:
    """Room for `most_bytes` of bodies, of which one holder takes at most half. `counts` are since the start."""

    def __init__(self, *, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._most_each = most_bytes, most_bytes // 2
        self._clock = clock
        self._held = 0
        self._holders: Counter[str] = Counter()
        # In the order in which they began.
        self._readings: dict[_Reading, None] = {}
        self._waiting: dict[asyncio.Future[None], tuple[_Reading, int]] = {}
        self.counts: Counter[str] = Counter(bodies_waited=0, bodies_crowded=0, bodies_gave_way=0)

    @property
    def held_bytes(self) -> int:
        """Bytes of room that are taken."""
        return self._held

    async def read(
        self,
        holder: str,
        next_piece: Callable[[], Awaitable[bytes]],
        *,
        size_bytes: int | None,
        limit_bytes: int,
        within_s: float = WITHIN_S,
    ) -> bytes:
        """A whole body: pieces until an empty one. `size_bytes` is what it says of itself.

        Raises TooLarge past `limit_bytes`, BadInput when it has not arrived in time, Unavailable when there is no room.
        """
        reading = _Reading(holder, self._clock())
        task = reading.task = asyncio.ensure_future(self._collect(reading, next_piece, size_bytes, limit_bytes))
        self._readings[reading] = None
        timer = asyncio.get_running_loop().call_later(within_s, task.cancel)
        try:
            await asyncio.wait({task})
        finally:
            timer.cancel()
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
            del self._readings[reading]
            self._give_back(reading)
        if not task.cancelled():
            return task.result()
        if reading.gave_way:
            raise _crowded("this body took long to arrive, and its room was needed for others")
        raise BadInput(f"the body did not arrive within {within_s:g} s", code="body_timeout")

    async def _collect(
        self, reading: _Reading, next_piece: Callable[[], Awaitable[bytes]], size_bytes: int | None, limit_bytes: int
    ) -> bytes:
        if size_bytes is not None:
            await self._take(reading, size_bytes)
        body = bytearray()
        while piece := await next_piece():
            if len(body) + len(piece) > limit_bytes:
                raise TooLarge(f"the body is larger than {limit_bytes} bytes")
            await self._take(reading, len(body) + len(piece) - reading.size_bytes)
            body += piece
        return bytes(body)

    async def _take(self, reading: _Reading, more_bytes: int) -> None:
        if more_bytes <= 0 or reading.size_bytes + more_bytes <= SMALL_BYTES:
            return
        if self._fits(reading, more_bytes) and not self._somebody_waits(reading.holder):
            self._add(reading, more_bytes)
        else:
            await self._wait(reading, more_bytes)

    async def _wait(self, reading: _Reading, more_bytes: int) -> None:
        """Until it has its room. Raises Unavailable after PATIENCE_S."""
        self.counts["bodies_waited"] += 1
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting[turn] = (reading, more_bytes)
        timers = [loop.call_later(after_s, self._displace, turn) for after_s in (0.0, YIELD_AFTER_S)]
        timers.append(loop.call_later(PATIENCE_S, self._refuse, turn))
        try:
            # Not by wait_for: before Python 3.12 it may swallow a cancellation that comes just as the wait ends.
            await turn
        finally:
            self._waiting.pop(turn, None)
            if not turn.cancel() and not turn.cancelled():
                turn.exception()  # seen, also when the caller has just gone
            for timer in timers:
                timer.cancel()

    def _refuse(self, turn: asyncio.Future[None]) -> None:
        if not turn.done():
            self.counts["bodies_crowded"] += 1
            turn.set_exception(_crowded("other bodies take all the room there is for reading them"))

    def _displace(self, turn: asyncio.Future[None]) -> None:
        """Those that have been arriving for long give way, the oldest first, until there is room for this one."""
        if turn.done() or turn not in self._waiting:
            return
        wanting, more_bytes = self._waiting[turn]
        old = [r for r in self._readings if r.size_bytes and self._clock() - r.began_s >= YIELD_AFTER_S]
        old = [r for r in old if r is not wanting and not r.gave_way]
        # Its own first: they may be all that is in its way.
        lacks = self._holders[wanting.holder] + more_bytes - self._most_each
        freed = self._send_away([r for r in old if r.holder == wanting.holder], lacks)
        self._send_away([r for r in old if not r.gave_way], self._held + more_bytes - self._most - freed)

    def _send_away(self, readings: Sequence[_Reading], lacks_bytes: int) -> int:
        """As many of these as it takes; returns how many bytes will be free for it."""
        freed = 0
        for reading in readings:
            if freed >= lacks_bytes:
                break
            self.counts["bodies_gave_way"] += 1
            reading.gave_way = True
            freed += reading.size_bytes
            if reading.task is not None:
                reading.task.cancel()
        return freed

    def _fits(self, reading: _Reading, more_bytes: int) -> bool:
        return self._held + more_bytes <= self._most and self._holders[reading.holder] + more_bytes <= self._most_each

    def _somebody_waits(self, holder: str) -> bool:
        """Whether somebody waits whose turn is sooner; who waits for room of its own key alone keeps no other back."""
        return any(
            r.holder == holder or self._holders[r.holder] + n <= self._most_each for r, n in self._waiting.values()
        )

    def _add(self, reading: _Reading, more_bytes: int) -> None:
        reading.size_bytes += more_bytes
        self._held += more_bytes
        self._holders[reading.holder] += more_bytes

    def _give_back(self, reading: _Reading) -> None:
        self._held -= reading.size_bytes
        self._holders[reading.holder] -= reading.size_bytes
        if not self._holders[reading.holder]:
            del self._holders[reading.holder]
        reading.size_bytes = 0
        self._wake()

    def _wake(self) -> None:
        """Give room to those who wait, in the order in which they came."""
        for turn, (reading, more_bytes) in list(self._waiting.items()):
            if not turn.done() and self._fits(reading, more_bytes):
                self._add(reading, more_bytes)
                del self._waiting[turn]
                turn.set_result(None)


def _crowded(words: str) -> Unavailable:
    return Unavailable(words, code="crowded", retry_after_s=1)
