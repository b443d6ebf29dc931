"""Request ids and the ids derived from them.

A request id is made once, at admission; every other id is a function of it, so that a retry, a redelivery and
a replay of the same request all carry the same ids and collapse on a primary key.
"""

from __future__ import annotations

import os
import time
from datetime import datetime, timedelta, timezone
from uuid import UUID, uuid5

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def new_request_id(*, now_ns: int | None = None) -> UUID:
    """A UUID version 7 (RFC 9562 §5.7): 48 bits of Unix milliseconds, then 74 random bits.

    Ids made later sort later (to the millisecond), which keeps the ledger's index dense. `now_ns` is the Unix
    time in nanoseconds, the system's clock when absent.
    """
    millis = (time.time_ns() if now_ns is None else now_ns) // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = (millis & 0xFFFF_FFFF_FFFF) << 80
    value |= 0x7 << 76
    value |= (random >> 68) << 64  # 12 bits
    value |= 0b10 << 62
    value |= random & 0x3FFF_FFFF_FFFF_FFFF
    return UUID(int=value)


def first_request_id(*, age_s: float) -> UUID:
    """The least request id that can have been made `age_s` ago or later."""
    millis = time.time_ns() // 1_000_000 - round(age_s * 1000)
    return UUID(int=max(0, millis) << 80)


def request_time(request_id: UUID) -> datetime | None:
    """The millisecond a version 7 id was made in, UTC; None for ids that carry no time."""
    if request_id.version != 7:
        return None
    return EPOCH + timedelta(milliseconds=request_id.int >> 80)


def requested_id(request_id: UUID) -> UUID:
    """The event id of this request's InferenceRequested."""
    return uuid5(request_id, "requested")


def finished_id(request_id: UUID) -> UUID:
    """The event id of this request's InferenceFinished."""
    return uuid5(request_id, "finished")


def usage_id(request_id: UUID) -> UUID:
    """The event id of this request's UsageRecorded."""
    return uuid5(request_id, "usage")


def cancelled_id(request_id: UUID) -> UUID:
    """The event id of this request's RequestCancelled."""
    return uuid5(request_id, "cancelled")


def new_event_id() -> UUID:
    """The event id of a change that somebody makes once, such as a new route; made in the change's transaction."""
    return new_request_id()


_SCHEMAS = uuid5(UUID(int=0), "inferlog:schemas")


def schema_id_event(schema_id: int) -> UUID:
    """The event id of the SchemaPublished for this id on the wire."""
    return uuid5(_SCHEMAS, str(schema_id))


_DEAD_LETTERS = uuid5(UUID(int=0), "inferlog:dead-letters")


def dead_letter_id(topic: str, partition: int, offset: int) -> UUID:
    """The event id of the DeadLetter for the record at this place of the log."""
    return uuid5(_DEAD_LETTERS, f"{topic}/{partition}/{offset}")
