"""Changes of the tables as facts on the log: what was published, routed, priced, allowed and corrected, by whom.

Each is written in the transaction of its change, so that table and log cannot disagree, and kept for ever, so that
what was true at any moment can be read off the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import ClassVar
from uuid import UUID

from schemas.ranges import (
    Correction,
    Crc64,
    Currency,
    Hour,
    LimitUnit,
    Percent,
    PositiveCount,
    PositiveQuantity,
    Quantity,
    Sha256,
    Words,
)
from schemas.records import DeadLetter, InferenceFinished, InferenceRequested, RequestCancelled, Task, UsageRecorded


class KeyChange(str, Enum):
    """What happened to a key. UNKNOWN is how an old reader sees a newer symbol; it is never written."""

    UNKNOWN = "UNKNOWN"
    CREATED = "CREATED"
    ROTATED = "ROTATED"
    REVOKED = "REVOKED"
    SCOPED = "SCOPED"
    LIMITED = "LIMITED"
    EXPIRY_CHANGED = "EXPIRY_CHANGED"


class CustomerChange(str, Enum):
    """What happened to a customer. UNKNOWN is how an old reader sees a newer symbol; it is never written."""

    UNKNOWN = "UNKNOWN"
    CREATED = "CREATED"
    LIMITED = "LIMITED"
    CAPPED = "CAPPED"


class RouteChange(str, Enum):
    """What happened to a route. UNKNOWN is how an old reader sees a newer symbol; it is never written."""

    UNKNOWN = "UNKNOWN"
    ROUTED = "ROUTED"
    ALIASED = "ALIASED"
    UNALIASED = "UNALIASED"
    SCHEDULED = "SCHEDULED"
    UNSCHEDULED = "UNSCHEDULED"
    ROLLED_BACK = "ROLLED_BACK"


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimit:
    """A rate: `amount` units per `window_s` seconds, `burst` of them at once; of one model's requests or of all."""

    unit: LimitUnit
    model: str | None = None
    amount: PositiveQuantity
    window_s: PositiveCount
    burst: PositiveQuantity


@dataclass(frozen=True, slots=True, kw_only=True)
class SpendCap:
    """The most that may be spent in a calendar month (UTC), in millionths of the currency's main unit."""

    amount_micros: Quantity
    currency: Currency


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A version that answers `percent` of the customers, always the same ones."""

    version: Sha256
    percent: Percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A customer that gets a version of its own."""

    customer_id: str
    version: Sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPublished:
    """A version of a model was checked, stored and registered; `manifest` is the JSON whose sha256 is `version`."""

    SCHEMA: ClassVar[str] = "inferlog.registry.v1.ModelPublished"

    event_id: UUID
    occurred_at: datetime
    model: str
    version: Sha256
    task: Task
    artifact_uri: str
    manifest: str
    actor: str
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChanged:
    """From now on new requests for a model are admitted with this version, pool, spread and price."""

    SCHEMA: ClassVar[str] = "inferlog.registry.v1.RouteChanged"

    event_id: UUID
    occurred_at: datetime
    model: str
    version: Sha256
    previous_version: Sha256 | None = None
    pool: str
    spread: PositiveCount
    price_id: str
    actor: str
    reason: str | None = None
    change: RouteChange = RouteChange.ROUTED
    alias: str | None = None
    effective_at: datetime | None = None
    canaries: tuple[Canary, ...] = ()
    pins: tuple[Pin, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChanged:
    """An API key was created, rotated, revoked or changed; the other fields are its state then. Never the secret."""

    SCHEMA: ClassVar[str] = "inferlog.access.v1.KeyChanged"

    event_id: UUID
    occurred_at: datetime
    key_id: str
    customer_id: str
    change: KeyChange
    label: str
    requests_per_s: PositiveCount
    burst: PositiveCount
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    replaces_key_id: str | None = None
    actor: str
    reason: str | None = None
    models: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    limits: tuple[RateLimit, ...] = ()
    max_concurrent: PositiveQuantity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerChanged:
    """A customer was created or its limits were changed; the other fields are its state after that."""

    SCHEMA: ClassVar[str] = "inferlog.access.v1.CustomerChanged"

    event_id: UUID
    occurred_at: datetime
    customer_id: str
    change: CustomerChange
    name: str
    requests_per_s: PositiveCount
    burst: PositiveCount
    limits: tuple[RateLimit, ...] = ()
    max_concurrent: PositiveQuantity | None = None
    spend_cap: SpendCap | None = None
    actor: str
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceBookPublished:
    """A price list entry: what one unit of each meter costs, in millionths of the currency's main unit."""

    SCHEMA: ClassVar[str] = "inferlog.billing.v1.PriceBookPublished"

    event_id: UUID
    occurred_at: datetime
    price_id: str
    currency: Currency
    amounts_micros: Mapping[str, Quantity]
    actor: str
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BillingAdjusted:
    """A correction of what a customer is billed for an hour: `units` more, or fewer when negative."""

    SCHEMA: ClassVar[str] = "inferlog.billing.v1.BillingAdjusted"

    event_id: UUID
    occurred_at: datetime
    customer_id: str
    hour: Hour
    meter: str
    units: Correction
    actor: str
    reason: Words


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaPublished:
    """A schema's id on the wire and its text, for readers older than the schema."""

    SCHEMA: ClassVar[str] = "inferlog.schemas.v1.SchemaPublished"

    event_id: UUID
    occurred_at: datetime
    schema_id: PositiveCount
    subject: str
    version: PositiveCount
    record: str
    fingerprint: Crc64
    definition: str


Fact = ModelPublished | RouteChanged | KeyChanged | CustomerChanged | PriceBookPublished | BillingAdjusted
Record = InferenceRequested | InferenceFinished | UsageRecorded | RequestCancelled | DeadLetter | Fact | SchemaPublished

RECORD_TYPES: tuple[type[Record], ...] = (
    InferenceRequested,
    InferenceFinished,
    UsageRecorded,
    RequestCancelled,
    DeadLetter,
    ModelPublished,
    RouteChanged,
    KeyChanged,
    CustomerChanged,
    PriceBookPublished,
    BillingAdjusted,
    SchemaPublished,
)
