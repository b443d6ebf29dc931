"""Models and versions as rows of the registry; each change and the fact of it are one transaction.

Changes of one model take turns by a lock on its row, so a model's facts stand in the order of its changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpu_worker.routing import PublishConflict, Rerouted, RouteWish, add_route_facts, set_route
from infra.actor import COMMAND_STAMP, Author
from infra.outbox import add_facts
from infra.postgres import Connection, queries
from schemas.facts import ModelPublished, RouteChanged
from schemas.ids import new_event_id
from schemas.manifest import Manifest
from schemas.routes import is_alias
from schemas.topics import MODELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What registering did: whether the version is new, and what became of the route where one was wished for."""

    created: bool
    rerouted: Rerouted | None


async def require_registrable(connection: Connection, model: str, manifest: Manifest, wish: RouteWish | None) -> None:
    """Whether `register` would take this, as far as can be told before minutes are spent. Raises PublishConflict."""
    _require_task(model, manifest, await connection.fetchval(queries("gpu_worker")["model_task"], model))
    if wish is not None and wish.price_id is not None:
        await _require_price(connection, wish.price_id)


async def register(
    connection: Connection, model: str, manifest: Manifest, *, artifact_uri: str, wish: RouteWish | None, by: Author
) -> Registered:
    """Model, version and, when wished for, its route, with a fact for each that is new, in one transaction.

    The version has passed its warm-up: the caller has seen it run, or the registry knew it.
    Raises PublishConflict; then nothing was written.
    """
    sql = queries("gpu_worker")
    async with connection.transaction():
        await connection.execute(sql["insert_model"], model, manifest.task.value)
        _require_task(model, manifest, await connection.fetchval(sql["lock_model"], model))
        row = await connection.fetchrow(
            sql["insert_version"], manifest.version, model, manifest.to_bytes().decode(), artifact_uri
        )
        published = []
        if row is not None and row["is_new"]:
            fact = ModelPublished(
                event_id=new_event_id(),
                occurred_at=row["created_at"],
                model=model,
                version=manifest.version,
                task=manifest.task,
                artifact_uri=artifact_uri,
                manifest=manifest.to_bytes().decode(),
                actor=by.actor,
                reason=by.reason,
            )
            published.append((model, fact))
        rerouted: Rerouted | None = None
        changed: Sequence[RouteChanged] = ()
        if wish is not None:
            rerouted, changed = await set_route(connection, model, manifest.version, wish, by)
        await add_facts(connection, MODELS, published, stamp=COMMAND_STAMP)
        await add_route_facts(connection, changed)
    return Registered(created=bool(published), rerouted=rerouted)


async def find_version(connection: Connection, model: str, named: str) -> str:
    """The one version of a model with this alias, or whose hash begins with these digits.

    Raises PublishConflict for none or several.
    """
    sql = queries("gpu_worker")
    if is_alias(named):
        found: str | None = await connection.fetchval(sql["alias"], model, named)
        if found is None:
            raise PublishConflict(f"model '{model}' has no alias '{named}'; see  inferlog models routes {model}")
        return found
    rows: list[Any] = await connection.fetch(sql["versions_by_prefix"], model, named.lower())
    if len(rows) == 1:
        only: str = rows[0]["version"]
        return only
    if not rows:
        raise PublishConflict(f"model '{model}' has no version that begins with '{named}'")
    raise PublishConflict(f"'{named}' is ambiguous: {', '.join(r['version'][:16] for r in rows)}; give more digits")


async def understood(connection: Connection, model: str, wish: RouteWish) -> RouteWish:
    """A wish as it was typed, with whole versions and with customers' ids. Raises PublishConflict."""
    canaries = wish.canaries
    if canaries is not None:
        canaries = {await find_version(connection, model, v): percent for v, percent in canaries.items()}
        if len(canaries) < len(wish.canaries or ()):
            raise PublishConflict("one canary is named twice")
    pins = {
        await find_customer(connection, customer): None if v is None else await find_version(connection, model, v)
        for customer, v in wish.pins.items()
    }
    if len(pins) < len(wish.pins):
        raise PublishConflict("--pin and --unpin: one customer is named twice, by its id and by its name")
    return replace(wish, canaries=canaries, pins=pins)


async def find_customer(connection: Connection, named: str) -> str:
    """The id of the customer with this id or name. Raises PublishConflict when there is none."""
    found: str | None = await connection.fetchval(queries("gpu_worker")["customer_id"], named)
    if found is None:
        raise PublishConflict(f"there is no customer '{named}'; see  inferlog customers list")
    return found


def _require_task(model: str, manifest: Manifest, task: str | None) -> None:
    if task not in (None, manifest.task.value):
        raise PublishConflict(f"model '{model}' has task {task}, the bundle has {manifest.task.value}")


async def _require_price(connection: Connection, price_id: str) -> None:
    if not await connection.fetchval(queries("gpu_worker")["price_exists"], price_id):
        raise PublishConflict(f"price '{price_id}' does not exist; see  inferlog prices list")
