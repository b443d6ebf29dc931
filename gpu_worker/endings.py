"""How a request ended: an answer or a failure, and the record that says so.

Pure; what a request is billed for is decided here, from its inputs alone, so that a repeated run bills the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from schemas.ids import finished_id
from schemas.records import InferenceFinished, InferenceRequested, Outcome, Task
from schemas.tensors import Tensor

#: Characters of what a caller is told; a message may quote a name of any length.
LONGEST_MESSAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model gave for one request, and what went into it as the runner counted it.

    `tokens` is 0 for models that take no text.
    """

    outputs: tuple[Tensor, ...]
    items: int
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why one request has no answer: a stable code and words for the caller."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One result per request that was run, in their order, the time the run took, and the version that ran.

    `version` comes from the loaded model, never from a request: that a request's version ran is proved by comparing.
    """

    version: str
    results: Sequence[Answer | Failure]
    run_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request's end, the API instance that waits for it, and until when it may be anything but EXPIRED.

    `traceparent` is the request's trace context, None when its caller sent none. `logged` holds the framed record of an
    end that is on the log already, and None for a new one.
    """

    finished: InferenceFinished
    reply_to: str
    deadline_at: datetime
    traceparent: str | None = None
    logged: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all requests of one run have in common. `started_s` in Unix seconds.

    When nothing ran `items` is 0 and `version` None; the record then names the version that was asked for.
    """

    worker: str
    version: str | None
    batch_id: UUID
    items: int
    started_s: float
    run_us: int

    def end(
        self,
        request: InferenceRequested,
        result: Answer | Failure,
        now: datetime,
        failed: Outcome = Outcome.FAILED,
    ) -> InferenceFinished:
        """The record of one request's end; `failed` is the outcome when `result` is a failure."""
        answer = result if isinstance(result, Answer) else None
        failure = result if isinstance(result, Failure) else None
        return InferenceFinished(
            event_id=finished_id(request.request_id),
            occurred_at=now,
            request_id=request.request_id,
            customer_id=request.customer_id,
            model=request.model,
            version=self.version or request.version,
            outcome=Outcome.SUCCEEDED if answer else failed,
            error_code=failure.code if failure else None,
            error_message=failure.message[:LONGEST_MESSAGE] if failure else None,
            outputs=answer.outputs if answer else (),
            price_id=request.price_id,
            quantities=quantities(request.task, answer) if answer else {},
            admitted_at=request.occurred_at,
            worker=self.worker,
            batch_id=self.batch_id,
            batch_items=self.items,
            queue_us=max(0, round((self.started_s - request.occurred_at.timestamp()) * 1e6)),
            run_us=self.run_us,
        )


def no_run(worker: str, at_s: float, batch_id: UUID) -> Run:
    """What requests have in common that end together without one."""
    return Run(worker=worker, version=None, batch_id=batch_id, items=0, started_s=at_s, run_us=0)


def quantities(task: Task, answer: Answer) -> dict[str, int]:
    """What a succeeded request is billed for, by meter: what was counted in its inputs, not what its record says."""
    found = {"requests": 1, "items": answer.items}
    if task is Task.EMBEDDINGS:
        found["tokens"] = answer.tokens
    return found


def as_of(ended: Ended, now: datetime) -> Ended:
    """The end as it may be written at `now`: past the deadline every new one is EXPIRED, whatever the run gave.

    Two workers that end the same request, one of them late, then agree, and an expired request is never billed.
    """
    finished = ended.finished
    if ended.logged is not None or now < ended.deadline_at or finished.outcome is Outcome.EXPIRED:
        return ended
    expired = replace(
        finished,
        outcome=Outcome.EXPIRED,
        error_code="deadline_exceeded",
        error_message="the deadline passed before the result could be recorded",
        outputs=(),
        quantities={},
    )
    return replace(ended, finished=expired)


def as_failed(ended: Ended, *, code: str, message: str) -> Ended:
    """The end of a request whose result cannot be told: neither answered nor billed."""
    finished = replace(
        ended.finished,
        outcome=Outcome.FAILED,
        error_code=code,
        error_message=message,
        outputs=(),
        quantities={},
    )
    return replace(ended, finished=finished)
