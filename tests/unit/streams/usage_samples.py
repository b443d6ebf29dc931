"""Usage records and their places on a log, for the tests of the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from uuid import UUID

from schemas.ids import usage_id
from schemas.records import UsageRecorded
from streams.ledger.projections import LocatedUsage, content_digest
from streams.ledger.raw import RawRecord
from tests.factories import encode_unchecked

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)
TOPIC = "inference.usage.v1"


def usage(
    number: int,
    *,
    customer: str = "acme",
    minutes: int = 0,
    quantities: Mapping[str, int] | None = None,
    version: str = "a" * 64,
) -> UsageRecorded:
    request_id = UUID(int=number + 1)
    return UsageRecorded(
        event_id=usage_id(request_id),
        occurred_at=NOON + timedelta(minutes=minutes),
        request_id=request_id,
        customer_id=customer,
        model="digits",
        version=version,
        price_id="standard-v1",
        quantities={"requests": 1, "items": 4} if quantities is None else quantities,
    )


def raw(
    record: UsageRecorded | bytes | None, offset: int, *, partition: int = 0, follows: int | None = None
) -> RawRecord:
    value = encode_unchecked(record) if isinstance(record, UsageRecorded) else record
    at = offset if follows is None else follows
    return RawRecord(topic=TOPIC, partition=partition, offset=offset, follows=at, key=b"acme", value=value)


def located(record: UsageRecorded, offset: int = 0, *, partition: int = 0) -> LocatedUsage:
    source = raw(record, offset, partition=partition)
    return LocatedUsage(record=record, source=source, digest=content_digest(record))
