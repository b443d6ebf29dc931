"""A key that may call some models sees no others, wherever models are listed, described or said to be ready."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from api.middleware import envelope
from api.routes import ROUTES
from api.services import GATE, QUEUES
from tests.fakes import manifest, registered, routed, text_manifest
from tests.unit.api.test_gate import World

OURS, OTHER = "digits", "minilm"
MODELS = {OURS: manifest(), OTHER: text_manifest()}
#: Every path by which a model can be read about.
READS = [r.path for r in ROUTES if r.method == "GET" and (r.path.startswith("/v1/models/") or "{model}" in r.path)]


def path_of(read: str, model: str) -> str:
    return read.format(model=model, id=model, version=MODELS[model].version)


@asynccontextmanager
async def surfaces(*models: str) -> AsyncIterator[TestClient[Any, Any]]:
    """The real routes on a gate that routes two models, and a client whose key may call these; none means all."""
    world = World()
    world.registry.all_versions = [registered(model, its) for model, its in MODELS.items()]
    world.registry.all_routes = [routed(model, its) for model, its in MODELS.items()]
    record = world.keys.records[world.key.key_id]
    terms = replace(record.terms, models=frozenset(models))
    world.keys.records[world.key.key_id] = replace(record, terms=terms)
    await world.queue(0)
    app = web.Application(middlewares=[envelope])
    app[GATE], app[QUEUES] = await world.gate(), world.queues
    app.add_routes(ROUTES)
    async with TestClient(TestServer(app), headers={"Authorization": f"Bearer {world.key.secret}"}) as client:
        yield client


async def listed(client: TestClient[Any, Any]) -> list[str]:
    told = await (await client.get("/v1/models")).json()
    return [model["id"] for model in told["data"]]


async def test_a_key_of_some_models_lists_only_those() -> None:
    async with surfaces(OURS) as client:
        assert await listed(client) == [OURS]
    async with surfaces() as client:
        assert await listed(client) == [OURS, OTHER]


def test_every_surface_has_paths_that_are_tried() -> None:
    assert len(READS) == 5


@pytest.mark.parametrize("read", READS)
async def test_a_key_of_some_models_is_refused_others_wherever_one_is_read_about(read: str) -> None:
    async with surfaces(OURS) as client:
        assert (await client.get(path_of(read, OURS))).status == 200
        refused = await client.get(path_of(read, OTHER))
        assert refused.status == 403
        assert "this key may not call model 'minilm'" in await refused.text()
        # Whether there is a model of a name is told to no key that may not call it.
        assert (await client.get(path_of(read, OTHER).replace(OTHER, "no-such-model"))).status == 403
    async with surfaces() as client:
        assert (await client.get(path_of(read, OTHER))).status == 200
