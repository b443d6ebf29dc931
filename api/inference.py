"""The use case: admit a call, put it on the log, wait for its result.

The surfaces decode and encode around it; nothing here knows HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from uuid import UUID

from api.admission.gate import Admission, Ask, Gate, refused
from api.admission.limits import Charge
from api.admission.versions import Deployment
from api.errors import NO_RETRY, ApiError, BadInput, DeadlinePassed, ModelFailed, TooLarge, Unavailable
from api.large_tensors import LargeTensors
from api.request_log import RequestLog
from api.results import Results
from schemas.ids import requested_id
from schemas.records import InferenceFinished, InferenceRequested, Outcome

#: A result that was on its way when the deadline passed still counts this long after it.
GRACE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A succeeded request: what was admitted and what came of it. A large one is to be told in pieces."""

    admission: Admission
    finished: InferenceFinished
    is_large: bool

    @property
    def headers(self) -> Mapping[str, str]:
        """What the answer says beside its body."""
        charge = self.admission.charge
        return charge.headers if charge is not None else {"Idempotent-Replayed": "true"}


class Inference:
    """Runs calls. `instance` names this process to workers."""

    def __init__(
        self,
        *,
        gate: Gate,
        request_log: RequestLog,
        results: Results,
        large: LargeTensors,
        instance: str,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._gate = gate
        self._log = request_log
        self._results = results
        self._large = large
        self._instance = instance
        self._now = now

    @asynccontextmanager
    async def run(self, ask: Ask, request_id: UUID, traceparent: str | None) -> AsyncIterator[Answer]:
        """The answer, which is to be told inside the block if it is large: its outputs have room until the end of it.

        Raises the ApiError that ended the call.
        """
        # Write order; each line says what dying, or failing, right after it costs.
        # 1 tokens taken in Redis     one request's worth of the caller's rate is lost; nothing was accepted
        # 2 large inputs in S3        they belong to no request, and expire; nothing was accepted
        # 3 request on the log, acked accepted: it runs, is billed if it succeeds, and its result can be read by its id.
        #                             When only the acknowledgement is missing the caller is told that it may have been
        #                             accepted, with the id.
        # 4 result read, and large    nothing: the answer is lost with the connection, the result stays
        #   outputs from S3
        async with self._gate.admitted(ask, request_id) as admission:
            try:
                finished = await self._finished(admission, traceparent)
                if finished.outcome is not Outcome.SUCCEEDED:
                    raise failure(finished)
                async with self._large.whole(finished, within_s=self._left_s(admission)) as whole:
                    is_large = self._large.is_large_answer(whole)
                    yield Answer(admission=admission, finished=whole, is_large=is_large)
            except ApiError as error:
                raise refused(error, admission.charge) from None

    async def _finished(self, admission: Admission, traceparent: str | None) -> InferenceFinished:
        """Publish and wait. Also when the caller goes away meanwhile, nothing of the wait is left."""
        waiter = self._results.expect(admission.decisions.request_id, admission.caller.customer_id)
        try:
            if admission.charge is not None:
                record = await self._large.hand_in(self._record(admission, admission.charge, traceparent))
                await self._publish(record, admission.deployment)
            return await self._results.wait(waiter, within_s=self._left_s(admission))
        finally:
            self._results.forget(waiter)

    async def _publish(self, record: InferenceRequested, deployment: Deployment) -> None:
        try:
            await self._log.publish(record, pool=deployment.pool, spread=deployment.spread)
        except TooLarge as error:
            if not self._large.is_large(record):
                raise
            words = f"request {record.request_id} was not accepted: it is too large for the log, and S3 is away"
            raise Unavailable(f"{words} ({error})", code="large_inputs_away") from error

    def _left_s(self, admission: Admission) -> float:
        return max(0.0, (admission.decisions.deadline_at - self._now()).total_seconds()) + GRACE_S

    def _record(self, admission: Admission, charge: Charge, traceparent: str | None) -> InferenceRequested:
        inputs, deployment, caller = admission.inputs, admission.deployment, admission.caller
        decided = admission.decisions
        return InferenceRequested(
            event_id=requested_id(decided.request_id),
            occurred_at=decided.admitted_at,
            request_id=decided.request_id,
            customer_id=caller.customer_id,
            key_id=caller.key_id,
            model=deployment.model,
            version=deployment.version,
            artifact_uri=deployment.artifact_uri,
            price_id=deployment.price_id,
            task=deployment.task,
            inputs=inputs.tensors,
            item_count=inputs.item_count,
            deadline_at=decided.deadline_at,
            reply_to=self._instance,
            traceparent=traceparent,
            limiter_time=charge.at,
            limiter_buckets=charge.buckets,
            limiter=charge.mode,
        )


def failure(finished: InferenceFinished) -> ApiError:
    """How a request that did not succeed is told to its caller."""
    words = f"request {finished.request_id}: {finished.error_message or finished.outcome.value.lower()}"
    code = finished.error_code
    if finished.outcome is Outcome.EXPIRED:
        return DeadlinePassed(f"request {finished.request_id} was not run: its deadline passed in the queue")
    if finished.outcome is Outcome.UNKNOWN:
        words = f"request {finished.request_id} ended in a way that only a newer release knows; what came of it is kept"
        return ModelFailed(words, code="outcome_unknown", headers=NO_RETRY)  # whether it is billed is in its usage
    if finished.outcome is Outcome.CANCELLED:
        return BadInput(words, code=code or "cancelled")
    if code in _CALLERS_FAULT:
        return BadInput(words, code=code)
    if code in _PASSING:
        return Unavailable(words, code=code)
    return ModelFailed(words, code=code)


# The worker's error codes that say whose fault it was; any other is the model's.
_CALLERS_FAULT = frozenset({"invalid_input", "result_too_large"})
_PASSING = frozenset({"unavailable", "input_lost", "input_altered"})  # nothing was billed: the caller may send it again
