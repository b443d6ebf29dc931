"""Usage records to ledger rows, by rules that neither clock nor order of arrival can change.

Pure. Rows come sorted by their primary keys, so that two writers always lock in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from hashlib import blake2b
from operator import itemgetter
from uuid import UUID

import orjson

from schemas.records import UsageRecorded
from streams.ledger.raw import RawRecord

DIGEST_BYTES = 16
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
_HOUR = timedelta(hours=1)


class UnfitRecord(ValueError):
    """A record that decodes but cannot be billed as it stands; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedUsage:
    """A decoded usage record, the bytes and place it came from, and the digest of what it says."""

    record: UsageRecorded
    source: RawRecord
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """A batch in the order in which its records must reach the ledger.

    Within a turn every request id is there once; the n-th turn holds the n-th different thing that the batch says of a
    request, and nearly always there is only one. `copies` are the later equal records of each (request id, digest):
    they share the fate of the first.
    """

    turns: list[list[LocatedUsage]]
    copies: dict[tuple[UUID, bytes], list[RawRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What became of records: which were new and count now, in how many rows of the hours; which the ledger knows
    otherwise; and which Postgres refused, each with its error.
    """

    fresh: Sequence[LocatedUsage] = ()
    contradicting: Sequence[LocatedUsage] = ()
    refused: Sequence[tuple[LocatedUsage, str]] = ()
    rows: int = field(default=0, compare=False)


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


def content_digest(record: UsageRecorded) -> bytes:
    """DIGEST_BYTES that are equal for equal records, in every process and for as long as the ledger keeps them.

    The list of fields is frozen: stored digests are compared with new ones. A field that the record gains later may
    enter only where it is not its default, or each record written before and read again would contradict itself.
    """
    return digest_of(
        str(record.event_id),
        (record.occurred_at - _EPOCH) // _MICROSECOND,
        str(record.request_id),
        record.customer_id,
        record.model,
        record.version,
        record.price_id,
        dict(record.quantities),
    )


def digest_of(
    event_id: str,
    occurred_at_us: int,
    request_id: str,
    customer_id: str,
    model: str,
    version: str,
    price_id: str,
    quantities: dict[str, int],
) -> bytes:
    """The digest of a record with these fields; the ids in their usual form, lower case with hyphens."""
    said = (event_id, occurred_at_us, request_id, customer_id, model, version, price_id, quantities)
    return blake2b(orjson.dumps(said, option=orjson.OPT_SORT_KEYS), digest_size=DIGEST_BYTES).digest()


def in_turns(usages: Iterable[LocatedUsage]) -> Turns:
    """Sort a batch so that it leaves the ledger as its records one by one would, wherever it began and ended."""
    first: dict[UUID, LocatedUsage] = {}
    again = [u for u in usages if first.setdefault(u.record.request_id, u) is not u]
    turns = [list(first.values())] if first else []
    copies: dict[tuple[UUID, bytes], list[RawRecord]] = {}
    said = {u.record.request_id: [first[u.record.request_id].digest] for u in again}
    for usage in again:
        request_id = usage.record.request_id
        if usage.digest in said[request_id]:
            copies.setdefault((request_id, usage.digest), []).append(usage.source)
            continue
        if len(turns) == len(said[request_id]):
            turns.append([])
        turns[len(said[request_id])].append(usage)
        said[request_id].append(usage.digest)
    return Turns(turns=turns, copies=copies)


def row_order(usage: LocatedUsage) -> tuple[str, int, str, str, str, list[str]]:
    """Sorts records as the rows of `usage_hourly` that they go into, by the first row of each."""
    r = usage.record
    return r.customer_id, (r.occurred_at - _EPOCH) // _HOUR, r.model, r.version, r.price_id, sorted(r.quantities)


def processed_rows(usages: Iterable[LocatedUsage]) -> list[tuple[UUID, datetime, bytes]]:
    """(request id, occurred at, digest) of each record, sorted by request id."""
    by_id = sorted(usages, key=lambda u: u.record.request_id.int)  # several times as fast as comparing UUIDs
    return [(u.record.request_id, u.record.occurred_at, u.digest) for u in by_id]


def hourly_rows(usages: Iterable[LocatedUsage]) -> list[HourlyRow]:
    """The sums per customer, hour, model, version, price and meter, sorted by that key."""
    sums: dict[tuple[str, int, str, str, str], dict[str, int]] = {}
    for usage in usages:
        r = usage.record
        # A number, because the hash of a time costs as much as all the rest here.
        key = (r.customer_id, (r.occurred_at - _EPOCH) // _HOUR, r.model, r.version, r.price_id)
        known = sums.get(key)
        if known is None:
            sums[key] = dict(r.quantities)
            continue
        for meter, quantity in r.quantities.items():
            known[meter] = known.get(meter, 0) + quantity
    return [
        HourlyRow(
            customer_id=c, hour=_EPOCH + h * _HOUR, model=m, version=v, price_id=p, meter=meter, quantity=quantity
        )
        for (c, h, m, v, p), meters in sorted(sums.items(), key=itemgetter(0))
        for meter, quantity in sorted(meters.items())
    ]
