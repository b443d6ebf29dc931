"""What Stripe is still owed for an hour, as a signed delta with a name of its own, and when that may be said again.

Pure decisions; the table they are read from and written to is in `reports`.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Final

HOUR: Final = timedelta(hours=1)
# Stripe remembers an identifier for at least 24 h; we stop four hours short of that.
RESEND_FOR: Final = timedelta(hours=20)
# Between the last resend and the first look lies an hour, so that whatever was still being processed is in the sums.
LOOK_AFTER: Final = timedelta(hours=21)
# Stripe takes no event older than 35 days; an hour's margin for the way there.
OLDEST_EVENT: Final = timedelta(days=35) - HOUR


class State(str, Enum):
    """Where an intent stands. PLANNED and SENDING are open; all others are final but DELIVERED, which awaits proof."""

    PLANNED = "planned"
    SENDING = "sending"
    DELIVERED = "delivered"
    CONFIRMED = "confirmed"
    REJECTED = "rejected"
    LOST = "lost"
    CARRIED = "carried"


OPEN: Final = frozenset({State.PLANNED, State.SENDING})
# What earlier intents have settled. Rejected and lost ones said nothing; carried ones are billed another way.
SETTLED: Final = frozenset({State.DELIVERED, State.CONFIRMED, State.CARRIED})


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class HourKey:
    """One customer's use of one meter in the UTC hour that starts at `hour`."""

    customer_id: str
    meter: str
    hour: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An intent as the table knows it: `delta_units` on top of what was said before makes the hour `total_units`."""

    key: HourKey
    rev: int
    total_units: int
    delta_units: int
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A new row; `identifier` is a function of environment, key and rev, `state` PLANNED, or CARRIED when too old."""

    key: HourKey
    rev: int
    total_units: int
    delta_units: int
    identifier: str
    state: State


def identifier(environment: str, key: HourKey, rev: int) -> str:
    """Stripe's dedup key for one rev of one hour: 44 characters, the same wherever and whenever it is computed."""
    parts = ["meter event", environment, key.customer_id, key.meter, int(key.hour.timestamp()), rev]
    return "ilr_" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def plan(
    totals: Mapping[HourKey, int],
    reports: Iterable[Report],
    *,
    environment: str,
    now: datetime,
    retry_rejected: bool = False,
) -> list[Intent]:
    """The intents that bring Stripe from what `reports` say to `totals`; at most one per hour, none for a delta of 0.

    An hour with an open intent waits for it. A rejected hour waits until its total changes, or until `retry_rejected`
    says that the cause was removed: the same value would only be refused again.
    """
    histories: defaultdict[HourKey, list[Report]] = defaultdict(list)
    for report in reports:
        histories[report.key].append(report)
    intents = []
    for key in sorted(totals):
        total, history = totals[key], histories[key]
        latest = max(history, key=lambda report: report.rev, default=None)
        if any(report.state in OPEN for report in history):
            continue
        was_refused = latest is not None and latest.state is State.REJECTED and latest.total_units == total
        if was_refused and not retry_rejected:
            continue
        delta = total - sum(report.delta_units for report in history if report.state in SETTLED)
        if delta == 0:
            continue
        rev = 1 if latest is None else latest.rev + 1
        intents.append(
            Intent(
                key=key,
                rev=rev,
                total_units=total,
                delta_units=delta,
                identifier=identifier(environment, key, rev),
                state=State.CARRIED if is_too_old(key.hour, now) else State.PLANNED,
            )
        )
    return intents


def last_sealed_hour(now: datetime, *, seal_after_s: float, include_open_hours: bool) -> datetime:
    """The newest hour (its start) that may be reported: ended `seal_after_s` ago, or merely begun with open hours."""
    moment = now if include_open_hours else now - HOUR - timedelta(seconds=seal_after_s)
    return moment.astimezone(timezone.utc).replace(minute=0, second=0, microsecond=0)


def event_time(hour: datetime, now: datetime) -> datetime:
    """The time to put on an hour's event: its middle, away from both edges; now when the middle is still to come.

    Never outside the hour, whatever the clock says: usage is billed in the period it belongs to or not by event.
    """
    latest_inside = hour + HOUR - timedelta(seconds=1)
    return min(max(min(hour + HOUR / 2, now), hour), latest_inside)


def is_too_old(hour: datetime, now: datetime) -> bool:
    """True when Stripe would refuse this hour's event for its age; it is then carried over, never re-dated."""
    return event_time(hour, now) < now - OLDEST_EVENT


class Step(str, Enum):
    """What may be done with an open intent now."""

    SEND = "send"
    WAIT = "wait"
    LOOK = "look"


def next_step(first_sent_at: datetime | None, now: datetime) -> Step:
    """Send while Stripe surely still knows the identifier; then keep still; then look at the sums before anything."""
    if first_sent_at is None or now - first_sent_at < RESEND_FOR:
        return Step.SEND
    return Step.WAIT if now - first_sent_at < LOOK_AFTER else Step.LOOK


class Verdict(str, Enum):
    """What an hour's sum at Stripe says about one intent in doubt."""

    ARRIVED = "arrived"
    LOST = "lost"
    UNCLEAR = "unclear"


def judge(stripe_units: float, *, prior_units: int, delta_units: int) -> Verdict:
    """Whether an event of `delta_units` is in a sum that was `prior_units` without it; UNCLEAR is for a person."""
    if stripe_units == prior_units + delta_units:
        return Verdict.ARRIVED
    return Verdict.LOST if stripe_units == prior_units else Verdict.UNCLEAR
