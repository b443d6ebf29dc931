"""Usage records to ledger rows, by rules that neither clock nor order of arrival can change.

Pure. Rows come sorted by their primary keys, so that two writers always lock in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from uuid import UUID

from schemas.records import UsageRecorded
from streams.dead_letters import DeadLetterRow, RawRecord, set_aside


class UnfitRecord(ValueError):
    """A record that decodes but cannot be billed as it stands; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedUsage:
    """A decoded usage record and the bytes and place it came from."""

    record: UsageRecorded
    source: RawRecord


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class HourlyRow:
    """What to add to one row of `usage_hourly`; `hour` is the UTC hour's start, `quantity` in the meter's unit."""

    customer_id: str
    hour: datetime
    model: str
    version: str
    price_id: str
    meter: str
    quantity: int

    def values(self) -> tuple[str, datetime, str, str, str, str, int]:
        """The row in column order."""
        return (self.customer_id, self.hour, self.model, self.version, self.price_id, self.meter, self.quantity)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class NextOffset:
    """The next offset to read of one partition."""

    topic: str
    partition: int
    next_offset: int


def hour_of(moment: datetime) -> datetime:
    """Start of the UTC hour that an aware moment falls in."""
    return moment.astimezone(timezone.utc).replace(minute=0, second=0, microsecond=0)


def check_fit(record: UsageRecorded) -> None:
    """Raise UnfitRecord for a record that would bill nobody, nothing, or a negative quantity."""
    if not record.customer_id:
        raise UnfitRecord("customer_id: is empty")
    if not record.quantities:
        raise UnfitRecord("quantities: is empty, expected at least one meter")
    for meter, quantity in record.quantities.items():
        if not meter:
            raise UnfitRecord("quantities: a meter has an empty name")
        if quantity < 0:
            raise UnfitRecord(f"quantities: meter '{meter}' is {quantity}, expected at least 0")


def first_per_request(usages: Iterable[LocatedUsage]) -> tuple[list[LocatedUsage], list[DeadLetterRow]]:
    """The first record of each request id, and a dead letter for each later one that says something else.

    Equal repetitions are dropped: they are how at-least-once delivery looks.
    """
    first: dict[UUID, LocatedUsage] = {}
    contradictions: list[DeadLetterRow] = []
    for usage in usages:
        kept = first.setdefault(usage.record.request_id, usage)
        if kept is not usage and kept.record != usage.record:
            place = f"partition {kept.source.partition} offset {kept.source.offset}"
            contradictions.append(
                set_aside(usage.source, f"request {usage.record.request_id}: differs from its usage record at {place}")
            )
    return list(first.values()), contradictions


def processed_rows(usages: Iterable[LocatedUsage]) -> list[tuple[UUID, datetime]]:
    """(request id, occurred at) of each record, sorted by request id."""
    return sorted((u.record.request_id, u.record.occurred_at) for u in usages)


def hourly_rows(usages: Iterable[LocatedUsage]) -> list[HourlyRow]:
    """The sums per customer, hour, model, version, price and meter, sorted by that key."""
    sums: dict[tuple[str, datetime, str, str, str, str], int] = {}
    for usage in usages:
        r = usage.record
        hour = hour_of(r.occurred_at)
        for meter, quantity in r.quantities.items():
            key = (r.customer_id, hour, r.model, r.version, r.price_id, meter)
            sums[key] = sums.get(key, 0) + quantity
    return [
        HourlyRow(customer_id=c, hour=h, model=m, version=v, price_id=p, meter=meter, quantity=quantity)
        for (c, h, m, v, p, meter), quantity in sorted(sums.items())
    ]


def next_offsets(records: Sequence[RawRecord]) -> list[NextOffset]:
    """One past the highest offset seen of each partition, sorted by topic and partition."""
    highest: dict[tuple[str, int], int] = {}
    for record in records:
        place = (record.topic, record.partition)
        highest[place] = max(highest.get(place, 0), record.offset + 1)
    return [NextOffset(topic=t, partition=p, next_offset=o) for (t, p), o in sorted(highest.items())]
