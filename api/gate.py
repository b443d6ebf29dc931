"""The order of the checks every inference passes, in one place.

Key, scope, version, input, sameness, queue, place, limits: the cheap and certain refusals come first, and tokens, place
among the unfinished and money are taken last and together, so that a refused call costs its caller nothing. After the
gate the request is published, and from then on it is ours to answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import Protocol
from uuid import UUID

from api.access.keys import Keys
from api.admission.caller import Caller
from api.admission.deadlines import Queues, require_time
from api.admission.demand import Cost, Demand, Spending
from api.admission.space import Space
from api.errors import ApiError
from api.limits.limiter import Charge, Limiter
from api.once.claims import OWNER_S
from api.once.once import Claim, Decisions, Once, Sameness
from api.routing.catalogue import Deployment
from api.routing.versions import Versions
from schemas.tensors import Tensor

#: From then on another gateway may have taken a call's claim over (api.once.claims.OWNER_S).
_OVERTAKEN_AFTER = timedelta(seconds=OWNER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Decoded and validated inputs, in the order of the model's signature; `timeout_s` may shorten the deadline.

    `tokens` is the most that texts can come to, 0 where there are none.
    """

    tensors: tuple[Tensor, ...]
    item_count: int
    tokens: int = 0
    timeout_s: float | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(len(t.data) for t in self.tensors)


class Ask(Protocol):
    """One call as its surface understands it. The gate decides when each part is read."""

    @property
    def authorization(self) -> str | None:
        """The Authorization header."""

    @property
    def operation(self) -> str:
        """What is called, one of `caller.OPERATIONS`."""

    async def target(self) -> tuple[str, str | None]:
        """Model name and, if the caller named one, version or alias. Raises BadInput."""

    async def inputs(self, deployment: Deployment) -> Inputs:
        """The inputs, checked against the version's signature; asked once after each `target`.

        Raises BadInput, TooLarge.
        """

    async def sameness(self, caller: Caller) -> Sameness:
        """What the call says about being a repetition; asked after `inputs`. Raises BadInput."""

    def forget(self) -> None:
        """Nothing of the call is asked for again, so what was kept to answer may go."""


class Money(Protocol):
    """Whether a customer may spend more (api.spend.spend fits)."""

    async def spending(self, caller: Caller, price_id: str, cost: Cost, admitted_at: datetime) -> Spending | None:
        """What the call may spend in the month of its admission, None for a customer without a cap.

        Raises ApiError when nothing is left, or it is not known.
        """


@dataclass(slots=True)
class Place:
    """A request's place among the unfinished. It is freed with the end of the call if its end was seen, or it was never
    begun; not if the request `may_run` then, by this call or by another that shares its claim. Such a place frees
    itself after the deadline."""

    may_run: bool = False
    end_seen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Everything that was decided about one call.

    Without a `charge` the call repeats an earlier one: it took nothing, and waits for the outcome of
    `decisions.request_id`, which may have been admitted with other decisions than this call would be. `until` is the
    call's own deadline. Whoever publishes the request, or sees its end, says so in `place`.
    """

    caller: Caller
    deployment: Deployment
    inputs: Inputs
    decisions: Decisions
    until: datetime
    charge: Charge | None
    claim: Claim | None = None
    reserved_micros: int = 0
    place: Place = field(default_factory=Place)

    @property
    def admitted_before(self) -> datetime | None:
        """When its request was admitted, if another call may have put it on the log already."""
        is_new = self.charge is not None and (self.claim is None or not self.claim.is_taken_over)
        return None if is_new else self.decisions.admitted_at


class Gate:
    """Admits calls. `deadline_s` bounds each from admission to answer."""

    def __init__(
        self,
        *,
        keys: Keys,
        versions: Versions,
        queues: Queues,
        space: Space,
        limiter: Limiter,
        once: Once | None,
        money: Money | None,
        deadline_s: float,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._keys = keys
        self._versions = versions
        self._queues = queues
        self._space = space
        self._limiter = limiter
        self._once = once
        self._money = money
        self._deadline_s = deadline_s
        self._now = now

    @asynccontextmanager
    async def admitted(self, ask: Ask, request_id: UUID, *, until: datetime | None = None) -> AsyncIterator[Admission]:
        """Pass every check, or raise the ApiError of the first that refuses; the call holds its space until the end of
        the block, and its request its `place`. `until` is the deadline of a call that comes a second time."""
        caller = await self.caller(ask.authorization, ask.operation)
        model, reference = await ask.target()
        deployment = self.resolve(model, reference, caller)
        inputs = await ask.inputs(deployment)
        # Their reading took as long as the caller liked, and the route may be another one now. This one does not wait.
        if (switched := self.resolve(model, reference, caller)) != deployment:
            deployment = switched
            inputs = await ask.inputs(deployment)
        with self._space.place(caller.customer_id, inputs.size_bytes):
            own = self._decisions(request_id, deployment, inputs, until)
            claim = await self._claim(await ask.sameness(caller), own)
            decisions = own if claim is None else claim.decisions
            if decisions.request_id == request_id:
                ask.forget()  # others may have to be read again, when what they repeat came to nothing
            if decisions.version != deployment.version:  # the route was switched after the first call like this
                model, _ = await ask.target()
                deployment = self.resolve(model, decisions.version, caller)
                inputs = await ask.inputs(deployment)
            admission = Admission(
                caller=caller,
                deployment=deployment,
                inputs=inputs,
                decisions=decisions,
                until=own.deadline_at,
                charge=None,
                claim=claim,
            )
            # Reading the inputs and waiting for the claim take seconds, and a key may change meanwhile.
            if claim is not None and not claim.is_ours:
                caller = await self.caller(ask.authorization, ask.operation)
                caller.require_model(model)
                yield replace(admission, caller=caller)
                return
            place = Place(may_run=claim is not None and claim.is_taken_over)
            try:
                caller = await self.caller(ask.authorization, ask.operation)
                caller.require_model(model)
                demand = await self._demand(caller, deployment, inputs, decisions, claim)
                charge = await self._limiter.take(demand)
            except BaseException:
                self.withdraw(claim)
                raise
            reserved_micros = 0 if demand.spending is None else demand.spending.cost_micros
            try:
                with self._queues.passing(deployment.pool):
                    yield replace(admission, caller=caller, charge=charge, reserved_micros=reserved_micros, place=place)
            finally:
                # A call that was so slow may have been overtaken, and its request be run by another gateway.
                is_own = claim is None or self._now() - decisions.admitted_at < _OVERTAKEN_AFTER
                if place.end_seen or (is_own and not place.may_run):
                    self._limiter.release(demand)

    def _decisions(self, request_id: UUID, deployment: Deployment, inputs: Inputs, until: datetime | None) -> Decisions:
        if inputs.timeout_s is not None:
            require_time(inputs.timeout_s)
        now = self._now()
        deadline_s = self._deadline_s if inputs.timeout_s is None else min(self._deadline_s, inputs.timeout_s)
        return Decisions(
            request_id=request_id,
            admitted_at=now,
            deadline_at=until or now + timedelta(seconds=deadline_s),
            version=deployment.version,
            price_id=deployment.price_id,
        )

    async def _claim(self, call: Sameness, decisions: Decisions) -> Claim | None:
        if self._once is None or not call.is_told:
            return None
        return await self._once.claim(call, decisions)

    def withdraw(self, claim: Claim | None) -> None:
        """The call is refused, and nothing of it is on the log."""
        if claim is not None and self._once is not None:
            self._once.withdraw(claim)

    async def _demand(
        self, caller: Caller, deployment: Deployment, inputs: Inputs, decisions: Decisions, claim: Claim | None
    ) -> Demand:
        """What the call would take. Raises ApiError when the queue or the customer's money is known not to allow it."""
        self._queues.check(deployment.pool, within_s=(decisions.deadline_at - self._now()).total_seconds())
        cost = Cost(items=inputs.item_count, tokens=inputs.tokens)
        spending = None
        if self._money is not None:
            spending = await self._money.spending(caller, decisions.price_id, cost, decisions.admitted_at)
        return Demand(
            caller=caller,
            model=deployment.model,
            cost=cost,
            request_id=decisions.request_id,
            # What another call began is put on the log only now, and the ledger is past it only then.
            admitted_at=max(decisions.admitted_at, self._now()),
            until=decisions.deadline_at,
            spending=spending,
            may_run_already=claim is not None,
        )

    async def caller(self, authorization: str | None, operation: str) -> Caller:
        """Who makes a call, and may. Raises Unauthorized, Forbidden, Unavailable."""
        caller = await self._keys.identify(authorization)
        caller.require(operation)
        return caller

    def models(self, caller: Caller) -> Sequence[Sequence[Deployment]]:
        """The versions of every routable model that the caller may call, the routed one first."""
        return [known for known in self._versions.listed() if caller.may_call(known[0].model)]

    def resolve(self, model: str, reference: str | None, caller: Caller) -> Deployment:
        """What a model's name means now for a caller. Raises Forbidden, NotFound, BadInput, Unavailable."""
        caller.require_model(model)
        return self._versions.resolve(model, reference, customer_id=caller.customer_id)


def refused(error: ApiError, charge: Charge | None) -> ApiError:
    """The error of an admitted call: tokens were taken, so whatever the end, the caller hears what is left."""
    if charge is not None:
        error.took_tokens = True
        error.headers = {**charge.headers, **error.headers}
    return error
