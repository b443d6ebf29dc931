"""Valid records with any field replaced: `usage(quantities={"items": 2})`."""

from __future__ import annotations

import struct
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from enum import Enum
from io import BytesIO
from typing import Any
from uuid import UUID, uuid4

import fastavro

from schemas.facts import Record
from schemas.ids import finished_id, new_request_id, requested_id, usage_id
from schemas.lockfile import latest
from schemas.records import (
    BucketCharge,
    InferenceFinished,
    InferenceRequested,
    Outcome,
    Task,
    UsageRecorded,
)
from schemas.tensors import Tensor

VERSION = "ab" * 32


def encode_unchecked(record: Record, **changes: Any) -> bytes:
    """The framed bytes that a writer makes which checks no range: well-formed Avro with values that make no sense.

    `changes` are fields as Avro takes them, of which no record could be made.
    """
    locked = latest(record.SCHEMA)
    out = BytesIO()
    out.write(struct.pack(">bI", 0, locked.id))
    datum = {k: v.value if isinstance(v, Enum) else v for k, v in asdict(record).items()}
    fastavro.schemaless_writer(out, fastavro.parse_schema(locked.definition(), named_schemas={}), datum | changes)
    return out.getvalue()


NOON = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)


def floats(name: str, *values: float) -> Tensor:
    """A [1, n] FP32 tensor."""
    return Tensor(name=name, datatype="FP32", shape=(1, len(values)), data=struct.pack(f"<{len(values)}f", *values))


def requested(**changes: Any) -> InferenceRequested:
    """An admitted request of one item."""
    request_id: UUID = changes.pop("request_id", None) or new_request_id()
    at: datetime = changes.pop("occurred_at", NOON)
    fields: dict[str, Any] = {
        "event_id": requested_id(request_id),
        "occurred_at": at,
        "request_id": request_id,
        "customer_id": "cus_acme",
        "key_id": "k1",
        "model": "digits",
        "version": VERSION,
        "artifact_uri": f"s3://inferlog/sha256/{VERSION}/",
        "price_id": "standard-v1",
        "task": Task.TENSORS,
        "inputs": (floats("pixels", *([0.5] * 64)),),
        "item_count": 1,
        "deadline_at": at + timedelta(seconds=10),
        "reply_to": "api-1",
        "limiter_time": at,
        "limiter_buckets": (
            BucketCharge(bucket="key:k1", interval_us=1000, burst=100, cost=1, remaining=99),
            BucketCharge(bucket="customer:cus_acme", interval_us=500, burst=200, cost=1, remaining=199),
        ),
    }
    return InferenceRequested(**{**fields, **changes})


def finished(request: InferenceRequested | None = None, **changes: Any) -> InferenceFinished:
    """The successful end of a request; another outcome has no outputs and no quantities, unless they are given."""
    r = request or requested()
    if changes.get("outcome", Outcome.SUCCEEDED) not in (Outcome.SUCCEEDED, Outcome.UNKNOWN):
        changes = {"outputs": (), "quantities": {}, **changes}
    fields: dict[str, Any] = {
        "event_id": finished_id(r.request_id),
        "occurred_at": r.occurred_at + timedelta(milliseconds=20),
        "request_id": r.request_id,
        "customer_id": r.customer_id,
        "model": r.model,
        "version": r.version,
        "outcome": Outcome.SUCCEEDED,
        "outputs": (floats("logits", *([0.1] * 10)),),
        "price_id": r.price_id,
        "quantities": {"requests": 1, "items": r.item_count},
        "admitted_at": r.occurred_at,
        "worker": "worker-1",
        "batch_id": uuid4(),
        "batch_items": 1,
        "queue_us": 1500,
        "run_us": 300,
    }
    return InferenceFinished(**{**fields, **changes})


def usage(request: InferenceRequested | None = None, **changes: Any) -> UsageRecorded:
    """What a successful request is billed for."""
    r = request or requested(
        **{k: changes.pop(k) for k in ("request_id", "customer_id", "occurred_at") if k in changes}
    )
    fields: dict[str, Any] = {
        "event_id": usage_id(r.request_id),
        "occurred_at": r.occurred_at,
        "request_id": r.request_id,
        "customer_id": r.customer_id,
        "model": r.model,
        "version": r.version,
        "price_id": r.price_id,
        "quantities": {"requests": 1, "items": r.item_count},
    }
    return UsageRecorded(**{**fields, **changes})
