"""What is known of calls that say which call they are, and what follows for a call that finds one like it.

A claim is entered before its request is published, so whoever comes later finds either the request's id or nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, IntEnum, auto
from typing import Protocol
from uuid import UUID

#: The owner of a claim that is not on the log by now has died, or was not told by the log: 1.5 s for the
#: acknowledgement, as much again for what comes before it.
OWNER_S = 3.0
#: A client repeats an answered call within its own pause, 8 s at most with OpenAI's, and what the network takes.
LOST_S = 15.0
#: It repeats a refused call within what Retry-After says, which OpenAI's follows up to 60 s, and as much again.
REFUSED_S = 60.0 + LOST_S
#: How long a claim without a key of its own is found.
COUNTED_HORIZON_S = 900.0
#: With less time left a request would hardly be run; its outcome is looked for instead.
_LEAST_LEFT = timedelta(seconds=0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sameness:
    """What a call says about itself: `key` is its Idempotency-Key, `retry` counts its client's own repetitions of it
    (None when the client does not say), `digest` is of the target and the body.

    `patience_s` is how long its client waits for an answer before it repeats the call, 0 when that is not known.
    """

    customer_id: str
    key_id: str
    key: str | None
    retry: int | None
    digest: bytes
    patience_s: float = 0.0

    @property
    def is_told(self) -> bool:
        """Whether the call says anything by which it could be known again."""
        return self.key is not None or self.retry is not None

    @property
    def is_keyed(self) -> bool:
        """A key of its own says more than a count."""
        return self.key is not None

    @property
    def is_repetition(self) -> bool:
        """Whether it says that it has been sent before."""
        return self.key is None and bool(self.retry)

    def name(self) -> bytes:
        """What repetitions of this call have in common: 32 bytes."""
        parts = (self.customer_id.encode(), self.key.encode()) if self.key else (self.key_id.encode(), self.digest)
        return hashlib.sha256(b"\0".join(parts)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What was decided when a call was first admitted; whoever finishes its admission decides the same."""

    request_id: UUID
    admitted_at: datetime
    deadline_at: datetime
    version: str
    price_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A call as it is entered."""

    is_keyed: bool
    name: bytes
    customer_id: str
    digest: bytes
    retries: int
    patience_s: float
    decisions: Decisions

    @staticmethod
    def of(call: Sameness, decisions: Decisions) -> Entry:
        """The entry of a call that is told."""
        return Entry(
            is_keyed=call.is_keyed,
            name=call.name(),
            customer_id=call.customer_id,
            digest=call.digest,
            retries=0 if call.is_keyed else call.retry or 0,
            patience_s=0.0 if call.is_keyed else call.patience_s,
            decisions=decisions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A claim as it stands in the book. `age_s` counts from its entry, `quiet_s` from the last call that holds or
    joined it, both by the book's own clock."""

    is_keyed: bool
    name: bytes
    customer_id: str
    digest: bytes
    retries: int
    takeovers: int
    is_accepted: bool
    age_s: float
    quiet_s: float
    decisions: Decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A call's place in the book. `is_ours`: this process is to admit it; else its outcome is to be waited for.

    One that `is_taken_over` was to be admitted by another call, which may have put it on the log.
    """

    is_keyed: bool
    retries: int
    decisions: Decisions
    is_ours: bool
    is_taken_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What became of a claim, as the call says that saw so many `retries`; `answered` is about that call.

    `withdrawn` is about the call: it did not put the request on the log. That ends the claim only if nobody ever took
    it over, for another owner may have put it there, and it would run a second time under another id. `void` is about
    the request, whoever put it there, and always ends the claim.
    """

    is_keyed: bool
    request_id: UUID
    retries: int
    accepted: bool = False
    answered: bool = False
    withdrawn: bool = False
    void: bool = False

    @property
    def is_leaving(self) -> bool:
        """Whether the claim may have to end."""
        return self.withdrawn or self.void

    def and_then(self, later: Note) -> Note:
        """Both as one."""
        accepted = self.accepted or later.accepted
        return Note(
            is_keyed=self.is_keyed,
            request_id=self.request_id,
            retries=max(self.retries, later.retries),
            accepted=accepted,
            answered=later.answered or (self.answered and later.retries <= self.retries),
            # Accepted for one call and withdrawn by another: the claim was taken over.
            withdrawn=(self.withdrawn or later.withdrawn) and not accepted,
            void=self.void or later.void,
        )


class BookAway(RuntimeError):
    """The book did not answer in time: what was to be written may be there or not."""


class Book(Protocol):
    """Where claims are kept, the same for every process. Each call is over within its own bound or raises BookAway."""

    async def enter(self, entries: Sequence[Entry]) -> Sequence[Standing | None]:
        """Enter each. One whose key is taken is not entered, and what stands there is given instead.

        None where what stood there left the book meanwhile: it may be entered again.
        """

    async def rejoin(self, entry: Entry) -> Standing | None:
        """The claim that this call repeats, as `fit` says; it has seen this one from now on, and no other of the same
        count. Of several of a kind the one that has seen the most repetitions, of these the newest.

        None: the call is a first one. If what it repeats was withdrawn, that is used up, and no other call finds it.
        """

    async def find(self, standing: Standing) -> Standing | None:
        """The same claim as it stands now, None when it ended."""

    async def take_over(self, standing: Standing) -> bool:
        """Become the owner of a claim that nobody else took over since it stood like this, and that is not accepted."""

    async def note(self, notes: Sequence[Note]) -> None:
        """Write down what became of claims, at most one note for each.

        A void claim ends; one that is withdrawn does unless it is accepted, or was ever taken over. Without a key it is
        remembered as withdrawn for the next repetition of its call. If that came already, it waits, and will enter
        itself: then nobody else may come back to this one.
        """

    async def prune(self, *, is_keyed: bool, older_than_s: float, at_most: int) -> int | None:
        """Let go of so many claims that no call came to for so long, and of withdrawn ones after REFUSED_S; how many,
        None while another process does it."""


class Fit(IntEnum):
    """What a repetition may repeat, the likeliest first.

    A call whose client certainly waits for an answer; one that was refused, which clients repeat as a rule; one that
    was answered, which they only do when the answer was lost.
    """

    OPEN = 1
    WITHDRAWN = 2
    ANSWERED = 3


def fit(*, is_accepted: bool, quiet_s: float, answered_s: float | None, patience_s: float) -> Fit | None:
    """As what a claim without a key may be repeated, None if it may not.

    `answered_s` ago its last call was answered in whole, None if it was not; answered and not accepted is withdrawn. An
    answer may be lost on its way: its client repeats the call at once when the connection breaks, or when its own
    `patience_s` is over.
    """
    if quiet_s > COUNTED_HORIZON_S + patience_s:
        return None
    if answered_s is None:
        return Fit.OPEN
    if not is_accepted:
        return Fit.WITHDRAWN if answered_s < REFUSED_S else None
    is_given_up = patience_s > 0 and patience_s <= quiet_s < patience_s + LOST_S
    return Fit.ANSWERED if answered_s < LOST_S or is_given_up else None


class Next(Enum):
    """What a call does that found a claim like its own."""

    JOIN = auto()
    WAIT = auto()
    TAKE_OVER = auto()
    REFUSE = auto()
    FORGET = auto()


def judged(standing: Standing, call: Sameness, *, now: datetime, horizon_s: float) -> Next:
    """What follows from a claim for a call like it, by the gateway's clock."""
    if standing.is_keyed and standing.age_s >= horizon_s:
        return Next.FORGET
    if standing.digest != call.digest or standing.customer_id != call.customer_id:
        return Next.REFUSE
    if standing.is_accepted:
        return Next.JOIN
    if standing.quiet_s < OWNER_S:
        return Next.WAIT
    # The deadline stays what it was: of two records of one request neither may be run after the other has expired.
    return Next.TAKE_OVER if standing.decisions.deadline_at - now >= _LEAST_LEFT else Next.JOIN
