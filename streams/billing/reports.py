"""The table of intents, read and written over the one connection that also holds the sender's lock.

That is the fence between two senders: whoever loses the connection loses the lock and the pen in the same moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from infra.postgres import Connection, Record, queries
from infra.turns import Turn
from streams.billing.intents import OPEN, HourKey, Intent, Report, State, plan

_SQL = queries("streams.billing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a planning transaction wrote, the hours it left alone because Stripe refused them before, the customers in
    the ledger that the registry does not know, and sums of hours that no calendar has, in words."""

    intents: Sequence[Intent]
    refused: Sequence[HourKey]
    unknown_customers: Sequence[str]
    outside: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIntent:
    """An intent to be said or resolved. `prior_units` is what Stripe's sum of the hour should be without it."""

    key: HourKey
    rev: int
    delta_units: int
    identifier: str
    first_sent_at: datetime | None
    prior_units: int
    customer_name: str
    stripe_customer_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredHour:
    """An hour whose deliveries await proof: Stripe's sum should be `told_units`."""

    key: HourKey
    told_units: int
    delivered_at: datetime
    stripe_customer_id: str


class Reports:
    """Every statement on stripe_reports and its neighbours. Raises what infra.postgres raises."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # A connection runs one statement at a time; the senders share it.
        self._one_at_a_time = asyncio.Lock()

    async def take_sender_lock(self) -> bool:
        """True when this connection is now the only sender of its database; held until the connection ends."""
        async with self._one_at_a_time:
            return bool(await self._connection.fetchval(queries("infra")["try_turn"], Turn.REPORTER))

    async def plan(self, *, last_hour: datetime, environment: str, now: datetime, retry_rejected: bool) -> Planned:
        """Write what is owed for hours up to `last_hour`, in one transaction that also read it."""
        async with self._one_at_a_time, self._connection.transaction(isolation="repeatable_read"):
            owed = await self._connection.fetch(_SQL["owed"], last_hour)
            totals = {_key(row): int(row["total_units"]) for row in owed if row["is_known"]}
            keys = list(totals)
            history = await self._connection.fetch(
                _SQL["reports_of"],
                [key.customer_id for key in keys],
                [key.meter for key in keys],
                [key.hour for key in keys],
            )
            reports = [_report(row) for row in history]
            intents = plan(
                totals,
                reports,
                environment=environment,
                now=now,
                retry_rejected=retry_rejected,
            )
            await self._connection.executemany(_SQL["insert_intent"], [_row(intent) for intent in intents])
            outside = await hours_outside(self._connection)
        unknown = sorted({row["customer_id"] for row in owed if not row["is_known"]})
        # Owed, not planned, and nothing on its way: only an earlier refusal leaves an hour like this.
        in_hand = {intent.key for intent in intents} | {report.key for report in reports if report.state in OPEN}
        return Planned(intents=intents, refused=sorted(set(keys) - in_hand), unknown_customers=unknown, outside=outside)

    async def open_intents(self) -> list[OpenIntent]:
        """Every planned or sending intent of customers that are not in quarantine, by customer, meter and hour."""
        return [
            OpenIntent(
                key=_key(row),
                rev=row["rev"],
                delta_units=row["delta_units"],
                identifier=row["identifier"],
                first_sent_at=row["first_sent_at"],
                prior_units=row["prior_units"],
                customer_name=row["name"],
                stripe_customer_id=row["stripe_customer_id"],
            )
            for row in await self._fetch("open_intents")
        ]

    async def begin_send(self, identifier: str, *, now: datetime) -> datetime | None:
        """Note that the event is about to be sent; returns when it was first sent, None when it is no longer open."""
        async with self._one_at_a_time:
            first: datetime | None = await self._connection.fetchval(_SQL["begin_send"], identifier, now)
        return first

    async def end_send(self, identifier: str, state: State, *, now: datetime, reason: str | None = None) -> None:
        """Close an open intent."""
        await self._execute("end_send", identifier, state.value, reason, now)

    async def note_error(self, identifier: str, reason: str) -> None:
        """Keep why an intent is still open."""
        await self._execute("note_error", identifier, reason)

    async def unconfirmed(self, *, delivered_before: datetime) -> list[DeliveredHour]:
        """Hours to prove, of every customer and meter whose oldest one was delivered before that time."""
        return [
            DeliveredHour(
                key=_key(row),
                told_units=row["told_units"],
                delivered_at=row["delivered_at"],
                stripe_customer_id=row["stripe_customer_id"],
            )
            for row in await self._fetch("unconfirmed", delivered_before)
        ]

    async def confirm(self, customer_id: str, meter: str, hours: Sequence[datetime]) -> None:
        """Mark every delivery of these hours as proved."""
        await self._execute("confirm", customer_id, meter, list(hours))

    async def set_stripe_customer(self, customer_id: str, stripe_customer_id: str) -> None:
        """Remember who a customer is at Stripe; the first answer stays."""
        await self._execute("set_stripe_customer", customer_id, stripe_customer_id)

    async def quarantine(self, customer_id: str, reason: str) -> None:
        """Keep back everything of this customer until a person has settled it."""
        await self._execute("quarantine", customer_id, reason)

    async def open_sums(self, *, last_hour: datetime) -> int:
        """How many sums of hours after `last_hour` are not what Stripe was told."""
        async with self._one_at_a_time:
            return int(await self._connection.fetchval(_SQL["open_sums"], last_hour))

    async def quarantined(self) -> dict[str, str]:
        """Reason by customer."""
        return {row["customer_id"]: row["reason"] for row in await self._fetch("quarantined")}

    async def _fetch(self, name: str, *args: object) -> list[Record]:
        async with self._one_at_a_time:
            rows: list[Record] = await self._connection.fetch(_SQL[name], *args)
        return rows

    async def _execute(self, name: str, *args: object) -> None:
        async with self._one_at_a_time:
            await self._connection.execute(_SQL[name], *args)


async def hours_outside(connection: Connection) -> list[str]:
    """In words, the first sums of hours that no calendar has: Postgres knows an infinite hour, nobody can bill it."""
    return [
        f"{row['units']} {row['meter']} of customer {row['customer_id']} are in hour '{row['hour']}', which no "
        "calendar has, and are not billed; move them to the hour they belong to, or remove the row"
        for row in await connection.fetch(_SQL["hours_outside"])
    ]


def _key(row: Record) -> HourKey:
    return HourKey(customer_id=row["customer_id"], meter=row["meter"], hour=row["hour"])


def _report(row: Record) -> Report:
    return Report(
        key=_key(row),
        rev=row["rev"],
        total_units=row["total_units"],
        delta_units=row["delta_units"],
        state=State(row["state"]),
    )


def _row(intent: Intent) -> tuple[object, ...]:
    key = intent.key
    return (
        *(key.customer_id, key.meter, key.hour),
        *(intent.rev, intent.total_units, intent.delta_units, intent.identifier, intent.state.value),
    )
