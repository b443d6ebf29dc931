"""What the worker's loop is connected to: where requests come from, what runs them, where their ends go.

Protocols and the value they pass on; the parts behind them are wired in `gpu_worker.app`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gpu_worker.endings import Ended, Ran
from schemas.records import InferenceFinished, InferenceRequested


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """An admitted request and its place on the log. `generation` tells deliveries before and after a rebalance apart.

    `logged` is the request as it is on the log, when `request` holds more: inputs that were fetched for it. `ended`
    is there when an earlier owner of the partition has recorded the request's end: then that is the result, and the
    request is neither run nor expired again.
    """

    request: InferenceRequested
    partition: int
    offset: int
    generation: int
    size_bytes: int
    ended: Ended | None = None
    logged: InferenceRequested | None = None

    @property
    def deadline_s(self) -> float:
        """When the request must no longer be started, in Unix seconds."""
        return self.request.deadline_at.timestamp()

    def as_logged(self) -> Delivery:
        """The same without what was fetched for it."""
        return self if self.logged is None else replace(self, request=self.logged, logged=None)

    def ended_by(self, finished: InferenceFinished) -> Ended:
        """Its new end, for the outcomes."""
        return Ended(
            finished=finished,
            reply_to=self.request.reply_to,
            deadline_at=self.request.deadline_at,
            traceparent=self.request.traceparent,
        )


class Inbox(Protocol):
    """Where requests come from."""

    async def take(self) -> Sequence[Delivery]:
        """What has arrived; may be empty. Must be called again soon, also while batches run."""

    def claim(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Those that are still this worker's to end; from now until `done` it is busy with them."""

    def done(self, deliveries: Sequence[Delivery]) -> None:
        """These ended and their ends are on the log: their offsets may be committed."""


class Claims(Protocol):
    """Where inputs lie that are too large for the log."""

    async def redeem(self, request: InferenceRequested, *, within_s: float) -> InferenceRequested:
        """The request with all its inputs; others may have to wait until `release` is called for it.

        Raises ItemError when they are lost or not the ones that were sent; MachineError after `within_s`.
        """

    def release(self, request: InferenceRequested) -> None:
        """The inputs of a request that was redeemed are not held any more; `request` is what was given to `redeem`."""


class Runner(Protocol):
    """What runs models."""

    def ready(self, version: str) -> bool:
        """Whether `run` can be called for this version now."""

    async def prepare(self, version: str) -> None:
        """Make a version ready. Raises ModelError when it never will be, MachineError when it may be later."""

    async def run(self, version: str, requests: Sequence[InferenceRequested]) -> Ran:
        """Run requests of a ready version together. Raises MachineError when nothing will ever run here again.

        After any other error the same requests may be run again, each alone.
        """


class Outcomes(Protocol):
    """Where ends of requests go."""

    async def record(self, ended: Sequence[Ended]) -> None:
        """Returns when all of it is on the log; until then it holds and retries.

        What is recorded past its deadline becomes EXPIRED; what is on the log already stays as it is.
        """
