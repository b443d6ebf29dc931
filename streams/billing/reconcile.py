"""Our hours against Stripe's sums: the proof of what was delivered, and the comparison anyone can ask for.

Stripe's "accepted" is not "counted"; only equal sums close an hour.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby

from infra.postgres import Connection, queries
from streams.billing.accounts import event_name
from streams.billing.intents import HOUR, HourKey
from streams.billing.reports import DeliveredHour, Reports, hours_outside
from streams.billing.stripe_gateway import CallFailed, CustomerGone, Meter, StripeGateway

_log = logging.getLogger(__name__)
# Stripe counts events some time after accepting them; only after this long is a missing one a difference.
PROCESSING = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An hour in which Stripe's sum is not ours. Of ours, `carried_units` are billed by other means than events."""

    key: HourKey
    our_units: int
    stripe_units: float
    carried_units: int = 0

    @property
    def is_carried(self) -> bool:
        """Whether what was carried, and nothing else, makes the difference."""
        return self.our_units == self.stripe_units + self.carried_units


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Hours proved equal, hours that Stripe may still be processing, hours that differ, customers gone from Stripe."""

    confirmed: int
    pending: int
    differences: Sequence[Difference]
    gone: Mapping[str, str]


async def prove_pair(
    gateway: StripeGateway, reports: Reports, meter: Meter, hours: Sequence[DeliveredHour], *, now: datetime
) -> Proof:
    """Compare the delivered hours of one customer and meter with Stripe's sums and close the equal ones.

    Reads once for the whole range. Raises CallFailed. A crash anywhere costs a second reading.
    """
    customer_id, stripe_id = hours[0].key.customer_id, hours[0].stripe_customer_id
    start, end = min(h.key.hour for h in hours), max(h.key.hour for h in hours) + HOUR
    sums = await gateway.hour_sums(meter.meter_id, stripe_id, start=start, end=end)
    equal = [h for h in hours if sums.get(h.key.hour, 0) == h.told_units]
    if equal:
        await reports.confirm(customer_id, hours[0].key.meter, [h.key.hour for h in equal])
    open_hours = [h for h in hours if h not in equal]
    late = [h for h in open_hours if now - h.delivered_at >= PROCESSING]
    gone = {}
    if late and await gateway.customer_is_gone(stripe_id):
        gone[customer_id] = f"customer {stripe_id} no longer exists at Stripe"
        await reports.quarantine(customer_id, gone[customer_id])
    return Proof(
        confirmed=len(equal),
        pending=len(open_hours) - len(late),
        differences=[Difference(key=h.key, our_units=h.told_units, stripe_units=sums.get(h.key.hour, 0)) for h in late],
        gone=gone,
    )


def by_pair(hours: Iterable[DeliveredHour]) -> list[list[DeliveredHour]]:
    """Hours grouped by customer and meter; they must come in that order."""
    return [list(group) for _, group in groupby(hours, key=lambda h: (h.key.customer_id, h.key.meter))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One customer (`customer` is the name, empty when not registered) and meter over all compared hours, with the
    hours that differ and, apart from them, those that differ only by what was carried."""

    customer_id: str
    customer: str
    meter: str
    ledger_units: int
    stripe_units: float
    differing: Sequence[Difference]
    carried: Sequence[Difference] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """All customers and meters with compared hours, by name; `open_sums` of the ledger are in hours not compared.

    `outside` are sums of hours that no calendar has, in words: at Stripe they cannot be.
    """

    pairs: Sequence[Comparison]
    open_sums: int
    outside: Sequence[str] = ()


async def compare(
    connection: Connection, gateway: StripeGateway, *, environment: str, last_sealed: datetime, now: datetime
) -> Compared:
    """The ledger against Stripe for every customer and meter, over every hour that is sealed, reported, or known to
    Stripe. Changes nothing. Raises CallFailed, and what infra.postgres raises when the server is away.
    """
    sql = queries("streams.billing")
    ledger: dict[HourKey, int] = {}
    due: set[HourKey] = set()
    for row in await connection.fetch(sql["ledger_hours"], last_sealed):
        key = HourKey(customer_id=row["customer_id"], meter=row["meter"], hour=row["hour"])
        ledger[key] = row["total_units"]
        if row["is_due"]:
            due.add(key)
    carried = {
        HourKey(customer_id=r["customer_id"], meter=r["meter"], hour=r["hour"]): r["units"]
        for r in await connection.fetch(sql["carried_hours"])
    }
    customers = await connection.fetch(sql["customers"])
    names = {r["customer_id"]: r["name"] for r in customers}
    stripe_ids = {r["customer_id"]: r["stripe_customer_id"] for r in customers if r["stripe_customer_id"] is not None}
    reported_from: datetime | None = await connection.fetchval(sql["earliest_report"])
    start = min([key.hour for key in ledger] + ([reported_from] if reported_from else []), default=None)
    at_stripe: dict[HourKey, float] = {}
    if start is not None and stripe_ids:
        end = max(now.replace(minute=0, second=0, microsecond=0), *(key.hour for key in ledger), start) + HOUR
        at_stripe = await _read_sums(gateway, stripe_ids, environment=environment, start=start, end=end)
    pairs: defaultdict[tuple[str, str], list[HourKey]] = defaultdict(list)
    compared = due | set(at_stripe)
    for key in sorted(compared):
        pairs[key.customer_id, key.meter].append(key)
    found = [_compared(pair, names.get(pair[0], ""), keys, ledger, at_stripe, carried) for pair, keys in pairs.items()]
    return Compared(
        pairs=sorted(found, key=lambda c: (c.customer, c.customer_id, c.meter)),
        open_sums=sum(1 for key, units in ledger.items() if units and key not in compared),
        outside=await hours_outside(connection),
    )


async def _read_sums(
    gateway: StripeGateway, stripe_ids: Mapping[str, str], *, environment: str, start: datetime, end: datetime
) -> dict[HourKey, float]:
    prefix = event_name(environment, "")
    found: dict[HourKey, float] = {}
    for meter in await gateway.meters():
        # Deactivated meters still hold sums; meters of other installations are none of ours.
        if not meter.event_name.startswith(prefix):
            continue
        for customer_id, stripe_id in stripe_ids.items():
            try:
                sums = await gateway.hour_sums(meter.meter_id, stripe_id, start=start, end=end)
            except CallFailed as failed:
                if not isinstance(failed.answer, CustomerGone):
                    raise
                sums = {}
            for hour, units in sums.items():
                key = HourKey(customer_id=customer_id, meter=meter.event_name[len(prefix) :], hour=hour)
                found[key] = found.get(key, 0) + units
    return found


def _compared(
    pair: tuple[str, str],
    name: str,
    keys: Sequence[HourKey],
    ledger: Mapping[HourKey, int],
    at_stripe: Mapping[HourKey, float],
    carried: Mapping[HourKey, int],
) -> Comparison:
    hours = [
        Difference(
            key=key,
            our_units=ledger.get(key, 0),
            stripe_units=at_stripe.get(key, 0),
            carried_units=carried.get(key, 0),
        )
        for key in keys
    ]
    return Comparison(
        customer_id=pair[0],
        customer=name,
        meter=pair[1],
        ledger_units=sum(ledger.get(key, 0) for key in keys),
        stripe_units=sum(at_stripe.get(key, 0) for key in keys),
        # What was carried and is at Stripe all the same is billed twice, and differs.
        differing=[h for h in hours if not h.is_carried],
        carried=[h for h in hours if h.is_carried and h.carried_units],
    )
