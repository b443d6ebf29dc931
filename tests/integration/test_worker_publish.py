"""`inferlog models`: a bundle becomes a version in S3 and the registry, once, and a route names it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpu_worker import runner
from gpu_worker.commands import models
from infra.postgres import connect
from infra.s3 import Store
from infra.settings import PostgresSettings, worker_settings
from schemas.manifest import MANIFEST_FILE, Manifest, artifact_prefix
from tests.integration.worker_desk import constant_bundle, overwrite, store_bundle


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
    assert "stored" not in again.output.replace("nothing stored", "")
    assert len(rows(env, "SELECT 1 FROM model_versions")) == 1
    (route,) = rows(env, "SELECT model, version, pool, spread, price_id FROM routes")
    assert route == {
        "model": "digits",
        "version": done["version"],
        "pool": "default",
        "spread": 3,
        "price_id": "standard-v1",
    }


def test_publishing_keeps_the_terms_of_the_route_and_says_what_it_was(
    env: dict[str, str], call: Any, tmp_path: Path
) -> None:
    rows(env, "INSERT INTO prices (price_id, meter, amount_micros, currency) VALUES ('v2', 'items', 80, 'usd')")
    old, new = (str(constant_bundle(tmp_path / str(n), float(n))) for n in (1, 2))
    version = json.loads(call("publish", "m", old, "--json").output)["version"]
    assert "(was spread 2, price 'standard-v1')" in call("route", "m", version, "--spread", "4", "--price", "v2").output
    again = call("publish", "m", old).output
    assert f"m: already routed to version {version}, pool 'default', spread 4, price 'v2'\n" in again
    moved = call("publish", "m", new)
    assert f"pool 'default', spread 4, price 'v2' (was version {version})\n" in moved.output
    assert rows(env, "SELECT pool, spread, price_id FROM routes") == [
        {"pool": "default", "spread": 4, "price_id": "v2"}
    ]
    repriced = json.loads(call("publish", "m", new, "--price", "standard-v1", "--json").output)
    assert (repriced["route_changed"], repriced["price_id"]) == (True, "standard-v1")
    assert repriced["previous_route"] == {
        "version": repriced["version"],
        "pool": "default",
        "spread": 4,
        "price_id": "v2",
        "canaries": {},
        "pins": {},
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
        (("route", "m", "XYZ"), "expected 4 to 64 hex digits"),
        (("route", "m", "xyz"), "model 'm' has no alias 'xyz'"),
        (("publish", "../m", "{bundle}"), "expected 1 to 100 letters"),
        (("publish", "m", "{bundle}", "--price", "free"), "price 'free' does not exist"),
        (("publish", "m", "{bundle}", "--pool", "gpu-b"), "inferlog provision --pool gpu-b"),
        (("publish", "m", "{bundle}", "--pool", ""), "--pool: expected the name of a pool"),
        (("route", "m", "beef", "--pool", "GPU A"), "--pool: expected the name of a pool"),
        (("publish", "m", "{bundle}", "--spread", "9"), "9 is not in the range"),
        (("publish", "m", "{empty}"), "expected a bundle folder with model.json"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(
    env: dict[str, str], call: Any, tmp_path: Path, loads: list[Path], arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    names = {"{bundle}": str(constant_bundle(tmp_path / "b", 1.0)), "{empty}": str(tmp_path / "empty")}
    result = call(*[names.get(a, a) for a in arguments])
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output
    assert rows(env, "SELECT 1 FROM routes") == []
    assert loads == [], "what is cheap to ask is asked first"


def test_a_model_keeps_its_task_and_is_told_before_the_bundle_is_loaded(
    env: dict[str, str], call: Any, tmp_path: Path, loads: list[Path]
) -> None:
    rows(env, "INSERT INTO models (model, task) VALUES ('m', 'EMBEDDINGS')")
    result = call("publish", "m", str(constant_bundle(tmp_path / "b", 1.0)))
    assert result.exit_code == 1
    assert "model 'm' has task EMBEDDINGS, the bundle has TENSORS" in result.output
    assert loads == []


def test_a_route_to_a_pool_without_a_queue_is_refused_and_the_old_one_stays(
    env: dict[str, str], call: Any, tmp_path: Path
) -> None:
    version = json.loads(call("publish", "m", str(constant_bundle(tmp_path / "b", 1.0)), "--json").output)["version"]
    result = call("route", "m", version[:8], "--pool", "gpu-b")
    assert result.exit_code == 1
    assert "inferlog provision --pool gpu-b" in result.output
    assert rows(env, "SELECT pool FROM routes") == [{"pool": "default"}]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of bundles that were loaded."""
    found: list[Path] = []
    load = runner.load

    def counted(folder: Path, manifest: Manifest, *, device: str) -> Any:
        found.append(folder)
        return load(folder, manifest, device=device)

    monkeypatch.setattr(runner, "load", counted)
    return found


def test_what_is_published_already_is_neither_loaded_nor_stored_again_but_routed(
    env: dict[str, str], call: Any, tmp_path: Path, loads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = constant_bundle(tmp_path / "b", 1.0)
    version = json.loads(call("publish", "m", str(bundle), "--no-route", "--json").output)["version"]
    assert loads == [bundle]
    with monkeypatch.context() as sealed:
        sealed.delattr(Store, "put_once")
        again = call("publish", "m", str(bundle), "--spread", "3")
    assert "already published" in again.output, again.output
    assert loads == [bundle]
    assert rows(env, "SELECT version, spread FROM routes") == [{"version": version, "spread": 3}]

    assert json.loads(call("publish", "other", str(bundle), "--json").output)["created"] is True
    assert loads == [bundle, bundle], "published under another name only"


@pytest.mark.parametrize("missing", ["row", "manifest"])
def test_a_version_published_half_way_is_checked_and_stored_as_a_new_one(
    env: dict[str, str], call: Any, tmp_path: Path, loads: list[Path], missing: str
) -> None:
    bundle = constant_bundle(tmp_path / "b", 1.0)
    if missing == "row":
        version = store_bundle(env, bundle)
    else:
        version = json.loads(call("publish", "m", str(bundle), "--no-route", "--json").output)["version"]
        loads.clear()
        remove(env, artifact_prefix(version) + MANIFEST_FILE)
    again = call("publish", "m", str(bundle))
    assert again.exit_code == 0, again.output
    said = [line.split("] ")[1] for line in again.output.splitlines() if "weights.safetensors" in line]
    assert len(said) == 1, again.output
    assert said[0].startswith("stored before: weights.safetensors")
    assert loads == [bundle]
    assert rows(env, "SELECT version FROM routes") == [{"version": version}]
    assert Store(worker_settings(env).s3).get(artifact_prefix(version) + MANIFEST_FILE)


def test_other_bytes_under_the_versions_name_are_not_published_over(
    env: dict[str, str], call: Any, tmp_path: Path
) -> None:
    bundle = constant_bundle(tmp_path / "b", 1.0)
    version = store_bundle(env, bundle)
    overwrite(env, artifact_prefix(version) + "weights.safetensors", b"something else")
    result = call("publish", "m", str(bundle))
    assert result.exit_code == 1
    assert "holds other bytes than its name says" in result.output
    assert rows(env, "SELECT 1 FROM model_versions") == []


def remove(env: dict[str, str], key: str) -> None:
    store: Any = Store(worker_settings(env).s3)
    store._client.delete_object(Bucket=store.bucket, Key=key)
