"""Once: calls that say they are the same call, by a key of their own or because a client repeats itself.

The first of them is run; whoever comes later, to whichever process, is given its outcome. What they say, and what
follows from it, is in `claims`; here is the order in which the book is asked, and what happens while it is away.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import TypeVar

from api.errors import Unavailable, Unprocessable
from api.once.batches import Entries, Notes, is_entered
from api.once.claims import (
    Book,
    BookAway,
    Claim,
    Decisions,
    Entry,
    Next,
    Note,
    Sameness,
    Standing,
    judged,
)
from infra.breaker import Breaker
from infra.pause import Pause

__all__ = ["Claim", "Decisions", "Once", "Sameness"]

A = TypeVar("A")
T = TypeVar("T")

_AWAY_PAUSE_S = 0.5
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.02, 0.2
_CLOSE_WITHIN_S = 1.0


class Once:
    """The book of claims, as the gate and the use case use it. `run` writes beside the handlers for ever.

    `horizon_s` is how long an Idempotency-Key is known.
    """

    def __init__(
        self,
        book: Book,
        *,
        horizon_s: float,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._book = book
        self._horizon_s = horizon_s
        self._now = now
        self._notes = Notes(book)
        self._entries = Entries(book, self._left)
        self._breaker = Breaker("the book of claims", pause_s=_AWAY_PAUSE_S)
        self.counts = self._notes.counts

    def trouble(self) -> str | None:
        """Why calls cannot be known again now, None when they can."""
        return self._breaker.trouble()

    async def run(self) -> None:
        """See Notes.run."""
        await self._notes.run()

    async def close(self) -> None:
        """Before the process ends."""
        await self._notes.close(within_s=_CLOSE_WITHIN_S)

    async def claim(self, call: Sameness, decisions: Decisions) -> Claim:
        """Enter a call that is told, or find the first like it.

        Raises Unprocessable (the key was used with another call), Unavailable (the book does not answer, or the first
        is just being admitted and that did not end before this call's deadline). While the book does not answer, a
        call without a key that its client has not sent before is let through, and entered later.
        """
        entry = Entry.of(call, decisions)
        try:
            return await self._claimed(call, entry)
        except BookAway as error:
            if call.is_keyed or call.is_repetition:
                raise _away(call) from error
            # Its repetitions are refused for as long as the book is found away. After that there is a moment, until
            # this is entered, in which one would be taken for a first call.
            self.counts["claims_entered_late"] += 1
            self._notes.enter_late(entry)
            return _claim(entry, decisions, is_ours=True)

    def accepted(self, claim: Claim) -> None:
        """The log has the request. Losing this costs a later twin another run, which is not billed."""
        self._note(claim, accepted=True)

    def answered(self, claim: Claim) -> None:
        """The whole answer was handed to the caller's connection."""
        if not claim.is_keyed:  # what has a key is found however often it was answered
            self._note(claim, accepted=True, answered=True)

    def withdraw(self, claim: Claim) -> None:
        """The call is refused and did not put its request on the log: the next call like it is a first one.

        Unless another call may have put it there: one that this call took the claim over from, or one that took it over
        from this call, which was slow. The book knows of both.
        """
        self._note(claim, withdrawn=True)

    def void(self, claim: Claim) -> None:
        """Its request came to nothing that counts, and cannot any more: the next call like it is a first one.

        Whoever held the claim meant the same request, and what was entered in its place has another id. So this may be
        said late, and more than once.
        """
        self._note(claim, void=True)

    async def renew(self, claim: Claim) -> None:
        """The same, at once: this call is about to be the next. Raises Unavailable when the book does not answer."""
        try:
            await self._asked(self._book.note, [_note(claim, void=True)])
        except BookAway as error:
            raise _book_away("calls like it cannot be looked up now") from error

    async def _claimed(self, call: Sameness, entry: Entry) -> Claim:
        standing = await self._asked(self._book.rejoin, entry) if call.is_repetition else None
        look = Pause(_FIRST_LOOK_S, _LONGEST_LOOK_S)
        while True:
            if standing is None:
                standing = await self._asked(self._entries.enter, entry)
            if standing is None:  # what stood there left the book just now
                continue
            if is_entered(entry, standing):
                return _claim(entry, standing.decisions, is_ours=True)
            todo = judged(standing, call, now=self._now(), horizon_s=self._horizon_s)
            if todo is Next.JOIN:
                return _claim(entry, standing.decisions, is_ours=False)
            if todo is Next.REFUSE:
                raise Unprocessable(
                    "Idempotency-Key: it was used with another body or path before; another call needs another key",
                    code="idempotency_key_reused",
                )
            if todo is Next.TAKE_OVER and await self._asked(self._book.take_over, standing):
                return _claim(entry, standing.decisions, is_ours=True, is_taken_over=True)
            if todo is Next.FORGET:
                await self._asked(self._book.note, [_gone(standing)])
            if todo is Next.WAIT:
                if self._now() >= entry.decisions.deadline_at:
                    raise Unavailable("the first call like this is just being admitted", code="first_call_pending")
                await look.wait()
            standing = await self._asked(self._book.find, standing)

    async def _asked(self, ask: Callable[[A], Awaitable[T]], about: A) -> T:
        """What the book says. Raises BookAway, at once while it is known to be away."""
        if (why := self._breaker.refuses()) is not None:
            raise BookAway(why)
        try:
            answer = await ask(about)
        except BookAway as error:
            self._breaker.failed(str(error))
            raise
        self._breaker.succeeded()
        return answer

    def _left(self, entry: Entry) -> None:
        self._notes.put(_note(_claim(entry, entry.decisions, is_ours=True), withdrawn=True))

    def _note(self, claim: Claim, **said: bool) -> None:
        self._notes.put(_note(claim, **said))


def _claim(entry: Entry, decisions: Decisions, *, is_ours: bool, is_taken_over: bool = False) -> Claim:
    return Claim(
        is_keyed=entry.is_keyed,
        retries=entry.retries,
        decisions=decisions,
        is_ours=is_ours,
        is_taken_over=is_taken_over,
    )


def _note(claim: Claim, **said: bool) -> Note:
    return Note(is_keyed=claim.is_keyed, request_id=claim.decisions.request_id, retries=claim.retries, **said)


def _gone(standing: Standing) -> Note:
    return Note(is_keyed=standing.is_keyed, request_id=standing.decisions.request_id, retries=0, void=True)


def _away(call: Sameness) -> Unavailable:
    if call.is_keyed:
        return _book_away("Idempotency-Key: whether it was used before cannot be looked up now")
    return _book_away("this call was sent before, and what came of it cannot be looked up now")


def _book_away(words: str) -> Unavailable:
    return Unavailable(f"{words}: Postgres does not answer", code="claims_away")
