"""What one call would take: units of its limits, a place among the unfinished, and money; all of it or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from api.admission.caller import Caller
from schemas.ids import EPOCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Units of a call. `tokens` is the most it can come to, since only the worker counts them; 0 for other models."""

    items: int
    tokens: int = 0
    requests: int = 1

    def of(self, unit: str) -> int:
        """Units of this kind: "requests", "items" or "tokens"."""
        return {"requests": self.requests, "items": self.items, "tokens": self.tokens}[unit]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """What a call may spend: `left_micros` of the cap beyond what the ledger has confirmed.

    The ledger has everything that was admitted before `settled_at`, so reservations older than that are in it.
    `cost_micros` is the most this call can cost. Reservations know no month; `resets_at`, where the call's month ends,
    is only told.
    """

    left_micros: int
    settled_at: datetime
    cost_micros: int
    resets_at: datetime = EPOCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One call's. Its place among the unfinished is free a second after `until`, whatever becomes of anybody.

    `admitted_at` is not before the time of admission that the ledger will see, nor before the limiter was asked. A
    request that `may_run_already`, since another gateway may have put it on the log, keeps its place when the call is
    refused.
    """

    caller: Caller
    model: str
    cost: Cost
    request_id: UUID
    admitted_at: datetime
    until: datetime
    spending: Spending | None = None
    may_run_already: bool = False
