"""Aliases: other names of versions, as `latest` and `stable`. A change and its fact are one transaction."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.history import History, lock_history
from gpu_worker.routing import PublishConflict, add_route_facts, require_routable
from infra.actor import Author
from infra.postgres import Connection, queries
from schemas.facts import RouteChange, RouteChanged
from schemas.ids import new_event_id
from schemas.routes import Route, is_alias


@dataclass(frozen=True, slots=True, kw_only=True)
class Realiased:
    """What an alias means now, and what it meant; None where it means nothing."""

    version: str | None
    before: str | None

    @property
    def changed(self) -> bool:
        """Whether it means something else now."""
        return self.version != self.before


async def set_alias(connection: Connection, model: str, alias: str, version: str | None, *, by: Author) -> Realiased:
    """Let an alias mean a version, or nothing. Raises PublishConflict; then nothing was written."""
    if not is_alias(alias):
        raise PublishConflict(
            f"alias '{alias}': expected a small letter, then up to 39 small letters, digits and '-', and nothing that "
            "the hash of a version could begin with"
        )
    sql = queries("gpu_worker")
    async with connection.transaction():
        history = await lock_history(connection, model)
        before: str | None = await connection.fetchval(sql["alias"], model, alias)
        done = Realiased(version=version, before=before)
        if not done.changed:
            return done
        route = _route(history)
        if version is not None:
            # Only the version is new; the other terms are those of the route, as its requests will travel.
            await require_routable(connection, model, _naming(route, version))
        await connection.execute(sql["set_alias"], model, alias, version, history.now)
        await add_route_facts(connection, [_fact(history, route, alias, done, by)])
    return done


def _route(history: History) -> Route:
    if history.held is None:
        raise PublishConflict(f"model '{history.model}' has no route, so no request could reach it; route it first")
    return history.held.route


def _naming(route: Route, version: str) -> Route:
    return Route(version=version, pool=route.pool, spread=route.spread, price_id=route.price_id)


def _fact(history: History, route: Route, alias: str, done: Realiased, by: Author) -> RouteChanged:
    named = done.version if done.version is not None else done.before
    if named is None:
        raise ValueError("an alias that meant nothing and means nothing is no change")
    return RouteChanged(
        event_id=new_event_id(),
        occurred_at=history.now,
        model=history.model,
        version=named,
        previous_version=done.before,
        pool=route.pool,
        spread=route.spread,
        price_id=route.price_id,
        actor=by.actor,
        reason=by.reason,
        change=RouteChange.UNALIASED if done.version is None else RouteChange.ALIASED,
        alias=alias,
    )
