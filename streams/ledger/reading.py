"""The short way from a usage record's bytes to a row, for the records that nearly all are.

It takes only what has every field as our writers write it, and makes of that what the codec would; whatever else it
meets it leaves to the codec, which knows how to read or refuse it. It is worth a third of the ledger's time.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import Final

from infra.quick_uuid import QuickUuid
from schemas.codec import bare
from schemas.ranges import FIRST_MOMENT, LAST_MOMENT, LONG_MAX
from schemas.records import UsageRecorded
from streams.ledger.projections import LocatedUsage, digest_of
from streams.ledger.raw import RawRecord

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND: Final = timedelta(microseconds=1)
_FIRST_US: Final = (FIRST_MOMENT - _EPOCH) // _MICROSECOND
_LAST_US: Final = (LAST_MOMENT - _EPOCH) // _MICROSECOND
_is_uuid: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}").fullmatch
_is_version: Final = re.compile(r"[0-9a-f]{64}").fullmatch


def read_usage(source: RawRecord) -> LocatedUsage | None:
    """The record, which is fit to be billed, or None: then it has to be decoded. Raises nothing."""
    datum = bare(source.value, UsageRecorded)
    if datum is None:
        return None
    event_id, at_us, request_id, customer_id, model, version, price_id, quantities = datum.values()
    if not (
        _FIRST_US <= at_us <= _LAST_US
        and _is_uuid(request_id)
        and _is_uuid(event_id)
        and _is_version(version)
        and customer_id
        and quantities
        and "" not in quantities
        and min(quantities.values()) >= 0
        and max(quantities.values()) <= LONG_MAX
    ):
        return None
    record = UsageRecorded(
        event_id=QuickUuid(event_id),
        occurred_at=_EPOCH + timedelta(microseconds=at_us),
        request_id=QuickUuid(request_id),
        customer_id=customer_id,
        model=model,
        version=version,
        price_id=price_id,
        quantities=quantities,
    )
    digest = digest_of(event_id, at_us, request_id, customer_id, model, version, price_id, quantities)
    return LocatedUsage(record=record, source=source, digest=digest)
