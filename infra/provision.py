"""Create what an installation needs, or say how what exists differs: topics, tables, the bucket.

Safe to run at any time and by several processes at once; nothing that holds data is ever altered or removed here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files

from infra.kafka_admin import Drift, open_admin
from infra.postgres import connect
from infra.s3 import Store
from infra.settings import OperatorSettings, PostgresSettings
from schemas.topics import DEFAULT_POOL, Topic, all_topics

# One number for every provisioner, so that two of them take turns.
_MIGRATION_LOCK = 0x1F_E0_10_6


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioned:
    """What was created, and where what exists differs from what is declared."""

    topics: list[str] = field(default_factory=list)
    migrations: list[str] = field(default_factory=list)
    bucket_created: bool = False
    drift: list[Drift] = field(default_factory=list)


class MigrationChanged(RuntimeError):
    """A migration that was applied has since been edited; restore its text and add a new file instead."""


def migrations() -> dict[str, str]:
    """SQL by file name, in the order of application."""
    folder = files("infra").joinpath("migrations")
    found = [f for f in folder.iterdir() if f.name.endswith(".sql")]
    return {f.name: f.read_text(encoding="utf-8") for f in sorted(found, key=lambda f: f.name)}


async def migrate(settings: PostgresSettings) -> list[str]:
    """Apply the migrations that are not yet applied, each in its own transaction; returns their names.

    Raises MigrationChanged when an applied file's text is no longer what was applied.
    """
    applied: list[str] = []
    connection = await connect(settings, command_timeout_s=60)
    try:
        await connection.execute("SELECT pg_advisory_lock($1)", _MIGRATION_LOCK)
        await connection.execute(
            "CREATE TABLE IF NOT EXISTS schema_migrations "
            "(name text PRIMARY KEY, digest text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
        )
        known = {r["name"]: r["digest"] for r in await connection.fetch("SELECT name, digest FROM schema_migrations")}
        for name, text in migrations().items():
            digest = await connection.fetchval("SELECT encode(sha256(convert_to($1, 'UTF8')), 'hex')", text)
            if name in known:
                if known[name] != digest:
                    raise MigrationChanged(f"{name} was applied with other text; restore it and add a new migration")
                continue
            async with connection.transaction():
                await connection.execute(text)
                await connection.execute("INSERT INTO schema_migrations (name, digest) VALUES ($1, $2)", name, digest)
            applied.append(name)
    finally:
        await connection.close(timeout=5)
    return applied


async def provision(
    settings: OperatorSettings,
    *,
    pools: tuple[str, ...] = (DEFAULT_POOL,),
    progress: Callable[[str], None] = lambda _: None,
) -> Provisioned:
    """Topics of these pools, tables and the bucket. Raises what the servers' homes raise when one is away."""
    topics: list[Topic] = [t.in_namespace(settings.kafka.namespace) for t in all_topics(pools)]
    async with open_admin(settings.kafka) as admin:
        created = await admin.create_topics(topics)
        progress(f"topics: {len(created)} created, {len(topics) - len(created)} there already")
        drift = await admin.drift([t for t in topics if t.name not in created])
    applied = await migrate(settings.postgres)
    progress(f"tables: {len(applied)} migrations applied, {len(migrations()) - len(applied)} there already")
    bucket_created = await asyncio.to_thread(Store(settings.s3).create_bucket)
    progress(f"bucket: {settings.s3.bucket} {'created' if bucket_created else 'there already'}")
    return Provisioned(topics=created, migrations=applied, bucket_created=bucket_created, drift=drift)
