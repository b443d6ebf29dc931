"""The use case: admit a call, put it on the log, wait for its result.

The surfaces decode and encode around it; nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from uuid import UUID

from api.errors import (
    NO_RETRY,
    AcceptanceUnknown,
    ApiError,
    BadInput,
    DeadlinePassed,
    ModelFailed,
    TooLarge,
    Unavailable,
)
from api.gate import Admission, Ask, Gate, refused
from api.large_tensors import LargeTensors
from api.limits.limiter import Charge
from api.repeated import PASSING, Repeated, nothing_yet, told
from api.request_log import RequestLog
from api.results.waiting import Results
from api.routing.catalogue import Deployment
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

    @property
    def request_id(self) -> UUID:
        """The request whose outcome this is: the first one's, of a call that repeats one."""
        return self.admission.decisions.request_id


class Inference:
    """Runs calls. `instance` names this process to workers; `gone` is told whose caller hung up before its answer."""

    def __init__(
        self,
        *,
        gate: Gate,
        request_log: RequestLog,
        results: Results,
        large: LargeTensors,
        instance: str,
        repeated: Repeated | None = None,
        gone: Callable[[UUID, str], None] = lambda _request_id, _customer_id: None,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._gate = gate
        self._log = request_log
        self._results = results
        self._large = large
        self._instance = instance
        self._repeated = repeated or Repeated(results)
        self._gone = gone
        self._now = now

    @asynccontextmanager
    async def run(self, ask: Ask, request_id: UUID, traceparent: str | None) -> AsyncIterator[Answer]:
        """The answer, which is to be told inside the block if it is large: its outputs have room until the end of it.

        Raises the ApiError that ended the call.
        """
        # Write order; each line says what dying, or failing, right after it costs.
        # 1 claim in Postgres, of     nothing was accepted: a repetition takes the claim over, with what was decided,
        #   calls that can be known   after 3 s
        #   again
        # 2 tokens taken in Redis     one request's worth of the caller's rate is lost; nothing was accepted
        # 3 large inputs in S3        they belong to no request, and expire; nothing was accepted
        # 4 request on the log, acked accepted: it runs, is billed if it succeeds, and its result can be read by its id.
        #                             When only the acknowledgement is missing the caller is told that it may have been
        #                             accepted, with the id.
        # 5 claim noted as accepted   before: a repetition publishes the request again under the same id: it may run
        #                             twice, and is billed once
        # 6 result read, and large    nothing: the answer is lost with the connection, the result stays, and a
        #   outputs from S3           repetition finds it by its claim
        # 7 claim noted as answered   before: nothing but that a repetition may come later than it could
        until: datetime | None = None
        while True:
            async with self._gate.admitted(ask, request_id, until=until) as admission:
                try:
                    finished = await self._finished(admission, traceparent)
                    if await self._repeated.comes_anew(admission, request_id, finished):
                        until = admission.until
                        continue
                    if finished is None:
                        raise nothing_yet(admission)
                    if finished.outcome is not Outcome.SUCCEEDED:
                        self._repeated.answered(admission.claim)
                        raise failure(finished)
                    async with self._large.whole(finished, within_s=self._left_s(admission)) as whole:
                        is_large = self._large.is_large_answer(whole)
                        yield Answer(admission=admission, finished=whole, is_large=is_large)
                except ApiError as error:
                    raise refused(told(error, admission), admission.charge) from None
            return

    def answered(self, answer: Answer) -> None:
        """The whole answer was handed to the caller's connection."""
        self._repeated.answered(answer.admission.claim)

    async def _finished(self, admission: Admission, traceparent: str | None) -> InferenceFinished | None:
        """Publish and wait. Also when the caller goes away meanwhile, nothing of the wait is left.

        None: the call repeats one that certainly came to nothing.
        """
        waiter = self._results.expect(
            admission.decisions.request_id, admission.caller.customer_id, admitted_at=admission.admitted_before
        )
        try:
            if admission.charge is None:
                return await self._repeated.outcome(admission, waiter, within_s=self._left_s(admission))
            await self._accept(admission, admission.charge, traceparent)
            finished = await self._results.wait(waiter, within_s=self._left_s(admission))
            admission.place.end_seen = True
            return finished
        except asyncio.CancelledError:
            if admission.charge is not None and admission.claim is None:  # nobody can come again for its outcome
                self._gone(admission.decisions.request_id, admission.caller.customer_id)
            raise
        finally:
            self._results.forget(waiter)

    async def _accept(self, admission: Admission, charge: Charge, traceparent: str | None) -> None:
        """Put the request on the log. Raises what publishing raises."""
        try:
            record = await self._large.hand_in(self._record(admission, charge, traceparent))
        except BaseException:
            self._gate.withdraw(admission.claim)
            raise
        # However the call ends from here on, the request may run, unless the log has refused it or its end was seen.
        place = admission.place
        might_run, place.may_run = place.may_run, True
        try:
            await self._repeated.publishing(self._publish(record, admission.deployment), admission.claim)
        except AcceptanceUnknown:
            raise
        except ApiError:
            place.may_run = might_run  # of a call that was taken over, by the one before
            raise

    async def _publish(self, record: InferenceRequested, deployment: Deployment) -> None:
        try:
            await self._log.publish(record, pool=deployment.pool, spread=deployment.spread)
        except TooLarge as error:
            if not self._large.is_large(record):
                raise
            words = f"request {record.request_id} was not accepted: it is too large for the log, and S3 is away"
            raise Unavailable(f"{words} ({error})", code="large_inputs_away") from error

    def _left_s(self, admission: Admission) -> float:
        ends = admission.until if admission.charge is None else admission.decisions.deadline_at
        return max(0.0, (ends - self._now()).total_seconds()) + GRACE_S

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
            price_id=decided.price_id,
            task=deployment.task,
            inputs=inputs.tensors,
            item_count=inputs.item_count,
            deadline_at=decided.deadline_at,
            reply_to=self._instance,
            traceparent=traceparent,
            limiter_time=charge.at,
            limiter_buckets=charge.buckets,
            limiter=charge.mode,
            reserved_micros=admission.reserved_micros,
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
    if code in PASSING:
        return Unavailable(words, code=code)
    return ModelFailed(words, code=code)


# The worker's error codes that say whose fault it was; any other is the model's.
_CALLERS_FAULT = frozenset({"invalid_input", "result_too_large"})
