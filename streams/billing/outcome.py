"""What a pass of the reporter is told to do, and what it has to say afterwards.

Words of the counts: planned, delivered, duplicate (delivered before, answer lost), confirmed, unconfirmed, lost,
rejected, carried, retried (answers "not now"), waiting (still open at the end).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streams.billing.intents import HourKey
from streams.billing.pacing import Backoff
from streams.billing.reconcile import Difference

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`patience_s`: how long one pass waits for calls to succeed. `confirm_after_s`: how old the oldest delivery of a
    customer and meter must be before its sums are read; reading costs an allowance that grows only with invoices.
    `concurrency`: customer-meters sent for at once; Stripe takes one call at a time for each."""

    environment: str
    seal_after_s: float
    include_open_hours: bool = False
    retry_rejected: bool = False
    patience_s: float = 30.0
    confirm_after_s: float = 0.0
    concurrency: int = 8
    backoff: Backoff = field(default_factory=Backoff)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """What one pass did (`counts`, by word), and what a person must look at.

    `open_sums`: sums of hours too young for this pass, left for a later one; that is no reason to be unsettled.
    """

    counts: Mapping[str, int]
    alerts: Sequence[str]
    differences: Sequence[Difference]
    open_sums: int = 0

    @property
    def is_settled(self) -> bool:
        """True when nothing is left to send and nothing needs a person."""
        return not (self.counts["waiting"] or self.alerts or self.differences)


@dataclass(slots=True, kw_only=True)
class Tally:
    """A pass report in the making."""

    counts: Counter[str] = field(default_factory=Counter)
    alerts: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    open_sums: int = 0

    def alert(self, sentence: str) -> None:
        """Something that only a person can put right."""
        _log.error(sentence)
        self.alerts.append(sentence)

    def carried(self, key: HourKey, delta_units: int) -> None:
        """An hour that is too old for an event."""
        self.counts["carried"] += 1
        self.alert(
            f"{delta_units} {key.meter} of customer {key.customer_id} in {key.hour:%Y-%m-%dT%H}:00Z are older than "
            "Stripe takes by event: bill them by an invoice item"
        )

    def report(self) -> PassReport:
        """The finished report."""
        return PassReport(
            counts=self.counts, alerts=self.alerts, differences=self.differences, open_sums=self.open_sums
        )
