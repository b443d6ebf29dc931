"""Routes as operators look at them: what holds now, what is to come, what was, as plain values and as lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gpu_worker.console import plain, revision_words, utc
from gpu_worker.history import revision_of
from gpu_worker.routing import PublishConflict
from infra.postgres import Record, open_connection, queries
from infra.settings import OperatorSettings
from schemas.routes import Revision, holding, planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A revision with who made it, when and why, as its row says."""

    revision: Revision
    row: Record

    @property
    def what(self) -> str:
        """What happened, in a word or two."""
        if self.revision.is_withdrawn:
            return "taken back"
        return str(self.row["change"]).lower().replace("_", " ")

    @property
    def by(self) -> str:
        """Who made it and why, as the end of a line."""
        reason = "" if self.row["reason"] is None else f": {self.row['reason']}"
        back = "" if self.revision.restores is None else f", as revision {self.revision.restores}"
        words = f"{back}; by {self.row['actor']}{reason}"
        if self.revision.is_withdrawn:
            # Why is in the fact alone.
            words += f"; taken back by {self.row['withdrawn_by']} (why: inferlog export routes)"
        return words

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        row = self.row
        return {
            "revision": self.revision.number,
            "change": row["change"],
            "effective_at": utc(self.revision.effective_at),
            **plain(self.revision.route),
            "restores": self.revision.restores,
            "actor": row["actor"],
            "reason": row["reason"],
            "made_at": utc(row["made_at"]),
            "unscheduled_at": None if row["withdrawn_at"] is None else utc(row["withdrawn_at"]),
            "unscheduled_by": row["withdrawn_by"],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRoutes:
    """A model's route now, None without one, its plans, the next one first, its aliases, and every revision."""

    model: str
    now: Made | None
    scheduled: Sequence[Made]
    aliases: Mapping[str, str]
    history: Sequence[Made]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "model": self.model,
            "now": None if self.now is None else self.now.plain(),
            "scheduled": [made.plain() for made in self.scheduled],
            "aliases": dict(self.aliases),
            "history": [made.plain() for made in self.history],
        }

    def part_of(self, version: str) -> dict[str, Any]:
        """How this version is reached beside the route's own, as JSON has it."""
        route = None if self.now is None else self.now.revision.route
        return {
            "canary_percent": 0 if route is None else route.percents.get(version, 0),
            "pins": 0 if route is None else list(route.pins.values()).count(version),
            "aliases": sorted(alias for alias, meant in self.aliases.items() if meant == version),
        }


async def read_routes(settings: OperatorSettings, name: str | None) -> list[ModelRoutes]:
    """Every model's routes, or those of the model of this name.

    Raises PublishConflict when there is no such model.
    """
    sql = queries("gpu_worker")
    async with open_connection(settings.postgres) as connection:
        names = [row["model"] for row in await connection.fetch(sql["models_named"], name)]
        rows: Sequence[Record] = await connection.fetch(sql["revisions"], name)
        aliases = await connection.fetch(sql["aliases"], name)
        now: datetime = await connection.fetchval(sql["now"])
    if name is not None and not names:
        raise PublishConflict(f"there is no model '{name}'; see  inferlog models list")
    revised: dict[str, list[Record]] = defaultdict(list)
    named: dict[str, dict[str, str]] = defaultdict(dict)
    for row in rows:
        revised[row["model"]].append(row)
    for row in aliases:
        named[row["model"]][row["alias"]] = row["version"]
    return [_of_model(model, revised[model], named[model], now) for model in names]


def _of_model(name: str, rows: Sequence[Record], aliases: Mapping[str, str], now: datetime) -> ModelRoutes:
    made = {revision.number: Made(revision=revision, row=row) for row in rows for revision in [revision_of(row)]}
    revisions = [m.revision for m in made.values()]
    held = holding(revisions, now)
    return ModelRoutes(
        model=name,
        now=None if held is None else made[held.number],
        scheduled=[made[r.number] for r in planned(revisions, now)],
        aliases=aliases,
        history=list(made.values()),
    )


def lines_of(found: Sequence[ModelRoutes], *, with_history: bool) -> Iterator[str]:
    """What is printed for people."""
    for routes in found:
        now = "no route" if routes.now is None else _line(routes.now)
        yield f"{routes.model}: {now}"
        for made in routes.scheduled:
            yield f"  scheduled  {_line(made)}"
        for alias, version in routes.aliases.items():
            yield f"  @{alias} means version {version[:12]}"
        for made in reversed(routes.history if with_history else ()):
            yield f"  {made.what:<11} {utc(made.revision.effective_at)[:19]}  {_line(made)}{made.by}"


def _line(made: Made) -> str:
    revision = made.revision
    when = f" from {utc(revision.effective_at)}" if revision.is_scheduled else ""
    return f"revision {revision.number}{when}: {revision_words(revision)}"
