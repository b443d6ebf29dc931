"""Models, versions and routes as rows of the registry; each change and the fact of it are one transaction.

Changes of one model take turns by a lock on its row, so a RouteChanged names the version that really answered before,
and a model's facts stand in the order of its changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infra.actor import COMMAND_STAMP, Author
from infra.outbox import add_facts
from infra.postgres import Connection, Record, queries
from schemas.facts import ModelPublished, RouteChanged
from schemas.ids import new_event_id
from schemas.manifest import Manifest
from schemas.topics import DEFAULT_POOL, MODELS, ROUTES

_SPREAD = 2
_PRICE = "standard-v1"


class PublishConflict(ValueError):
    """What is to be published contradicts what is there; the message says what and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteWish:
    """What a route should become; None leaves it as it is, and takes the default where there is no route yet."""

    pool: str | None = None
    spread: int | None = None
    price_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a model's requests go: `spread` partitions of a pool's topic, at a price."""

    version: str
    pool: str
    spread: int
    price_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerouted:
    """Where a model's requests go now, and where they went before; None when they went nowhere."""

    route: Route
    before: Route | None

    @property
    def changed(self) -> bool:
        """Whether the route is new, in any of its terms."""
        return self.route != self.before


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

    Raises PublishConflict; then nothing was written.
    """
    sql = queries("gpu_worker")
    async with connection.transaction():
        await connection.execute(sql["insert_model"], model, manifest.task.value)
        _require_task(model, manifest, await connection.fetchval(sql["lock_model"], model))
        created_at = await connection.fetchval(
            sql["insert_version"], manifest.version, model, manifest.to_bytes().decode(), artifact_uri
        )
        published = []
        if created_at is not None:
            fact = ModelPublished(
                event_id=new_event_id(),
                occurred_at=created_at,
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
        changed: RouteChanged | None = None
        if wish is not None:
            rerouted, changed = await _set_route(connection, model, manifest.version, wish, by)
        await add_facts(connection, MODELS, published, stamp=COMMAND_STAMP)
        await _add_route_fact(connection, changed)
    return Registered(created=bool(published), rerouted=rerouted)


async def reroute(connection: Connection, model: str, version: str, wish: RouteWish, *, by: Author) -> Rerouted:
    """Send a model's new requests to this version; those already admitted keep theirs.

    Raises PublishConflict; then nothing was written.
    """
    async with connection.transaction():
        await connection.fetchval(queries("gpu_worker")["lock_model"], model)
        rerouted, changed = await _set_route(connection, model, version, wish, by)
        await _add_route_fact(connection, changed)
    return rerouted


async def current_route(connection: Connection, model: str) -> Route | None:
    """Where a model's requests go now; None when it has no route."""
    row = await connection.fetchrow(queries("gpu_worker")["current_route"], model)
    return None if row is None else Route(**row)


async def find_version(connection: Connection, model: str, prefix: str) -> str:
    """The one version of a model that begins with these hex digits. Raises PublishConflict for none or several."""
    rows: list[Any] = await connection.fetch(queries("gpu_worker")["versions_by_prefix"], model, prefix.lower())
    if len(rows) == 1:
        found: str = rows[0]["version"]
        return found
    if not rows:
        raise PublishConflict(f"model '{model}' has no version that begins with '{prefix}'")
    raise PublishConflict(f"'{prefix}' is ambiguous: {', '.join(r['version'][:16] for r in rows)}; give more digits")


def wished(now: Route | None, version: str, wish: RouteWish) -> Route:
    """The route that a wish makes of the present one."""
    present = now or Route(version=version, pool=DEFAULT_POOL, spread=_SPREAD, price_id=_PRICE)
    return Route(
        version=version,
        pool=wish.pool if wish.pool is not None else present.pool,
        spread=wish.spread if wish.spread is not None else present.spread,
        price_id=wish.price_id if wish.price_id is not None else present.price_id,
    )


async def _set_route(
    connection: Connection, model: str, version: str, wish: RouteWish, by: Author
) -> tuple[Rerouted, RouteChanged | None]:
    """The model's row must be locked: what is read here is what the new route replaces."""
    before = await current_route(connection, model)
    route = wished(before, version, wish)
    await _require_price(connection, route.price_id)
    row: Record | None = await connection.fetchrow(
        queries("gpu_worker")["upsert_route"], model, version, route.pool, route.spread, route.price_id
    )
    rerouted = Rerouted(route=route, before=before)
    if row is None:
        return rerouted, None
    return rerouted, RouteChanged(
        event_id=new_event_id(),
        occurred_at=row["updated_at"],
        model=model,
        version=version,
        previous_version=before.version if before else None,
        pool=route.pool,
        spread=route.spread,
        price_id=route.price_id,
        actor=by.actor,
        reason=by.reason,
    )


async def _add_route_fact(connection: Connection, changed: RouteChanged | None) -> None:
    keyed = [] if changed is None else [(changed.model, changed)]
    await add_facts(connection, ROUTES, keyed, stamp=COMMAND_STAMP)


def _require_task(model: str, manifest: Manifest, task: str | None) -> None:
    if task not in (None, manifest.task.value):
        raise PublishConflict(f"model '{model}' has task {task}, the bundle has {manifest.task.value}")


async def _require_price(connection: Connection, price_id: str) -> None:
    if not await connection.fetchval(queries("gpu_worker")["price_exists"], price_id):
        raise PublishConflict(f"price '{price_id}' does not exist; see  inferlog prices list")
