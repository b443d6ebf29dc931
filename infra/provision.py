"""Create what an installation needs, or say how what exists differs: topics, schemas on the log, tables, the bucket.

Safe to run at any time and by several processes at once. Nothing that holds data is altered or removed here, except
that a topic whose key allows it gets more partitions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType

from infra.kafka import BusUnavailable, KafkaError
from infra.kafka_admin import Admin, open_admin
from infra.postgres import Connection, DatabaseUnavailable, open_connection, queries
from infra.s3 import RuleDiffers, RuleRefused, Store
from infra.schema_publish import Compared, UnknownHere, publish_schemas
from infra.settings import KafkaSettings, OperatorSettings, PostgresSettings
from infra.topic_plan import Drift, Growth, TopicPlan, plan_topics
from infra.turns import Turn
from schemas.claims import BLOB_PREFIX
from schemas.lockfile import locked_schemas
from schemas.topics import DEFAULT_POOL, SCHEMAS, Topic, all_topics, requests_topic

_TURN_WITHIN_S = 60.0
#: How much longer large tensors are kept than their records may be: Kafka deletes whole segments, up to a week
#: (segment.ms) after their first record was old enough.
_BLOBS_OUTLIVE_DAYS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioned:
    """What was created, and where what exists differs from what is declared; of a check, what would be created.

    `schemas` are the ids put on the log, `unknown_schemas` what only the log has. `blobs_expire` when large tensors got
    an end to their life.
    """

    topics: list[str] = field(default_factory=list)
    grown: list[Growth] = field(default_factory=list)
    schemas: list[int] = field(default_factory=list)
    migrations: list[str] = field(default_factory=list)
    bucket_created: bool = False
    blobs_expire: bool = False
    drift: list[Drift] = field(default_factory=list)
    unknown_schemas: list[UnknownHere] = field(default_factory=list)

    @property
    def nothing_new(self) -> bool:
        """Whether everything was there already."""
        made = self.topics or self.grown or self.schemas or self.migrations
        return not (made or self.bucket_created or self.blobs_expire)


class MigrationChanged(RuntimeError):
    """A migration that was applied has since been edited; restore its text and add a new file instead."""


@lru_cache(maxsize=1)
def migrations() -> Mapping[str, str]:
    """SQL by file name, in the order of application; read once."""
    folder = files("infra").joinpath("migrations")
    found = [f for f in folder.iterdir() if f.name.endswith(".sql")]
    return MappingProxyType({f.name: f.read_text(encoding="utf-8") for f in sorted(found, key=lambda f: f.name)})


async def migrate(settings: PostgresSettings) -> list[str]:
    """Apply the migrations that are not yet applied, each in its own transaction; returns their names.

    Raises MigrationChanged when an applied file's text is no longer what was applied.
    """
    applied: list[str] = []
    async with open_connection(settings, command_timeout_s=60) as connection:
        await connection.execute(queries("infra")["take_turn"], Turn.MIGRATION)
        await connection.execute(queries("infra")["migrations_table"])
        for name, digest in (await _pending(connection)).items():
            async with connection.transaction():
                await connection.execute(migrations()[name])
                await connection.execute(queries("infra")["migration_add"], name, digest)
            applied.append(name)
    return applied


async def _pending(connection: Connection) -> dict[str, str]:
    """Digests of the migrations that are not applied, by name. Raises MigrationChanged."""
    sql = queries("infra")
    known: dict[str, str] = {}
    if await connection.fetchval(sql["migrations_known"]):
        known = {r["name"]: r["digest"] for r in await connection.fetch(sql["migrations_applied"])}
    waiting = {}
    for name, text in migrations().items():
        digest = await connection.fetchval(sql["text_digest"], text)
        if name not in known:
            waiting[name] = digest
        elif known[name] != digest:
            raise MigrationChanged(f"{name} was applied with other text; restore it and add a new migration")
    return waiting


async def provision(
    settings: OperatorSettings,
    *,
    pools: tuple[str, ...] = (DEFAULT_POOL,),
    declared: Sequence[Topic] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Provisioned:
    """Topics of these pools (or those `declared`), schemas, tables and the bucket.

    Raises SchemaConflict before anything is changed, MigrationChanged, and what the servers' homes raise when one is
    away; each wait for a server is bounded.
    """
    topics = _in_namespace(settings, declared or all_topics(pools))
    # Every step finds what an earlier run, or one that died, has done, so dying anywhere costs another run.
    # 1  a turn, held to the end      provisioners of one installation do not see each other half done
    # 2  schemas compared             an id with two meanings stops here
    # 3  topics created and grown
    # 4  schemas on the log           before anybody writes with them
    # 5  tables    6  the bucket
    async with _turn(settings.postgres):
        async with _kafka(settings.kafka) as admin:
            plan = await _plan(admin, topics, settings.kafka)
            if _is_there(SCHEMAS, plan, topics):
                schemas = await publish_schemas(settings.kafka, check=True)
            else:
                schemas = Compared(missing=locked_schemas(), unknown_here=[])
            created = await admin.create_topics(plan.create)
            for growth in plan.grow:
                await admin.grow(growth.topic, growth.partitions)
            if len(created) < len(plan.create):  # somebody else made some meanwhile, as they liked
                drift = (await _plan(admin, topics, settings.kafka)).drift
            else:
                drift = plan.drift
        progress(f"topics: {len(created)} created, {len(plan.grow)} grown, {len(topics) - len(created)} there already")
        if schemas.missing:  # what lies there was read above, and provisioners take turns
            schemas = await publish_schemas(settings.kafka)
        published = [schema.id for schema in schemas.missing]
        progress(f"schemas: {len(published)} put on the log, {len(locked_schemas()) - len(published)} there already")
        applied = await migrate(settings.postgres)
        progress(f"tables: {len(applied)} migrations applied, {len(migrations()) - len(applied)} there already")
        store = Store(settings.s3)
        bucket_created = await asyncio.to_thread(store.create_bucket)
        progress(f"bucket: {settings.s3.bucket} {'created' if bucket_created else 'there already'}")
        expiry = await asyncio.to_thread(_expire_blobs, store, progress)
    return Provisioned(
        topics=created,
        grown=plan.grow,
        schemas=published,
        migrations=applied,
        bucket_created=bucket_created,
        blobs_expire=expiry.new,
        drift=[*drift, *expiry.drift],
        unknown_schemas=list(schemas.unknown_here),
    )


async def examine(
    settings: OperatorSettings, *, pools: tuple[str, ...] = (DEFAULT_POOL,), declared: Sequence[Topic] | None = None
) -> Provisioned:
    """What `provision` would do now; changes nothing. Raises the same."""
    topics = _in_namespace(settings, declared or all_topics(pools))
    async with _kafka(settings.kafka) as admin:
        plan = await _plan(admin, topics, settings.kafka)
    if _is_there(SCHEMAS, plan, topics):
        compared = await publish_schemas(settings.kafka, check=True)
    else:
        compared = Compared(missing=locked_schemas(), unknown_here=[])
    async with open_connection(settings.postgres) as connection:
        waiting = list(await _pending(connection))
    store = Store(settings.s3)
    bucket_missing = not await asyncio.to_thread(store.bucket_exists)
    expiry = _Expiry(new=True) if bucket_missing else await asyncio.to_thread(_examine_expiry, store)
    return Provisioned(
        topics=[t.name for t in plan.create],
        grown=plan.grow,
        schemas=[schema.id for schema in compared.missing],
        migrations=waiting,
        bucket_created=bucket_missing,
        blobs_expire=expiry.new,
        drift=[*plan.drift, *expiry.drift],
        unknown_schemas=list(compared.unknown_here),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expiry:
    """The end of large tensors' life: whether it is set only now, or what another rule says."""

    new: bool = False
    drift: Sequence[Drift] = ()


def blobs_live_days() -> int:
    """How long large tensors are kept: longer than any record that names them."""
    return (requests_topic().retention_days or 0) + _BLOBS_OUTLIVE_DAYS


def _expire_blobs(store: Store, progress: Callable[[str], None]) -> _Expiry:
    """Let large tensors go after the records that name them, where the store has rules for that."""
    days = blobs_live_days()
    try:
        new = store.expire(BLOB_PREFIX, after_days=days)
    except RuleDiffers as error:
        return _differs(store, error)
    except RuleRefused as error:
        progress(f"bucket: {BLOB_PREFIX} is kept for ever, the store takes no rule to end it: {error}")
        return _Expiry()
    progress(f"bucket: {BLOB_PREFIX} expires after {days} days{'' if new else ', as before'}")
    return _Expiry(new=new)


def _examine_expiry(store: Store) -> _Expiry:
    try:
        return _Expiry(new=not store.expires(BLOB_PREFIX, after_days=blobs_live_days()))
    except RuleDiffers as error:
        return _differs(store, error)
    except RuleRefused:
        return _Expiry()


def _differs(store: Store, error: RuleDiffers) -> _Expiry:
    drift = Drift(
        topic=f"s3://{store.bucket}/{BLOB_PREFIX}",
        setting="expiration days",
        declared=str(blobs_live_days()),
        found=str(error),
        why="a longer life may be meant, and a shorter one has already let go what it did",
        remedy="change the bucket's lifecycle rule for this prefix, or remove it and run this again",
    )
    return _Expiry(drift=[drift])


def _in_namespace(settings: OperatorSettings, topics: Sequence[Topic]) -> list[Topic]:
    return [t.in_namespace(settings.kafka.namespace) for t in topics]


def _is_there(topic: Topic, plan: TopicPlan, topics: Sequence[Topic]) -> bool:
    missing = {t.name for t in plan.create}
    return any(t.record is topic.record and t.name not in missing for t in topics)


async def _plan(admin: Admin, topics: Sequence[Topic], settings: KafkaSettings) -> TopicPlan:
    return plan_topics(topics, await admin.layouts([t.name for t in topics]), bootstrap=settings.bootstrap)


@asynccontextmanager
async def _kafka(settings: KafkaSettings) -> AsyncIterator[Admin]:
    """The admin, for a block that asks nobody else; each of its calls ends within 30 s. Raises BusUnavailable."""
    try:
        async with open_admin(settings) as admin:
            yield admin
    except (KafkaError, asyncio.TimeoutError) as error:
        raise BusUnavailable(f"{settings.bootstrap}: {type(error).__name__}: {error}") from error


@asynccontextmanager
async def _turn(settings: PostgresSettings) -> AsyncIterator[None]:
    """One provisioner at a time per installation. Raises DatabaseUnavailable after 60 s behind another one."""
    async with open_connection(settings, command_timeout_s=_TURN_WITHIN_S) as connection:
        try:
            await connection.execute(queries("infra")["take_turn"], Turn.PROVISION)
        except asyncio.TimeoutError as error:
            raise DatabaseUnavailable(
                f"another 'inferlog provision' has not ended for {_TURN_WITHIN_S:g} s; look at it, then run this again"
            ) from error
        yield
