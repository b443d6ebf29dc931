"""What becomes of calls that may be repetitions, once they are admitted: each is told the outcome of the first, or runs
itself when the first came to nothing.

An outcome that was not billed and is not the request's own fault is not kept: neither a deadline that passed in the
queue nor a server that was away should be told to whoever comes back later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol
from uuid import UUID

from api.errors import (
    NO_RETRY,
    SHOULD_RETRY,
    AcceptanceUnknown,
    AnswerLost,
    ApiError,
    DeadlinePassed,
    ModelFailed,
)
from api.gate import Admission
from api.once.once import Claim, Once
from api.results.waiting import Results, Waiter
from schemas.records import InferenceFinished, Outcome

#: The worker's error codes of failures that pass: nothing was billed, and the caller may send the call again.
PASSING = frozenset({"unavailable", "input_lost", "input_altered"})
#: And of those that say nothing about the request, so that another run of it may end otherwise.
_NOT_ITS_OWN = PASSING | {"internal", "model_unavailable"}

#: Past its deadline no success of a request is handed to the log; clocks may differ by 5 s.
SETTLED_AFTER = timedelta(seconds=6)
#: A success that was handed over in time is on the log by then, and a look at it need not go further.
_LOOK_UNTIL = timedelta(seconds=60)
#: With less of its own time left a call is not run in place of the one that it repeats.
_LEAST_LEFT = timedelta(seconds=0.5)


class LastWord(Protocol):
    """What the log says about a request in the end (api.once.last_word.LogsLastWord fits)."""

    async def of(
        self, request_id: UUID, customer_id: str, *, since: datetime, until: datetime
    ) -> InferenceFinished | None:
        """Its result, if it was recorded in this time. Raises AnswerLost when the log does not answer."""


class Repeated:
    """The repetitions of this process. Without `once` no call is known as one."""

    def __init__(
        self,
        results: Results,
        *,
        once: Once | None = None,
        last_word: LastWord | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._results = results
        self._once = once
        self._last_word = last_word
        self._now = now

    async def publishing(self, publish: Coroutine[Any, Any, None], claim: Claim | None) -> None:
        """Publish, and note for whoever repeats the call whether it was accepted. Raises what publishing raises."""
        if self._once is None or claim is None:
            await publish
            return
        # Its caller may leave meanwhile, and come again.
        task = asyncio.ensure_future(self._published(publish, self._once, claim))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
        await asyncio.shield(task)

    async def _published(self, publish: Coroutine[Any, Any, None], once: Once, claim: Claim) -> None:
        try:
            await publish
        except AcceptanceUnknown:
            raise  # a repetition finds its outcome, or publishes it again under the same id
        except ApiError:
            once.withdraw(claim)
            raise
        once.accepted(claim)

    async def outcome(self, admission: Admission, waiter: Waiter, *, within_s: float) -> InferenceFinished | None:
        """How the request ended that this call repeats. None: it certainly has no result, and none can come.

        Raises DeadlinePassed after `within_s`, AnswerLost.
        """
        decided = admission.decisions
        await self._results.look(waiter)
        settled_at = decided.deadline_at + SETTLED_AFTER
        if self._last_word is None or settled_at > admission.until:
            return await self._results.wait(waiter, within_s=within_s)
        with suppress(DeadlinePassed):
            return await self._results.wait(waiter, within_s=max(0.0, (settled_at - self._now()).total_seconds()))
        return await self._last_word.of(
            decided.request_id,
            admission.caller.customer_id,
            since=decided.admitted_at,
            until=decided.deadline_at + _LOOK_UNTIL,
        )

    async def comes_anew(self, admission: Admission, request_id: UUID, finished: InferenceFinished | None) -> bool:
        """Whether the call is to pass the gate again, as a first one with this id of its own.

        In any case nobody else is told an outcome that is not kept. Raises Unavailable when the book does not answer.
        """
        claim = admission.claim
        if self._once is None or claim is None or not is_nothing(finished):
            return False
        left = admission.until - self._now()
        if claim.decisions.request_id == request_id or left < _LEAST_LEFT:
            self._once.void(claim)
            return False
        await self._once.renew(claim)
        return True

    def answered(self, claim: Claim | None) -> None:
        """A call was told the outcome in whole."""
        if self._once is not None and claim is not None:
            self._once.answered(claim)


def is_nothing(finished: InferenceFinished | None) -> bool:
    """Whether a request came to nothing that is kept."""
    if finished is None or finished.outcome in (Outcome.EXPIRED, Outcome.CANCELLED):
        return True
    return finished.outcome is Outcome.FAILED and finished.error_code in _NOT_ITS_OWN


def nothing_yet(admission: Admission) -> ApiError:
    """What a caller is told whose call would have to be run now, too late."""
    words = f"request {admission.decisions.request_id}, which this call repeats, was not run"
    return DeadlinePassed(f"{words}, and too little time is left to run it now; send the call again")


def told(error: ApiError, admission: Admission) -> ApiError:
    """The error of an admitted call. Its client should repeat it if the repetition may be told something else."""
    if admission.claim is not None:
        error.request_id = admission.decisions.request_id
        if isinstance(error, (AcceptanceUnknown, AnswerLost, DeadlinePassed)):
            error.headers.pop(SHOULD_RETRY, None)
        elif isinstance(error, ModelFailed) and error.code not in _NOT_ITS_OWN:
            error.headers.update(NO_RETRY)
    return error
