"""What docs/routes.md tells operators to type, in the order of the page, and what callers then see on both surfaces."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.conditions import eventually
from tests.fakes import manifest
from tests.integration.api_desk import Caller, calling, customer, register, start_gateway
from tests.integration.facts_desk import FactsDesk
from tests.integration.worker_desk import constant_bundle
from tests.processes import ROOT


def commands() -> dict[str, list[str]]:
    """What each section says to type."""
    page = (ROOT / "docs" / "routes.md").read_text(encoding="utf-8")
    sections = [section.partition("\n") for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]]
    return {name: re.findall(r"^\$ inferlog (.*)$", text, flags=re.MULTILINE) for name, _, text in sections}


async def meaning(caller: Caller, name: str) -> str:
    """The version that a model's name means for this caller, the same on both surfaces; else the error."""
    answer, openai = [await caller.call("GET", f"/{path}/models/{name}") for path in ("v2", "v1")]
    assert answer.status == openai.status, (answer.text, openai.text)
    if answer.status != 200:
        return f"{answer.status} {answer.json['error']}"
    assert openai.json["version"] == answer.json["versions"][0]
    return str(openai.json["version"])


async def follows(caller: Caller, name: str, version: str) -> None:
    async def holds() -> bool:
        return await meaning(caller, name) == version

    await eventually(holds, what=f"{name} to mean {version[:12]}")


async def test_the_page_about_routes_works_as_written(
    env: dict[str, str], spawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, desk = manifest(producer="the page"), FactsDesk(env)
    await register(env, "digits", old)
    acme = customer(env, "acme")
    constant_bundle(tmp_path / "digits-bundle", 1.0)
    monkeypatch.chdir(tmp_path)
    gateway = start_gateway(spawn, env)
    publish = ["models", "publish", "digits", "./digits-bundle", "--no-route", "--json"]
    new = json.loads(await asyncio.to_thread(desk.said, *publish))["version"]

    async def typed(section: str) -> str:
        said = ""
        for line in commands()[section]:
            real = line.replace("3fa1b2", old.version[:12]).replace("77c0de", new[:12])
            said += await asyncio.to_thread(desk.said, *shlex.split(real))
        return said

    async with calling(gateway, acme["key"]) as caller:
        await typed("Switch")
        await follows(caller, "digits", new)
        await typed("Try on some")
        await follows(caller, "digits", old.version)
        for name in (f"digits@{new[:8]}", f"digits@sha256:{new}"):
            assert await meaning(caller, name) == new
        await typed("Later")
        assert "back to revision 6" in await typed("Back")
        await follows(caller, "digits", new)
        await typed("Aliases")
        assert "taken back" in await typed("Look")
        (now,) = desk.sql("SELECT version, pins FROM route_revisions ORDER BY revision DESC LIMIT 1")
        assert now["version"] == old.version and acme["customer_id"] in now["pins"], "a rollback brings back pins"
        assert await meaning(caller, "digits") == new

        await eventually(lambda: _has_none(caller), what="the alias to be gone")
        await asyncio.to_thread(desk.said, "models", "alias", "digits", "stable", new[:8])
        await follows(caller, "digits@stable", new)
        assert "its aliases: stable" in await meaning(caller, "digits@stabel")
        for version in ("stable", new[:8]):
            answer = await caller.call("GET", f"/v2/models/digits/versions/{version}")
            assert answer.json["versions"] == [new]
        twice = await caller.call("GET", "/v2/models/digits@stable/versions/stable")
        assert twice.status == 400 and "names a version already" in twice.text


async def _has_none(caller: Caller) -> bool:
    said = await meaning(caller, "digits@stable")
    return said.startswith("404") and "it has none" in said
