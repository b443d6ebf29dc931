"""What travels beside a record's bytes: enough to read a lone record without a registry, and to see where it came from.

| header | value |
|---|---|
| `inferlog.schema` | full name of the record |
| `inferlog.fingerprint` | CRC-64-AVRO of the schema it was written with, 16 hex digits, little-endian |
| `inferlog.producer` | program and its version, `gpu_worker/0.1.0` |
| `inferlog.event_id` | the record's event_id as text, only on what the outbox's relay publishes: it finds facts by it |
| `traceparent` | W3C trace context of the call that caused the record; absent when there is none |
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from schemas.codec import fingerprint_of
from schemas.facts import RECORD_TYPES, Record

SCHEMA = "inferlog.schema"
FINGERPRINT = "inferlog.fingerprint"
PRODUCER = "inferlog.producer"
TRACEPARENT = "traceparent"
EVENT_ID = "inferlog.event_id"

#: Names and values, as Kafka's clients take them.
Headers = list[tuple[str, bytes]]


class Stamp:
    """Makes the headers of one program's records. `producer` is the program's name."""

    def __init__(self, producer: str) -> None:
        by = f"{producer}/{_installed_version()}".encode()
        self._fixed: dict[type[Record], Headers] = {
            kind: [
                (SCHEMA, kind.SCHEMA.encode()),
                (FINGERPRINT, fingerprint_of(kind).encode()),
                (PRODUCER, by),
            ]
            for kind in RECORD_TYPES
        }

    def headers(self, kind: type[Record], traceparent: str | None = None) -> Headers:
        """The headers of a record of this type; not to be changed."""
        fixed = self._fixed[kind]
        return fixed if traceparent is None else [*fixed, (TRACEPARENT, traceparent.encode())]


@lru_cache(maxsize=1)
def _installed_version() -> str:
    try:
        return version("inferlog")
    except PackageNotFoundError:  # a checkout that is not installed
        return "0"
