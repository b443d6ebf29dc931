"""`inferlog worker` and `inferlog models publish|list`; the commands about routes are in `route_commands`."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import click

from gpu_worker import publish as publishing
from gpu_worker import registry
from gpu_worker.bundle import read_bundle
from gpu_worker.console import check_name, rerouted_row, rerouted_words, to_the_end
from gpu_worker.publish import Published
from gpu_worker.route_commands import alias, rollback, route, routes, unschedule
from gpu_worker.route_table import read_routes
from gpu_worker.routing import RouteWish, wanted
from infra.actor import Author, authored
from infra.postgres import open_connection, queries
from infra.s3 import Store
from infra.settings import OperatorSettings, operator_settings
from schemas.manifest import artifact_prefix


@click.command(epilog="Example:  INFERLOG_POOL=default INFERLOG_DEVICE=cpu inferlog worker")
def worker() -> None:
    """Run a model worker in the foreground until Ctrl-C or SIGTERM; settings are INFERLOG_* variables."""
    from gpu_worker.app import main

    main()


@click.group(epilog="Example:  inferlog models publish digits ./bundle && inferlog models list")
def models() -> None:
    """Publish, list and route model versions."""


@models.command(epilog="Example:  inferlog models publish digits ./digits-bundle --pool default --spread 2")
@click.argument("name")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--route/--no-route", default=True, show_default=True, help="Send the model's requests to this version.")
@click.option("--pool", help="Worker pool that serves it; unchanged when left out, 'default' for a first route.")
@click.option(
    "--spread",
    type=click.IntRange(1, 8),
    help="Partitions its requests use, more for hot models; unchanged when left out, 2 for a first route.",
)
@click.option(
    "--price",
    help="Price list entry its requests are billed by; unchanged when left out, 'standard-v1' for a first route.",
)
@authored()
@click.option("--json", "as_json", is_flag=True, help="Print the version as one JSON object.")
def publish(
    name: str,
    folder: Path,
    route: bool,
    pool: str | None,
    spread: int | None,
    price: str | None,
    by: Author,
    as_json: bool,
) -> None:
    """Check the bundle in FOLDER (model.json and its files) and make it a version of model NAME.

    The model's requests go to this version at once unless --no-route is given, also when it was published before.
    Publishing the same bytes again stores nothing. A new version and a changed route are each a fact on the log.
    """
    check_name(name, pool)
    wish = RouteWish(pool=pool, spread=spread, price_id=price) if route else None
    done = to_the_end(_publish(operator_settings(), name, folder, wish, by, quiet=as_json))
    if as_json:
        click.echo(json.dumps(_published_row(done)))
    else:
        said = "published" if done.created else "already published, nothing stored;"
        click.echo(f"{name}: {said} version {done.version} ({done.size_bytes / 1e6:.1f} MB)")
        if done.rerouted is not None:
            click.echo(f"{name}: {rerouted_words(done.rerouted)}")


@models.command(name="list", epilog="Example:  inferlog models list --json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_models(as_json: bool) -> None:
    """List every version; the one a model's requests go to is marked with its pool, others with who reaches them."""
    rows = to_the_end(_list(operator_settings()))
    if as_json:
        click.echo(json.dumps(rows))
        return
    if not rows:
        click.echo("no model is published yet; try 'inferlog models publish NAME FOLDER'")
        return
    click.echo(f"{'MODEL':<20} {'VERSION':<14} {'TASK':<11} {'PUBLISHED':<17} ROUTE")
    for row in rows:
        where = _where(row)
        click.echo(
            f"{row['model']:<20} {row['version'][:12]:<14} {row['task']:<11} {row['published_at'][:16]:<17} {where}"
        )


async def _publish(
    settings: OperatorSettings, name: str, folder: Path, wish: RouteWish | None, by: Author, *, quiet: bool
) -> Published:
    started_s = time.monotonic()

    def progress(line: str) -> None:
        if not quiet:
            click.echo(f"[{time.monotonic() - started_s:5.1f} s] {line}")

    manifest = await asyncio.to_thread(read_bundle, folder)
    store = Store(settings.s3)
    uri = f"s3://{store.bucket}/{artifact_prefix(manifest.version)}"
    async with open_connection(settings.postgres) as connection:
        # What takes a moment to ask comes before what takes minutes.
        await registry.require_registrable(connection, name, manifest, wish)
        if wish is not None:
            await publishing.require_pool(settings.kafka, (await wanted(connection, name, manifest.version, wish)).pool)
        if not await publishing.is_published(connection, store, name, manifest):
            await asyncio.to_thread(publishing.require_runnable, folder, manifest, progress)
            # 1 files and manifest into S3, 2 rows and facts into Postgres: what dying between them costs is said there.
            await asyncio.to_thread(publishing.store_files, store, folder, manifest, progress)
        done = await registry.register(connection, name, manifest, artifact_uri=uri, wish=wish, by=by)
    size_bytes = sum(f.size_bytes for f in manifest.files)
    return Published(
        model=name,
        version=manifest.version,
        created=done.created,
        rerouted=done.rerouted,
        size_bytes=size_bytes,
    )


async def _list(settings: OperatorSettings) -> list[dict[str, Any]]:
    async with open_connection(settings.postgres) as connection:
        rows = await connection.fetch(queries("gpu_worker")["list_versions"])
    routed = {routes.model: routes for routes in await read_routes(settings, None)}
    found = [dict(row) for row in rows]
    for row in found:
        row["published_at"] = row.pop("created_at").isoformat()
        if row["model"] in routed:  # else it was published between the two reads
            row.update(routed[row["model"]].part_of(row["version"]))
    return found


def _where(row: dict[str, Any]) -> str:
    """Which requests reach the version of this row, in words."""
    words = [f"pool {row['pool']}, spread {row['spread']}, {row['price_id']}"] if row["routed"] else []
    if row.get("canary_percent"):
        words.append(f"canary {row['canary_percent']}%")
    if pins := row.get("pins"):
        words.append(f"{pins} pin{'s' if pins > 1 else ''}")
    words += [f"@{alias}" for alias in row.get("aliases", ())]
    return ", ".join(words) or "-"


def _published_row(done: Published) -> dict[str, Any]:
    row = {"model": done.model, "version": done.version, "created": done.created, "size_bytes": done.size_bytes}
    # `version` is that of the bundle, which a route that was wished for names too.
    route = {"route_changed": False} if done.rerouted is None else rerouted_row(done.rerouted)
    return {**row, "routed": done.rerouted is not None, **route}


for command in (route, routes, rollback, unschedule, alias):
    models.add_command(command)
