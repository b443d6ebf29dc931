"""Provisioning on real servers: what is missing is made, what may grow grows, drift is told, ids keep their meaning."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from infra import provision as provisioning
from infra.kafka import TopicPartition, open_consumer, open_producer
from infra.kafka_admin import open_admin
from infra.provision import Provisioned, examine, provision
from infra.schema_publish import Compared, publish_schemas
from infra.settings import KafkaSettings, operator_settings
from schemas.codec import decode, encode
from schemas.facts import SchemaPublished
from schemas.lockfile import LockedSchema, locked_schemas
from schemas.topics import SCHEMAS, Topic, all_topics, requests_topic
from tests.integration.blob_desk import Bucket
from tests.processes import ROOT
from tests.unit.infra.test_schema_publish import published

IDS = [schema.id for schema in locked_schemas()]


def apart(env: Mapping[str, str]) -> dict[str, str]:
    """The same servers and database, a namespace in which nothing was made."""
    return {**env, "INFERLOG_NAMESPACE": env["INFERLOG_NAMESPACE"] + "-x"}


def run(env: Mapping[str, str], *options: str, status: int) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "infra.cli", "provision", *options],
        env={**env, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


async def on_log(env: Mapping[str, str]) -> list[tuple[bytes, dict[str, bytes], SchemaPublished]]:
    """Key, headers and record of everything on the schemas topic."""
    settings = operator_settings(env).kafka
    place = TopicPartition(SCHEMAS.in_namespace(settings.namespace).name, 0)
    found: list[Any] = []
    async with open_consumer(settings, group=None) as consumer:
        consumer.assign([place])
        consumer.seek(place, 0)
        end = (await consumer.end_offsets([place]))[place]
        while await consumer.position(place) < end:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                found += records
    return [(r.key, dict(r.headers), decode(r.value, SchemaPublished)) for r in found]


async def put_schema(env: Mapping[str, str], record: SchemaPublished) -> None:
    settings = operator_settings(env).kafka
    async with open_producer(settings) as producer:
        topic = SCHEMAS.in_namespace(settings.namespace).name
        await producer.send(topic, encode(record), key=str(record.schema_id).encode(), timeout_s=10)


async def test_it_makes_everything_says_so_and_finds_nothing_to_do_the_second_time(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = apart(env)
    settings = operator_settings(fresh)
    names = [t.in_namespace(settings.kafka.namespace).name for t in all_topics(("default", "gpu-a"))]
    planned = await examine(settings, pools=("default", "gpu-a"))
    assert planned == Provisioned(topics=names, schemas=IDS)
    async with open_admin(settings.kafka) as admin:
        assert not await admin.layouts(names)  # looking changed nothing
    made = json.loads(run(fresh, "--pool", "default", "--pool", "gpu-a", "--json", status=0).stdout)
    assert made == {
        "topics": names,
        "grown": [],
        "schemas": IDS,
        "migrations": [],
        "bucket_created": False,
        "blobs_expire": False,
        "drift": [],
        "unknown_schemas": [],
    }
    assert run(fresh, "--check", status=0).stdout == "nothing is missing\n"
    readings: list[bool] = []

    async def publishing(kafka: KafkaSettings, *, check: bool = False) -> Compared:
        readings.append(check)
        return await publish_schemas(kafka, check=check)

    with monkeypatch.context() as patched:
        patched.setattr(provisioning, "publish_schemas", publishing)
        assert await provision(settings) == Provisioned()
    assert readings == [True], "the schemas on the log are read once"

    log = await on_log(fresh)
    assert [(key, record.schema_id) for key, _, record in log] == [(str(n).encode(), n) for n in IDS]
    assert all(
        headers["inferlog.schema"] == SchemaPublished.SCHEMA.encode()
        and headers["inferlog.producer"].startswith(b"provision/")
        and len(headers["inferlog.fingerprint"]) == 16
        for _, headers, _ in log
    )
    newest = max(locked_schemas(), key=lambda s: s.id)
    assert json.loads(log[-1][2].definition) == newest.definition()
    await put_schema(fresh, published(newest, schema_id=900, version=99))
    noted = run(fresh, "--check", status=0).stdout
    assert f"note: the log has schema id 900 ({newest.subject} version 99)" in noted


async def test_the_end_of_large_tensors_is_looked_at_too(env: dict[str, str]) -> None:
    bucket = Bucket({**env, "INFERLOG_S3_BUCKET": f"rules-{uuid4().hex[:12]}"})
    own = operator_settings({**env, "INFERLOG_S3_BUCKET": bucket.store.bucket})
    assert await examine(own) == Provisioned(bucket_created=True, blobs_expire=True)
    bucket.store.create_bucket()
    assert await examine(own) == Provisioned(blobs_expire=True)
    assert await provision(own) == Provisioned(blobs_expire=True)
    (rule,) = bucket.rules()
    assert rule["Expiration"]["Days"] * 86_400_000 > requests_topic().retention_ms + 7 * 86_400_000, "a segment more"
    assert await examine(own) == Provisioned() == await provision(own)
    bucket.set_rules([{**rule, "Expiration": {"Days": 3}}])
    looked = await examine(own)
    assert [(d.setting, d.declared, d.found) for d in looked.drift] == [("expiration days", "48", "3 (Enabled)")]
    assert looked == await provision(own)
    bucket.drop()


async def test_several_at_once_put_each_schema_on_the_log_once(env: dict[str, str]) -> None:
    settings = operator_settings(apart(env))
    done = await asyncio.gather(*(provision(settings) for _ in range(4)))
    assert sorted(n for d in done for n in d.schemas) == IDS
    assert len({t for d in done for t in d.topics}) == sum(len(d.topics) for d in done) == len(all_topics())
    assert [record.schema_id for _, _, record in await on_log(apart(env))] == IDS
    assert not any(d.drift for d in done)


async def test_topics_made_by_others_are_grown_where_they_may_and_told_where_not(env: dict[str, str]) -> None:
    fresh = apart(env)
    settings = operator_settings(fresh)
    declared = {t.name: t.in_namespace(settings.kafka.namespace) for t in all_topics(("default", "wide"))}

    def other(name: str, **changes: Any) -> Topic:
        return replace(declared[name], **changes)

    async with open_admin(settings.kafka) as admin:
        await admin.create_topics(
            [
                other("inference.requests.default.v1", partitions=3),
                other("inference.requests.wide.v1", partitions=9),
                other("inference.results.v1", partitions=4),
                other("inference.usage.v1", retention_ms=86_400_000),
                other("inference.dead-letters.v1", partitions=2, cleanup_policy="compact"),
            ]
        )
    pools = ("--pool", "default", "--pool", "wide")
    planned = run(fresh, *pools, "--check", status=3).stdout
    assert f"would grow {declared['inference.requests.default.v1'].name} from 3 to 8 partitions" in planned
    assert f"would create topic {declared['inference.schemas.v1'].name}" in planned

    done = run(fresh, *pools, status=3).stdout
    assert f"grew {declared['inference.requests.default.v1'].name} from 3 to 8 partitions" in done
    async with open_admin(settings.kafka) as admin:
        found = await admin.layouts([t.name for t in declared.values()])
    partitions = {name: found[topic.name].partitions for name, topic in declared.items()}
    assert partitions["inference.requests.default.v1"] == 8
    assert partitions["inference.requests.wide.v1"] == 9
    assert partitions["inference.results.v1"] == 4
    assert partitions["inference.dead-letters.v1"] == 2
    assert found[declared["inference.usage.v1"].name].config["retention.ms"] == "86400000"
    assert found[declared["inference.dead-letters.v1"].name].config["cleanup.policy"] == "compact"

    again = json.loads(run(fresh, *pools, "--json", status=3).stdout)
    assert [
        (d["topic"].partition(".inference.")[2], d["setting"], d["declared"], d["found"]) for d in again["drift"]
    ] == [
        ("requests.wide.v1", "partitions", "8", "9"),
        ("results.v1", "partitions", "8", "4"),
        ("usage.v1", "retention.ms", str(400 * 86_400_000), "86400000"),
        ("dead-letters.v1", "partitions", "1", "2"),
        ("dead-letters.v1", "cleanup.policy", "delete", "compact"),
    ]
    assert all(d["why"] and d["remedy"] for d in again["drift"])
    assert again["grown"] == again["topics"] == again["schemas"] == []


async def test_an_id_with_two_meanings_stops_everything(env: dict[str, str]) -> None:
    fresh = apart(env)
    settings = operator_settings(fresh)
    async with open_admin(settings.kafka) as admin:
        await admin.create_topics([SCHEMAS.in_namespace(settings.kafka.namespace)])
    mine, other = locked_schemas()[-1], locked_schemas()[0]
    await put_schema(fresh, published(other, schema_id=mine.id))
    for options in ((), ("--check",)):
        refused = run(fresh, *options, status=1)
        assert f"Error: two branches used id {mine.id}: " in refused.stderr
        assert f"the log has id {mine.id} as {other.subject} version" in refused.stderr
        assert "No schema was published" in refused.stderr
    assert len(await on_log(fresh)) == 1
    async with open_admin(settings.kafka) as admin:
        assert len(await admin.layouts([t.in_namespace(settings.kafka.namespace).name for t in all_topics()])) == 1


async def test_of_two_branches_with_one_id_at_once_one_publishes_and_the_other_is_refused(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take turns: not both look at the log before either has written."""
    settings = operator_settings(env)
    branch: ContextVar[tuple[LockedSchema, ...]] = ContextVar("branch")
    monkeypatch.setattr("infra.schema_publish.locked_schemas", lambda: branch.get())

    async def provision_of(schema: LockedSchema) -> Provisioned:
        branch.set((*locked_schemas(), replace(schema, id=500)))
        return await provision(settings)

    branches = [provision_of(schema) for schema in locked_schemas()[:4]]
    ended = await asyncio.gather(*branches, return_exceptions=True)
    assert sorted(str(getattr(e, "schemas", type(e).__name__)) for e in ended) == [*["SchemaConflict"] * 3, "[500]"]
    assert [record.schema_id for _, _, record in await on_log(env)].count(500) == 1


def test_a_broker_that_is_away_is_named_in_one_line(env: dict[str, str]) -> None:
    away = {**env, "INFERLOG_KAFKA_BOOTSTRAP": "127.0.0.1:1"}
    for options in ((), ("--check",)):
        failed = run(away, *options, status=1)
        assert "Error: Kafka does not answer: 127.0.0.1:1" in failed.stderr
        assert "Traceback" not in failed.stderr
