"""How a request ended: an answer or a failure, and the record that says so.

Pure; what a request is billed for is decided here, from its inputs alone, so that a repeated run bills the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from schemas.ids import finished_id
from schemas.records import InferenceFinished, InferenceRequested, Outcome, Task
from schemas.tensors import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model gave for one request; `tokens` is 0 for models that take no text."""

    outputs: tuple[Tensor, ...]
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why one request has no answer: a stable code and words for the caller."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One result per request that was run, in their order, and the time the run took."""

    results: Sequence[Answer | Failure]
    run_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request's end, and the API instance that waits for it."""

    finished: InferenceFinished
    reply_to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all requests of one run have in common. `started_s` in Unix seconds; `items` is 0 when nothing ran."""

    worker: str
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
            version=request.version,
            outcome=Outcome.SUCCEEDED if answer else failed,
            error_code=failure.code if failure else None,
            error_message=failure.message if failure else None,
            outputs=answer.outputs if answer else (),
            price_id=request.price_id,
            quantities=quantities(request, answer) if answer else {},
            admitted_at=request.occurred_at,
            worker=self.worker,
            batch_id=self.batch_id,
            batch_items=self.items,
            queue_us=max(0, round((self.started_s - request.occurred_at.timestamp()) * 1e6)),
            run_us=self.run_us,
        )


def quantities(request: InferenceRequested, answer: Answer) -> dict[str, int]:
    """What a succeeded request is billed for, by meter: a function of its inputs alone."""
    found = {"requests": 1, "items": request.item_count}
    if request.task is Task.EMBEDDINGS:
        found["tokens"] = answer.tokens
    return found
