"""How the book of claims is written: calls that come together share a statement, and what need not be waited for is
written a moment later.

One statement with new claims is on its way at a time and the rest wait for the next one, as with the limiter. What
became of a claim is mostly two things within a few milliseconds, and so becomes one change of its row.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from uuid import UUID

from api.once.claims import Book, BookAway, Entry, Note, Standing
from infra.pause import Pause

logger = logging.getLogger(__name__)

_MOST_TOGETHER = 256
_NOTE_LINGER_S = 0.05
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 1.0
#: Of each kind, while the book is away: what is more is lost, and counted.
_MOST_WAITING = 20_000


class Entries:
    """New claims. `left` is told of claims that were entered for callers who have gone meanwhile."""

    def __init__(self, book: Book, left: Callable[[Entry], None]) -> None:
        self._book = book
        self._left = left
        self._waiting: list[tuple[Entry, asyncio.Future[Standing | None]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def enter(self, entry: Entry) -> Standing | None:
        """See Book.enter. Raises BookAway."""
        found: asyncio.Future[Standing | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, found))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.ensure_future(self._send())
        return await found

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_MOST_TOGETHER], self._waiting[_MOST_TOGETHER:]
            try:
                standings: Sequence[Standing | BaseException | None] = await self._book.enter([e for e, _ in batch])
            except BaseException as error:
                if not isinstance(error, (BookAway, asyncio.CancelledError)):
                    logger.exception("the book of claims failed for a reason nobody foresaw")
                # Those that still wait were never sent. They fail with the rest, or each would wait its own timeout.
                batch, self._waiting = batch + self._waiting, []
                self._settle(batch, [error] * len(batch))
                if not isinstance(error, Exception):
                    raise
            else:
                self._settle(batch, standings)

    def _settle(
        self,
        batch: Sequence[tuple[Entry, asyncio.Future[Standing | None]]],
        standings: Sequence[Standing | BaseException | None],
    ) -> None:
        for (entry, found), standing in zip(batch, standings, strict=True):
            if found.done():  # its caller has left
                if isinstance(standing, Standing) and is_entered(entry, standing):
                    self._left(entry)
            elif isinstance(standing, BaseException):
                found.set_exception(BookAway(f"{type(standing).__name__}: {standing}"))
            else:
                found.set_result(standing)


def is_entered(entry: Entry, standing: Standing) -> bool:
    """Whether this is the entry's own claim."""
    return standing.decisions.request_id == entry.decisions.request_id


class Notes:
    """What became of claims, and claims that were let through while the book was away; `run` writes them for ever."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._notes: dict[UUID, Note] = {}
        self._late: deque[Entry] = deque()
        self._there = asyncio.Event()
        self.counts: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Notes and late claims that are not written yet."""
        return len(self._notes) + len(self._late)

    def put(self, note: Note) -> None:
        """Have it written soon."""
        earlier = self._notes.get(note.request_id)
        if earlier is None and len(self._notes) >= _MOST_WAITING:
            self.counts["claim_notes_lost"] += 1
            return
        self._notes[note.request_id] = note if earlier is None else earlier.and_then(note)
        self._there.set()

    def enter_late(self, entry: Entry) -> None:
        """Have a claim entered that its call did not wait for."""
        if len(self._late) >= _MOST_WAITING:
            self.counts["claims_lost"] += 1
            return
        self._late.append(entry)
        self._there.set()

    async def run(self) -> None:
        """Write, for ever; while the book is away everything is kept, within bounds."""
        pause = Pause(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while True:
            await self._there.wait()
            await asyncio.sleep(_NOTE_LINGER_S)
            try:
                await self.write()
            except BookAway:
                await pause.wait()
            else:
                pause = Pause(_FIRST_RETRY_S, _LONGEST_RETRY_S)

    async def write(self) -> None:
        """Write what waits. Raises BookAway, and then what was not written waits again."""
        # Claims first: a note about one that is not there yet would be lost.
        while self._late:
            entries = [self._late.popleft() for _ in range(min(_MOST_TOGETHER, len(self._late)))]
            try:
                await self._book.enter(entries)
            except BaseException:
                self._late.extendleft(reversed(entries))
                raise
        while self._notes:
            notes = list(self._notes.values())[:_MOST_TOGETHER]
            for note in notes:
                del self._notes[note.request_id]
            try:
                await self._book.note(notes)
            except BaseException:
                for note in notes:
                    later = self._notes.get(note.request_id)
                    self._notes[note.request_id] = note if later is None else note.and_then(later)
                raise
        self._there.clear()

    async def close(self, *, within_s: float) -> None:
        """Before the process ends: write what waits, if the book is there."""
        with suppress(BookAway, asyncio.TimeoutError):
            await asyncio.wait_for(self.write(), within_s)
        if self.waiting:
            logger.warning("claims and notes about them are lost", extra={"fields": {"count": self.waiting}})
