"""`inferlog models`: a bundle becomes a version in S3 and the registry, once, and a route names it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpu_worker.commands import models
from infra.postgres import connect
from infra.s3 import Store
from infra.settings import PostgresSettings, worker_settings
from schemas.manifest import MANIFEST_FILE, Manifest, artifact_prefix
from tests.integration.worker_desk import constant_bundle, overwrite


@pytest.fixture
def call(env: dict[str, str]) -> Any:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(models, arguments, env=env)

    return run


def rows(env: dict[str, str], query: str) -> list[dict[str, Any]]:
    async def fetch() -> list[dict[str, Any]]:
        connection = await connect(PostgresSettings(dsn=env["INFERLOG_POSTGRES_DSN"]))
        try:
            return [dict(row) for row in await connection.fetch(query)]
        finally:
            await connection.close()

    return asyncio.run(fetch())


def test_publishing_stores_registers_and_routes_and_twice_is_once(
    env: dict[str, str], call: Any, tmp_path: Path
) -> None:
    bundle = str(constant_bundle(tmp_path / "v1", 1.0))
    first = call("publish", "digits", bundle, "--spread", "3", "--json")
    assert first.exit_code == 0, first.output
    done = json.loads(first.output)
    assert (done["created"], done["routed"]) == (True, True)
    store = Store(worker_settings(env).s3)
    stored = Manifest.from_bytes(store.get(artifact_prefix(done["version"]) + MANIFEST_FILE), version=done["version"])
    assert [f.name for f in stored.files] == ["weights.safetensors"]

    again = call("publish", "digits", bundle, "--spread", "3")
    assert "already published" in again.output
    assert len(rows(env, "SELECT 1 FROM model_versions")) == 1
    (route,) = rows(env, "SELECT model, version, pool, spread, price_id FROM routes")
    assert route == {
        "model": "digits",
        "version": done["version"],
        "pool": "default",
        "spread": 3,
        "price_id": "standard-v1",
    }


def test_a_route_is_moved_by_a_prefix_and_keeps_its_pool(env: dict[str, str], call: Any, tmp_path: Path) -> None:
    first = json.loads(call("publish", "m", str(constant_bundle(tmp_path / "1", 1.0)), "--json").output)["version"]
    second = json.loads(call("publish", "m", str(constant_bundle(tmp_path / "2", 2.0)), "--no-route", "--json").output)[
        "version"
    ]
    assert rows(env, "SELECT version FROM routes") == [{"version": first}]
    assert call("route", "m", second[:8]).exit_code == 0
    assert rows(env, "SELECT version, pool FROM routes") == [{"version": second, "pool": "default"}]
    listed = {row["version"]: row["routed"] for row in json.loads(call("list", "--json").output)}
    assert listed == {first: False, second: True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("route", "m", "beef"), "model 'm' has no version that begins with 'beef'"),
        (("route", "m", "xyz"), "expected 4 to 64 hex digits"),
        (("publish", "../m", "{bundle}"), "expected 1 to 100 letters"),
        (("publish", "m", "{bundle}", "--price", "free"), "price 'free' does not exist"),
        (("publish", "m", "{bundle}", "--spread", "9"), "9 is not in the range"),
        (("publish", "m", "{empty}"), "expected a bundle folder with model.json"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(
    env: dict[str, str], call: Any, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    names = {"{bundle}": str(constant_bundle(tmp_path / "b", 1.0)), "{empty}": str(tmp_path / "empty")}
    result = call(*[names.get(a, a) for a in arguments])
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output
    assert rows(env, "SELECT 1 FROM routes") == []


def test_other_bytes_under_the_versions_name_are_not_published_over(
    env: dict[str, str], call: Any, tmp_path: Path
) -> None:
    bundle = constant_bundle(tmp_path / "b", 1.0)
    version = json.loads(call("publish", "m", str(bundle), "--json").output)["version"]
    overwrite(env, artifact_prefix(version) + "weights.safetensors", b"something else")
    result = call("publish", "m", str(bundle))
    assert result.exit_code == 1
    assert "holds other bytes than its name says" in result.output
