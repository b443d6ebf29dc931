"""Once: calls that say they are the same call, by a key of their own or because a client repeats itself.

The first of them is run; whoever comes later, to whichever process, is given its outcome.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from uuid import UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Sameness:
    """What a call says about itself: `key` is its Idempotency-Key, `retry` counts its client's own repetitions of it
    (None when the client does not say), `digest` is of the target and the body."""

    customer_id: str
    key_id: str
    key: str | None
    retry: int | None
    digest: bytes

    @property
    def is_told(self) -> bool:
        """Whether the call says anything by which it could be known again."""
        return self.key is not None or self.retry is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What was decided when a call was first admitted; whoever finishes its admission decides the same."""

    request_id: UUID
    admitted_at: datetime
    deadline_at: datetime
    version: str
    price_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A call's place in the book. `is_ours`: this process is to admit it; else its outcome is to be waited for."""

    claim_id: UUID
    decisions: Decisions
    is_ours: bool


class Once(Protocol):
    """The book of claims; the same for every process."""

    async def claim(self, call: Sameness, decisions: Decisions) -> Claim:
        """Enter a call, or find the first like it. Raises Unprocessable (the key was used with another body),
        Unavailable (the book cannot be read, or the first is just being admitted and that did not end in time)."""

    async def accepted(self, claim: Claim) -> None:
        """The log has the request. Losing this costs a later twin a look; never raises for an outage."""

    async def withdraw(self, claim: Claim) -> None:
        """It was refused and is on no log: the next like it is a first one. Never raises for an outage."""

    def answered(self, claim: Claim) -> None:
        """The whole answer was handed to the caller's connection."""
