"""Changes of a model's route: a wish, a rollback, a plan that is called off. Each and its fact are one transaction.

Changes of one model take turns by a lock on its row, so a RouteChanged names the version that really answered before,
and a model's facts stand in the order of its changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from gpu_worker.history import History, add_revision, lock_history, read_history, withdraw
from infra.actor import COMMAND_STAMP, Author
from infra.outbox import add_facts
from infra.postgres import Connection, queries
from schemas.facts import Canary, Pin, RouteChange, RouteChanged
from schemas.ids import new_event_id
from schemas.routes import Revision, Route, before, holding, parted, planned
from schemas.topics import DEFAULT_POOL, ROUTES

_SPREAD: Final = 2
_PRICE: Final = "standard-v1"
#: Gateways hear of a change within a second; what is for later is to be with all of them before its time.
NOTICE: Final = timedelta(seconds=2)
#: A fact has to hold them all.
MOST_PINS: Final = 1000


class PublishConflict(ValueError):
    """What is wished for contradicts what is there; the message says what and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteWish:
    """What a route should become; None leaves it as it is, and takes the default where there is no route yet.

    `canaries` are percents by version; left as they are they end when the route's version changes. `pins` are versions
    by customer, None to end a pin. `at` is when, or in how long, None for at once.
    """

    pool: str | None = None
    spread: int | None = None
    price_id: str | None = None
    canaries: Mapping[str, int] | None = None
    pins: Mapping[str, str | None] = field(default_factory=dict)
    at: datetime | timedelta | None = None

    def moment(self, now: datetime) -> datetime | None:
        """When it is to hold from, None for at once."""
        return now + self.at if isinstance(self.at, timedelta) else self.at


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerouted:
    """The route that was wished for, from `effective_at` on, and the one that holds before; None when none does.

    `number` is of the revision it became, None when nothing changed. `restores` is the revision a rollback went back
    to. `planned` are those that still take effect later.
    """

    route: Route
    before: Route | None
    number: int | None
    effective_at: datetime | None = None
    restores: int | None = None
    planned: Sequence[Revision] = ()

    @property
    def changed(self) -> bool:
        """Whether the route is new, in any of its terms."""
        return self.number is not None


def wished(now: Route | None, version: str | None, wish: RouteWish) -> Route:
    """The route that a wish makes of the present one; no `version` keeps that of the present one.

    Raises PublishConflict when the wish contradicts itself, or leaves open what there is no present route to take from.
    """
    if version is None:
        if now is None:
            raise PublishConflict("the model has no route yet; say which version it goes to")
        version = now.version
    present = now or Route(version=version, pool=DEFAULT_POOL, spread=_SPREAD, price_id=_PRICE)
    canaries = present.canaries if version == present.version else {}
    if wish.canaries is not None:
        if version in wish.canaries:
            raise PublishConflict(f"version {version[:12]} is the route's own; a canary is another one")
        try:
            canaries = parted(present.canaries, wish.canaries)
        except ValueError as error:
            raise PublishConflict(str(error)) from error
    pins = {**present.pins, **wish.pins}
    route = Route(
        version=version,
        pool=wish.pool if wish.pool is not None else present.pool,
        spread=wish.spread if wish.spread is not None else present.spread,
        price_id=wish.price_id if wish.price_id is not None else present.price_id,
        canaries=canaries,
        pins={customer: pinned for customer, pinned in pins.items() if pinned is not None},
    )
    if len(route.pins) > MOST_PINS:
        raise PublishConflict(f"{len(route.pins)} customers would be pinned, expected at most {MOST_PINS}")
    return route


async def wanted(connection: Connection, model: str, version: str | None, wish: RouteWish) -> Route:
    """What a wish would make of the route as it is now, for whoever has to ask others before it is made so."""
    history = await read_history(connection, model)
    held = holding(history.revisions, wish.moment(history.now) or history.now)
    return wished(None if held is None else held.route, version, wish)


async def reroute(connection: Connection, model: str, version: str | None, wish: RouteWish, *, by: Author) -> Rerouted:
    """Send a model's new requests where the wish says; those already admitted keep their version.

    Raises PublishConflict; then nothing was written.
    """
    async with connection.transaction():
        rerouted, changed = await set_route(connection, model, version, wish, by)
        await add_route_facts(connection, changed)
    return rerouted


async def set_route(
    connection: Connection, model: str, version: str | None, wish: RouteWish, by: Author
) -> tuple[Rerouted, Sequence[RouteChanged]]:
    """Part of a transaction that ends with `add_route_facts`: what was done, and its fact."""
    history = await lock_history(connection, model)
    at = wish.moment(history.now)
    if at is not None and at < history.now + NOTICE:
        if at <= history.now:
            raise PublishConflict(
                f"{at.isoformat()} is over (it is {history.now.isoformat()}); without a time it is changed at once"
            )
        raise PublishConflict(
            f"{at.isoformat()} is not {NOTICE.seconds} s from now ({history.now.isoformat()}), which gateways need "
            "to hear of it; without a time it is changed at once"
        )
    held = holding(history.revisions, at or history.now)
    route = wished(None if held is None else held.route, version, wish)
    rerouted = Rerouted(route=route, before=None if held is None else held.route, number=None)
    if route == rerouted.before:
        return replace(rerouted, planned=planned(history.revisions, history.now)), ()
    revision = Revision(
        model=model,
        number=history.newest_number + 1,
        route=route,
        effective_at=at or history.at_once,
        is_scheduled=at is not None,
    )
    change = RouteChange.ROUTED if at is None else RouteChange.SCHEDULED
    return await _add(connection, history, revision, change, rerouted.before, by)


async def roll_back(connection: Connection, model: str, *, expected: int | None = None, by: Author) -> Rerouted:
    """Make a model's route again what it was before its present one; done twice it goes back twice.

    Plans for later stay. Raises PublishConflict when there is nothing to go back to, or when `expected` is given and
    the present route is another revision by now; then nothing was written.
    """
    async with connection.transaction():
        history = await lock_history(connection, model)
        target = rollback_target(history)
        held = history.held
        if held is None or expected not in (None, held.number):
            raise PublishConflict(f"model '{model}' was routed anew meanwhile; look at  inferlog models routes {model}")
        revision = replace(
            target,
            number=history.newest_number + 1,
            effective_at=history.at_once,
            is_scheduled=False,
            restores=target.number,
        )
        rerouted, changed = await _add(connection, history, revision, RouteChange.ROLLED_BACK, held.route, by)
        await add_route_facts(connection, changed)
    return rerouted


def rollback_target(history: History) -> Revision:
    """The revision that a rollback would go back to. Raises PublishConflict when there is none."""
    if history.held is None:
        raise PublishConflict(f"model '{history.model}' has no route")
    found = before(history.revisions, history.held)
    if found is None:
        raise PublishConflict(
            f"model '{history.model}' had no other route before revision {history.held.number}; nothing to go back to"
        )
    return found


async def call_off(connection: Connection, model: str, number: int | None, *, by: Author) -> Sequence[Revision]:
    """Take back every plan for later, or the revision `number`; returns those, the next one first.

    Raises PublishConflict when there is none such, or when one is so near that gateways would not hear of it in time.
    """
    async with connection.transaction():
        history = await lock_history(connection, model)
        plans = planned(history.revisions, history.now)
        found = [r for r in plans if number in (None, r.number)]
        if not found:
            what = f"revision {number} is not one" if number is not None else "there is none"
            raise PublishConflict(
                f"no change of model '{model}' is scheduled: {what}; see  inferlog models routes {model}"
            )
        if found[0].effective_at < history.now + NOTICE:
            raise PublishConflict(
                f"revision {found[0].number} takes effect at {found[0].effective_at.isoformat()}, too soon for gateways"
                f" to hear that it does not; then go back by  inferlog models rollback {model}"
            )
        facts = []
        for revision in found:
            await withdraw(connection, revision, at=history.now, by=by)
            held = holding([r for r in history.revisions if r not in found], revision.effective_at)
            facts.append(
                _fact(revision, RouteChange.UNSCHEDULED, None if held is None else held.route, history.now, by)
            )
        await add_route_facts(connection, facts)
    return found


async def add_route_facts(connection: Connection, changed: Sequence[RouteChanged]) -> None:
    """Last in the transaction."""
    await add_facts(connection, ROUTES, [(fact.model, fact) for fact in changed], stamp=COMMAND_STAMP)


async def require_routable(connection: Connection, model: str, route: Route) -> None:
    """Raises PublishConflict when the price is not there, or a version is not this model's or has never run."""
    sql = queries("gpu_worker")
    if not await connection.fetchval(sql["price_exists"], route.price_id):
        raise PublishConflict(f"price '{route.price_id}' does not exist; see  inferlog prices list")
    cold = await connection.fetch(sql["cold_versions"], model, sorted(route.versions))
    if cold:
        raise PublishConflict(
            f"version {cold[0]['version']} of model '{model}' has not passed its warm-up; try and register it by  "
            f"inferlog models publish {model} FOLDER --no-route"
        )


async def _add(
    connection: Connection, history: History, revision: Revision, change: RouteChange, was: Route | None, by: Author
) -> tuple[Rerouted, Sequence[RouteChanged]]:
    await require_routable(connection, revision.model, revision.route)
    await add_revision(connection, revision, change, made_at=history.now, by=by)
    rerouted = Rerouted(
        route=revision.route,
        before=was,
        number=revision.number,
        effective_at=revision.effective_at,
        restores=revision.restores,
        planned=[r for r in planned([*history.revisions, revision], history.now) if r.number != revision.number],
    )
    return rerouted, [_fact(revision, change, was, history.now, by)]


def _fact(revision: Revision, change: RouteChange, was: Route | None, at: datetime, by: Author) -> RouteChanged:
    route = revision.route
    return RouteChanged(
        event_id=new_event_id(),
        occurred_at=at,
        model=revision.model,
        version=route.version,
        previous_version=None if was is None else was.version,
        pool=route.pool,
        spread=route.spread,
        price_id=route.price_id,
        actor=by.actor,
        reason=by.reason,
        change=change,
        effective_at=revision.effective_at if revision.is_scheduled else None,
        canaries=tuple(Canary(version=version, percent=percent) for version, percent in route.percents.items()),
        pins=tuple(Pin(customer_id=customer, version=version) for customer, version in route.pins.items()),
    )
