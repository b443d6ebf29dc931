"""What happens to a request, as facts on the log, one frozen class each (changes of the tables: `schemas.facts`).

Field by field the meaning is in the `.avsc` file of the same name; here are the types the code works with. Times
are aware datetimes in UTC, quantities integers in their smallest unit. A field added later has a default here, as it
has one in its schema, so that records written before it existed can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import ClassVar
from uuid import UUID

from schemas.ranges import Count, PositiveCount, PositiveQuantity, Quantity, Sha256
from schemas.tensors import Tensor


class Task(str, Enum):
    """How a request's inputs are to be read."""

    UNKNOWN = "UNKNOWN"
    TENSORS = "TENSORS"
    EMBEDDINGS = "EMBEDDINGS"


class Outcome(str, Enum):
    """How a request ended. UNKNOWN is how an old reader sees a newer symbol; it is never written."""

    UNKNOWN = "UNKNOWN"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    EXPIRED = "EXPIRED"
    CANCELLED = "CANCELLED"


class LimiterMode(str, Enum):
    """Who decided the limits: the shared store, or a gateway by itself while that was away."""

    UNKNOWN = "UNKNOWN"
    SHARED = "SHARED"
    LOCAL = "LOCAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCharge:
    """What the limiter took from one bucket: `cost` of `burst` units, each worth `interval_us` microseconds."""

    bucket: str
    interval_us: PositiveQuantity
    burst: PositiveQuantity
    cost: PositiveQuantity
    remaining: Quantity
    shares: PositiveCount = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequested:
    """A request was admitted, with every decision that admission took."""

    SCHEMA: ClassVar[str] = "inferlog.inference.v1.InferenceRequested"

    event_id: UUID
    occurred_at: datetime
    request_id: UUID
    customer_id: str
    key_id: str
    model: str
    version: Sha256
    artifact_uri: str
    price_id: str
    task: Task
    inputs: tuple[Tensor, ...]
    item_count: PositiveCount
    deadline_at: datetime
    reply_to: str
    traceparent: str | None = None
    limiter_time: datetime
    limiter_buckets: tuple[BucketCharge, ...]
    limiter: LimiterMode = LimiterMode.SHARED
    reserved_micros: Quantity = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceFinished:
    """A request reached its end; the first of these per request id is the result."""

    SCHEMA: ClassVar[str] = "inferlog.inference.v1.InferenceFinished"

    event_id: UUID
    occurred_at: datetime
    request_id: UUID
    customer_id: str
    model: str
    version: Sha256
    outcome: Outcome
    error_code: str | None = None
    error_message: str | None = None
    outputs: tuple[Tensor, ...] = ()
    price_id: str
    quantities: Mapping[str, Quantity]
    admitted_at: datetime
    worker: str
    batch_id: UUID
    batch_items: Count
    queue_us: Quantity
    run_us: Quantity

    def contradiction(self) -> tuple[str, str] | None:
        """The first field that an end of this outcome never has, and what is expected there; None for a sound record.

        Of an outcome that is unknown here nobody can tell.
        """
        if self.outcome is Outcome.SUCCEEDED:
            for name in ("error_code", "error_message"):
                if getattr(self, name) is not None:
                    return name, "None for what succeeded"
        elif self.outcome is not Outcome.UNKNOWN:
            if self.outputs:
                return "outputs", "nothing unless succeeded"
            if self.quantities:
                return "quantities", "nothing unless succeeded"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecorded:
    """What one succeeded request is billed for; equal on every repetition of the request's run."""

    SCHEMA: ClassVar[str] = "inferlog.usage.v1.UsageRecorded"

    event_id: UUID
    occurred_at: datetime
    request_id: UUID
    customer_id: str
    model: str
    version: Sha256
    price_id: str
    quantities: Mapping[str, Quantity]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """Somebody no longer wants a request; if it has not started it is not run and costs nothing."""

    SCHEMA: ClassVar[str] = "inferlog.inference.v1.RequestCancelled"

    event_id: UUID
    occurred_at: datetime
    request_id: UUID
    customer_id: str
    key_id: str | None = None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record that could not be handled, with its evidence.

    `value` is left out where it is too large to be written again; its place on the log, size and digest still say
    what it was.
    """

    SCHEMA: ClassVar[str] = "inferlog.inference.v1.DeadLetter"

    event_id: UUID
    occurred_at: datetime
    topic: str
    partition: Count
    offset: Quantity
    key: bytes | None = None
    value: bytes | None = None
    value_size_bytes: Quantity | None = None
    value_sha256: Sha256 | None = None
    reason: str
    attempts: PositiveCount

    def contradiction(self) -> tuple[str, str] | None:
        """The first field that does not go with the others, and what is expected there; None for a sound letter."""
        if self.value is None:
            if self.value_sha256 is not None and self.value_size_bytes is None:
                return "value_size_bytes", "the size of the value that was left out"
        elif self.value_sha256 is not None:
            return "value_sha256", "None beside a value"
        elif self.value_size_bytes not in (None, len(self.value)):
            return "value_size_bytes", f"the value's size, {len(self.value)}"
        return None
