"""Corrections of what is billed: units added to an hour of a customer and meter, or taken away, beside what was used.

A correction and the fact of it are written in one transaction. Corrections of one customer take turns by a lock on its
row, so that two that are each allowed cannot together bring an hour below nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Final
from uuid import UUID

from infra.actor import COMMAND_STAMP, Author
from infra.arguments import iso_time
from infra.outbox import add_facts
from infra.postgres import Connection, queries
from schemas.facts import BillingAdjusted
from schemas.ids import new_event_id
from schemas.topics import ADJUSTMENTS
from streams.billing.intents import HOUR, HourKey, is_too_old

# Stripe takes no value of more than 15 digits, and nothing that an hour could be corrected by is near it.
MOST_UNITS: Final = 10**15 - 1


class AdjustmentRefused(ValueError):
    """The bill cannot be corrected like this; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """A correction as written: `units` more in the UTC hour that starts at `hour`, or fewer when negative."""

    adjustment_id: UUID
    customer_id: str
    hour: datetime
    meter: str
    units: int
    actor: str
    reason: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjusted:
    """A correction, what its hour is billed now, and whether the hour is too old for Stripe to take it by event."""

    adjustment: Adjustment
    billable_units: int
    is_carried: bool


def whole_hour(text: str) -> datetime:
    """The start of a UTC hour, from ISO 8601 like 2026-11-29T20. Raises ValueError saying what was expected."""
    expected = f"expected the start of a UTC hour like 2026-11-29T20, found {text!r}"
    try:
        moment = iso_time(text)
    except ValueError:
        raise ValueError(f"--hour: {expected}") from None
    # A date alone reads as its midnight, and is too easily meant as the whole day.
    if "T" not in text.upper():
        raise ValueError(f"--hour: {expected}")
    if moment.utcoffset():
        raise ValueError(f"--hour: {expected}, which is not in UTC")
    if moment != moment.replace(minute=0, second=0, microsecond=0):
        raise ValueError(f"--hour: {expected}, which is not a whole hour")
    return moment.astimezone(timezone.utc)


def refusal(
    key: HourKey,
    units: int,
    *,
    billed_units: int,
    known_meters: Sequence[str],
    customer_since: datetime,
    carried: bool,
    now: datetime,
) -> str | None:
    """Why an hour that is billed `billed_units` may not be corrected by `units`; None when it may. `carried`: somebody
    has said that they bill it by other means."""
    if not 0 < abs(units) <= MOST_UNITS:
        return f"--units: expected a number that is not 0 and has at most 15 digits, found {units}"
    if key.hour > now:
        return f"--hour: {key.hour:%Y-%m-%dT%H}:00Z has not begun"
    if key.hour + HOUR <= customer_since:
        return (
            f"--hour: {key.customer_id} was created at {customer_since:%Y-%m-%dT%H:%MZ}, after "
            f"{key.hour:%Y-%m-%dT%H}:00Z"
        )
    if carried and not is_too_old(key.hour, now):
        return "--carried: the hour is not too old for Stripe to take it by event; leave the option out"
    if is_too_old(key.hour, now) and not carried:
        return (
            f"--hour: {key.hour:%Y-%m-%dT%H}:00Z is more than 35 days ago, and Stripe takes no event for it. The "
            "difference has to be billed by an invoice item; --carried says that you do that"
        )
    if key.meter not in known_meters:
        return f"--meter: nobody knows '{key.meter}'; known are {', '.join(sorted(known_meters))}"
    if units > 0 and billed_units + units > MOST_UNITS:
        return f"--units: an hour is billed at most {MOST_UNITS}; {billed_units} and {units} are more"
    if billed_units + units < 0:
        return (
            f"--units: {key.meter} of {key.customer_id} in {key.hour:%Y-%m-%dT%H}:00Z are {billed_units} with earlier "
            f"corrections; {units} would bring them below 0"
        )
    return None


async def adjust(
    connection: Connection, key: HourKey, units: int, *, by: Author, now: datetime, carried: bool = False
) -> Adjusted:
    """Correct an hour. Raises AdjustmentRefused; then nothing was written. `by.reason` must be there, and `carried` for
    an hour that Stripe takes no event for, and only for such a one."""
    sql = queries("streams.billing")
    if by.reason is None:
        raise AdjustmentRefused("--reason: a correction needs one")
    async with connection.transaction():
        customer_since = await connection.fetchval(sql["lock_customer"], key.customer_id)
        if customer_since is None:
            raise AdjustmentRefused(f"there is no customer '{key.customer_id}'; see  inferlog customers list")
        billed = int(await connection.fetchval(sql["billable"], key.customer_id, key.meter, key.hour))
        meters = [r["meter"] for r in await connection.fetch(sql["known_meters"], key.customer_id, key.hour)]
        why_not = refusal(
            key,
            units,
            billed_units=billed,
            known_meters=meters,
            customer_since=customer_since,
            carried=carried,
            now=now,
        )
        if why_not is not None:
            raise AdjustmentRefused(why_not)
        adjustment_id = new_event_id()
        created_at = await connection.fetchval(
            sql["insert_adjustment"],
            *(adjustment_id, key.customer_id, key.hour, key.meter, units, by.actor, by.reason),
        )
        made = Adjustment(
            adjustment_id=adjustment_id,
            customer_id=key.customer_id,
            hour=key.hour,
            meter=key.meter,
            units=units,
            actor=by.actor,
            reason=by.reason,
            created_at=created_at,
        )
        await add_facts(connection, ADJUSTMENTS, [(key.customer_id, _fact(made))], stamp=COMMAND_STAMP)
    return Adjusted(adjustment=made, billable_units=billed + units, is_carried=is_too_old(key.hour, now))


async def adjustments(connection: Connection, customer_id: str | None) -> list[Adjustment]:
    """Corrections of one customer or of all, oldest first."""
    rows = await connection.fetch(queries("streams.billing")["adjustments"], customer_id)
    return [Adjustment(**row) for row in rows]


async def customer_of(connection: Connection, name_or_id: str) -> str:
    """The customer's id. Raises AdjustmentRefused when there is none."""
    found: str | None = await connection.fetchval(queries("streams.billing")["customer"], name_or_id)
    if found is None:
        raise AdjustmentRefused(f"there is no customer '{name_or_id}'; see  inferlog customers list")
    return found


def _fact(made: Adjustment) -> BillingAdjusted:
    said = asdict(made)
    return BillingAdjusted(event_id=said.pop("adjustment_id"), occurred_at=said.pop("created_at"), **said)
