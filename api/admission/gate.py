"""The order of the checks every inference passes, in one place.

Key, version, input, queue, limits: the cheap and certain refusals come first, and tokens are taken last, so that a
refused call costs its caller nothing. After the gate the request is published, and from then on it is ours to answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from api.admission.deadlines import Queues
from api.admission.keys import Caller, Keys
from api.admission.limits import Charge, Limiter
from api.admission.versions import Deployment, Versions
from api.errors import Unavailable
from schemas.tensors import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Decoded and validated inputs, in the order of the model's signature; `timeout_s` may shorten the deadline."""

    tensors: tuple[Tensor, ...]
    item_count: int
    timeout_s: float | None = None


class Ask(Protocol):
    """One call as its surface understands it. The gate decides when each part is read."""

    @property
    def authorization(self) -> str | None:
        """The Authorization header."""

    async def target(self) -> tuple[str, str | None]:
        """Model name and, if the caller named one, version. Raises BadInput."""

    async def inputs(self, deployment: Deployment) -> Inputs:
        """The inputs, checked against the version's signature. Raises BadInput, TooLarge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Everything that was decided about one call."""

    caller: Caller
    deployment: Deployment
    inputs: Inputs
    charge: Charge


class Gate:
    """Admits calls, `max_in_flight` of them at a time."""

    def __init__(
        self,
        *,
        keys: Keys,
        versions: Versions,
        queues: Queues,
        limiter: Limiter,
        max_in_flight: int,
    ) -> None:
        self._keys = keys
        self._versions = versions
        self._queues = queues
        self._limiter = limiter
        self._max_in_flight = max_in_flight
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        """Calls that hold a place now."""
        return self._in_flight

    @asynccontextmanager
    async def admitted(self, ask: Ask) -> AsyncIterator[Admission]:
        """Pass every check, or raise the ApiError of the first that refuses; the call holds its place until the end
        of the block."""
        caller = await self._keys.identify(ask.authorization)
        model, version = await ask.target()
        deployment = self._versions.resolve(model, version)
        inputs = await ask.inputs(deployment)
        self._queues.check(deployment.pool)
        if self._in_flight >= self._max_in_flight:
            raise Unavailable(
                f"this gateway already waits for {self._max_in_flight} requests", code="overloaded", retry_after_s=1
            )
        # Taken in the same step as the check: any number of calls may wait for the limiter at once.
        self._in_flight += 1
        try:
            charge = await self._limiter.take(caller.customer_id, caller.key_id, caller.limits)
            yield Admission(caller=caller, deployment=deployment, inputs=inputs, charge=charge)
        finally:
            self._in_flight -= 1

    async def caller(self, authorization: str | None) -> Caller:
        """Who makes a call that takes no tokens. No limiter reads the revoked set then, so the key is looked up at
        most a second ago."""
        return await self._keys.identify(authorization, fresh_s=1.0)

    def models(self) -> Sequence[Sequence[Deployment]]:
        """Every routable model's versions, the routed one first."""
        return list(self._versions.catalogue.deployments.values())

    def resolve(self, model: str, version: str | None = None) -> Deployment:
        """What a model name means now. Raises NotFound, BadInput, Unavailable."""
        return self._versions.resolve(model, version)
