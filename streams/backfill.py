"""Tells the rows that are older than the outbox: one fact for each price, version, route and key, once per database.

They come before every fact that a command wrote, because a relay publishes nothing before it has told them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID, uuid5

from infra.outbox import add_earlier_facts
from infra.postgres import Connection, Record, queries
from schemas.facts import Fact, KeyChange, KeyChanged, ModelPublished, PriceBookPublished, RouteChanged
from schemas.headers import Stamp
from schemas.records import Task
from schemas.topics import KEYS, MODELS, PRICES, ROUTES, Topic

_IDS: Final = uuid5(UUID(int=0), "inferlog:backfill")
_BY: Final[dict[str, Any]] = {"actor": "migration", "reason": "the row is older than the outbox"}
_STAMP: Final = Stamp("streams")

#: A topic, a key and a fact.
Told = tuple[Topic, str, Fact]


async def tell_old_rows(connection: Connection) -> int:
    """Write the facts, unless they were written; returns how many. Raises what Postgres raises.

    The transaction is left open on failure: the session ends with it.
    """
    # One Postgres transaction: dying before its COMMIT, nothing was told; after it, these tables are told for ever.
    # 1  claim the tables    2  read their old rows    3  write the facts
    sql = queries("streams")
    transaction = connection.transaction()
    await transaction.start()
    facts: list[Told] = []
    if await connection.fetch(sql["backfill_claim"]):
        since = await connection.fetchval(sql["outbox_since"])
        if since is None:
            raise RuntimeError("schema_migrations does not say when 0005_facts.sql was applied")
        facts = in_order(
            [
                *map(of_price, await connection.fetch(sql["old_prices"], since)),
                *map(of_version, await connection.fetch(sql["old_versions"], since)),
                *map(of_route, await connection.fetch(sql["old_routes"], since)),
                *(told for row in await connection.fetch(sql["old_keys"], since) for told in of_key(row, since)),
            ]
        )
        await add_earlier_facts(connection, facts, stamp=_STAMP)
    await transaction.commit()
    return len(facts)


def in_order(facts: Sequence[Told]) -> list[Told]:
    """By the time of the change; what was told at once stays as given."""
    return sorted(facts, key=lambda told: told[2].occurred_at)


def of_price(row: Mapping[str, Any] | Record) -> Told:
    """The fact of a price."""
    fact = PriceBookPublished(
        event_id=uuid5(_IDS, f"price/{row['price_id']}/{row['currency']}"),
        occurred_at=row["created_at"],
        price_id=row["price_id"],
        currency=row["currency"],
        amounts_micros=json.loads(row["amounts_micros"]),
        **_BY,
    )
    return PRICES, fact.price_id, fact


def of_version(row: Mapping[str, Any] | Record) -> Told:
    """The fact of a model version."""
    fact = ModelPublished(
        event_id=uuid5(_IDS, f"version/{row['model']}/{row['version']}"),
        occurred_at=row["created_at"],
        model=row["model"],
        version=row["version"],
        task=Task(row["task"]),
        artifact_uri=row["artifact_uri"],
        manifest=row["manifest"],
        **_BY,
    )
    return MODELS, fact.model, fact


def of_route(row: Mapping[str, Any] | Record) -> Told:
    """The fact of a route as it is; what it was before is not known."""
    fact = RouteChanged(
        event_id=uuid5(_IDS, f"route/{row['model']}"),
        occurred_at=row["updated_at"],
        model=row["model"],
        version=row["version"],
        pool=row["pool"],
        spread=row["spread"],
        price_id=row["price_id"],
        **_BY,
    )
    return ROUTES, fact.model, fact


def of_key(row: Mapping[str, Any] | Record, since: Any) -> list[Told]:
    """The facts of a key: that it was created and, when that was before `since`, that it was revoked.

    `last_created_at` and `last_expires_at` are of its newest successor, or its own: rotations have come later and have
    told themselves, so they must not show in what was before them.
    """
    ends = row["last_expires_at"]

    def fact(change: KeyChange, at: str, **after: Any) -> Told:
        return (
            KEYS,
            row["key_id"],
            KeyChanged(
                event_id=uuid5(_IDS, f"key/{row['key_id']}/{change.value}"),
                occurred_at=row[at],
                key_id=row["key_id"],
                customer_id=row["customer_id"],
                change=change,
                label=row["label"],
                requests_per_s=row["requests_per_s"],
                burst=row["burst"],
                expires_at=None if ends is None else row["created_at"] + (ends - row["last_created_at"]),
                **after,
                **_BY,
            ),
        )

    created = fact(KeyChange.CREATED, "created_at")
    if row["revoked_at"] is None or row["revoked_at"] > since:
        return [created]
    return [created, fact(KeyChange.REVOKED, "revoked_at", revoked_at=row["revoked_at"])]
