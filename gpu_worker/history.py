"""The history of a model's routes as rows: read under the lock of its model, and only ever added to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from infra.actor import Author
from infra.postgres import Connection, Record, queries
from schemas.facts import RouteChange
from schemas.routes import Revision, Route, holding


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Every revision of a model, the first one first, and the time at Postgres when they were read."""

    model: str
    revisions: Sequence[Revision]
    now: datetime

    @property
    def held(self) -> Revision | None:
        """What holds now; None before the model has a route."""
        return holding(self.revisions, self.now)

    @property
    def held_number(self) -> int | None:
        """The number of what holds now."""
        return None if self.held is None else self.held.number

    @property
    def newest_number(self) -> int:
        """Of the revision made last, 0 without any."""
        return max((r.number for r in self.revisions), default=0)

    @property
    def at_once(self) -> datetime:
        """The time of a change that holds from now on: not before that of what it replaces, should a clock have gone
        back."""
        return self.now if self.held is None else max(self.now, self.held.effective_at)


async def read_history(connection: Connection, model: str) -> History:
    """As it is now; under `lock_model` it is what the next change stands on."""
    sql = queries("gpu_worker")
    rows = await connection.fetch(sql["revisions"], model)
    now: datetime = await connection.fetchval(sql["now"])
    return History(model=model, revisions=[revision_of(row) for row in rows], now=now)


async def lock_history(connection: Connection, model: str) -> History:
    """The same, and no other change of this model is made until the end of the transaction."""
    await connection.fetchval(queries("gpu_worker")["lock_model"], model)
    return await read_history(connection, model)


async def add_revision(
    connection: Connection, revision: Revision, change: RouteChange, *, made_at: datetime, by: Author
) -> None:
    """Write the next revision. Raises what Postgres raises when it names a version that has not run."""
    route = revision.route
    await connection.execute(
        queries("gpu_worker")["insert_revision"],
        revision.model,
        revision.number,
        change.value,
        revision.effective_at,
        route.version,
        route.pool,
        route.spread,
        route.price_id,
        json.dumps({version: list(parts) for version, parts in route.canaries.items()}),
        json.dumps(dict(route.pins)),
        revision.restores,
        by.actor,
        by.reason,
        made_at,
    )


async def withdraw(connection: Connection, revision: Revision, *, at: datetime, by: Author) -> None:
    """Mark a revision for later as one that will not be."""
    await connection.execute(queries("gpu_worker")["withdraw_revision"], revision.model, revision.number, at, by.actor)


def revision_of(row: Record) -> Revision:
    """A row of the statement `revisions`."""
    return Revision(
        model=row["model"],
        number=row["revision"],
        route=Route(
            version=row["version"],
            pool=row["pool"],
            spread=row["spread"],
            price_id=row["price_id"],
            canaries={version: tuple(parts) for version, parts in json.loads(row["canaries"]).items()},
            pins=json.loads(row["pins"]),
        ),
        effective_at=row["effective_at"],
        is_scheduled=row["change"] == RouteChange.SCHEDULED.value,
        is_withdrawn=row["withdrawn_at"] is not None,
        restores=row["restores"],
    )
