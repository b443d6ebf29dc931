"""What a row that is older than the outbox says as a fact; pure.

The same row makes the same fact, with the same id, whenever it is asked.
"""

from __future__ import annotations

import json
from typing import Any, Final, Protocol
from uuid import UUID, uuid5

from schemas.facts import (
    CustomerChange,
    CustomerChanged,
    Fact,
    KeyChange,
    KeyChanged,
    ModelPublished,
    PriceBookPublished,
    RouteChanged,
)
from schemas.records import Task
from schemas.topics import CUSTOMERS, KEYS, MODELS, PRICES, ROUTES, Topic

_IDS: Final = uuid5(UUID(int=0), "inferlog:backfill")
_BY: Final[dict[str, Any]] = {"actor": "migration", "reason": "the row is older than the outbox"}

#: A topic, a key and a fact.
Told = tuple[Topic, str, Fact]


class Row(Protocol):
    """Columns by name: `at`, when it came to be, `id`, which names it in its table, and those of its table."""

    def __getitem__(self, name: str, /) -> Any:
        """The value of a column."""


def of_price(row: Row) -> Told:
    """The fact of a price."""
    fact = PriceBookPublished(
        event_id=uuid5(_IDS, f"price/{row['id']}"),
        occurred_at=row["at"],
        price_id=row["price_id"],
        currency=row["currency"],
        amounts_micros=json.loads(row["amounts_micros"]),
        **_BY,
    )
    return PRICES, fact.price_id, fact


def of_version(row: Row) -> Told:
    """The fact of a model version."""
    fact = ModelPublished(
        event_id=uuid5(_IDS, f"version/{row['id']}"),
        occurred_at=row["at"],
        model=row["model"],
        version=row["version"],
        task=Task(row["task"]),
        artifact_uri=row["artifact_uri"],
        manifest=row["manifest"],
        **_BY,
    )
    return MODELS, fact.model, fact


def of_route(row: Row) -> Told:
    """The fact of a route as it is; what it was before is not known."""
    fact = RouteChanged(
        event_id=uuid5(_IDS, f"route/{row['id']}"),
        occurred_at=row["at"],
        model=row["model"],
        version=row["version"],
        pool=row["pool"],
        spread=row["spread"],
        price_id=row["price_id"],
        **_BY,
    )
    return ROUTES, fact.model, fact


def of_customer(row: Row) -> Told:
    """The fact that a customer was created, with its rate as it is. It had no more than that then; what a command has
    given it since, that command has told."""
    fact = CustomerChanged(
        event_id=uuid5(_IDS, f"customer/{row['id']}"),
        occurred_at=row["at"],
        customer_id=row["customer_id"],
        change=CustomerChange.CREATED,
        name=row["name"],
        requests_per_s=row["requests_per_s"],
        burst=row["burst"],
        **_BY,
    )
    return CUSTOMERS, fact.customer_id, fact


def of_key(row: Row) -> Told:
    """The fact that a key was created, or revoked: `change` says which, and `revoked_at` when, None otherwise.

    `last_created_at` and `last_expires_at` are of its newest successor, or its own: rotations have come later and have
    told themselves, so they must not show in what was before them. Raises ValueError when there is no newest one, and
    OverflowError when the key would have ended past the year 9999.
    """
    if row["last_created_at"] is None:
        raise ValueError("expected a line of successors with an end, found keys that replace each other in a circle")
    ends = row["last_expires_at"]
    fact = KeyChanged(
        event_id=uuid5(_IDS, f"key/{row['id']}"),
        occurred_at=row["at"],
        key_id=row["key_id"],
        customer_id=row["customer_id"],
        change=KeyChange(row["change"]),
        label=row["label"],
        requests_per_s=row["requests_per_s"],
        burst=row["burst"],
        expires_at=None if ends is None else row["created_at"] + (ends - row["last_created_at"]),
        revoked_at=row["revoked_at"],
        **_BY,
    )
    return KEYS, fact.key_id, fact
