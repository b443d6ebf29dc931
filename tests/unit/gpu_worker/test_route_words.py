"""How routes are said: which requests reach a version, and who took a plan back."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from gpu_worker.commands import _where
from gpu_worker.route_table import Made, ModelRoutes, lines_of
from schemas.routes import Revision, Route

NOW = datetime(2026, 3, 1, tzinfo=timezone.utc)
OWN, CANARY, PINNED, NAMED, UNUSED = (letter * 64 for letter in "abcde")
ROUTE = Route(
    version=OWN,
    pool="default",
    spread=2,
    price_id="standard-v1",
    canaries={CANARY: tuple(range(10))},
    pins={"cust_1": PINNED, "cust_2": PINNED, "cust_3": CANARY},
)


def made(**changed: Any) -> Made:
    revision = Revision(model="digits", number=1, route=ROUTE, effective_at=NOW, **changed)
    row: Any = {"change": "SCHEDULED", "actor": "ada", "reason": "a launch", "withdrawn_by": None, "restores": None}
    return Made(revision=revision, row=row)


def routes(now: Made | None, *history: Made) -> ModelRoutes:
    aliases = {"stable": OWN, "next": NAMED, "edge": NAMED}
    return ModelRoutes(model="digits", now=now, scheduled=(), aliases=aliases, history=history)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (OWN, "pool default, spread 2, standard-v1, @stable"),
        (CANARY, "canary 10%, 1 pin"),
        (PINNED, "2 pins"),
        (NAMED, "@edge, @next"),
        (UNUSED, "-"),
    ],
)
def test_every_way_in_which_a_version_is_reached_is_listed(version: str, words: str) -> None:
    row = {"routed": version == OWN, "pool": "default", "spread": 2, "price_id": "standard-v1"}
    assert _where({**row, **routes(made()).part_of(version)}) == words


def test_a_version_of_a_model_without_a_route_may_have_a_name() -> None:
    assert routes(None).part_of(NAMED) == {"canary_percent": 0, "pins": 0, "aliases": ["edge", "next"]}


def test_who_took_a_plan_back_is_told_beside_who_made_it() -> None:
    plan = made(is_scheduled=True, is_withdrawn=True)
    taken = Made(revision=plan.revision, row={**plan.row, "withdrawn_by": "bob"})
    (line,) = [line for line in lines_of([routes(None, taken)], with_history=True) if "taken back" in line]
    assert "by ada: a launch; taken back by bob (why: inferlog export routes)" in line
    assert "taken back" not in made().by
