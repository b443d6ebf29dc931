"""Strangers read the log: Confluent's clients and kcat, unmodified, through a gateway's /registry and a real Kafka."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, SchemaRegistryError
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from infra.kafka import open_producer
from infra.settings import operator_settings
from schemas import facts, records
from schemas.codec import Codec, decode, encode
from schemas.facts import KeyChange, Record
from schemas.lockfile import latest, locked_schemas, versions_of
from schemas.records import InferenceRequested
from schemas.topics import SCHEMAS, USAGE, Topic, all_topics, requests_topic
from tests import factories
from tests.conditions import wait_until
from tests.conftest import run_apart
from tests.factories import NOON, VERSION
from tests.integration.api_desk import DIGITS, Gateway, register, start_gateway
from tests.newer_writer import NewerWriter
from tests.processes import ROOT

POOL = "gpu-2"


def one_of_each() -> list[Record]:
    """One record of every type, with every optional field filled where the factories leave it out."""
    change = {"event_id": uuid4(), "occurred_at": NOON, "actor": "tester", "reason": "a test"}
    place = {"topic": "t", "partition": 1, "offset": 2**40, "reason": "broken", "attempts": 2}
    request = factories.requested()
    return [
        request,
        factories.finished(request),
        factories.usage(request),
        records.RequestCancelled(
            event_id=uuid4(), occurred_at=NOON, request_id=uuid4(), customer_id="cus_acme", key_id="k1", reason="late"
        ),
        records.DeadLetter(
            event_id=uuid4(), occurred_at=NOON, key=b"\x00\xff", value=b"", value_size_bytes=0, **place
        ),
        facts.ModelPublished(
            model="digits", version=VERSION, task=records.Task.TENSORS, artifact_uri="s3://x", manifest="{}", **change
        ),
        facts.RouteChanged(model="digits", version=VERSION, pool=POOL, spread=2, price_id="standard-v1", **change),
        facts.KeyChanged(
            key_id="k1", customer_id="cus_acme", change=KeyChange.CREATED, label="é", requests_per_s=5, burst=9,
            expires_at=NOON + timedelta(days=1, microseconds=1), **change,
        ),
        facts.PriceBookPublished(price_id="standard-v1", currency="eur", amounts_micros={"items": 40}, **change),
        facts.BillingAdjusted(customer_id="cus_acme", hour=NOON, meter="items", units=-3, **change),
        facts.SchemaPublished(
            event_id=uuid4(), occurred_at=NOON, schema_id=900, subject="s", version=1, record="r",
            fingerprint="0" * 16, definition="{}",
        ),
    ]  # fmt: skip


def as_avro(value: Any) -> Any:
    """A record as an Avro library gives it to people: maps and lists, logical types as Python's own."""
    if isinstance(value, dict):
        return {k: as_avro(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_avro(v) for v in value]
    return value.value if isinstance(value, Enum) else value


@dataclass
class Office:
    """An analyst's desk: a log with records, and the addresses of its broker and its registry."""

    env: dict[str, str]
    gateway: Gateway
    namespace: str
    written: dict[str, list[tuple[bytes, Any]]]
    clients: list[SchemaRegistryClient] = field(default_factory=list)

    @property
    def registry_url(self) -> str:
        return self.gateway.url + "/registry"

    @property
    def bootstrap(self) -> str:
        return self.env["INFERLOG_KAFKA_BOOTSTRAP"]

    def client(self) -> SchemaRegistryClient:
        """A client that remembers nothing yet."""
        self.clients.append(SchemaRegistryClient({"url": self.registry_url, "max.retries": 0}))
        return self.clients[-1]

    def subject(self, topic: Topic) -> str:
        return topic.in_namespace(self.namespace).name + "-value"

    def read(self, topics: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """Every record now on these topics."""
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "none", "enable.partition.eof": True})
        known = consumer.list_topics(timeout=10).topics
        left = {(t, p) for t in topics for p in known[t].partitions}
        consumer.assign([TopicPartition(t, p, 0) for t, p in left])
        while left:
            message = consumer.poll(20)
            assert message is not None
            if message.error() is None:
                yield message.topic(), message.value()
            else:
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                left.discard((message.topic(), message.partition()))
        consumer.close()


async def put(env: dict[str, str], values: Sequence[tuple[str, bytes]]) -> None:
    """Write values to topics, in order."""
    async with open_producer(operator_settings(env).kafka, linger_ms=0) as producer:
        for topic, value in values:
            await producer.send(topic, value, key=b"k", timeout_s=10)


@pytest.fixture
def office(env: dict[str, str], spawn: Callable[..., Any]) -> Iterator[Office]:
    """Every topic holds a record of today's writers, and one of the first writers where there are older versions."""
    namespace = env["INFERLOG_NAMESPACE"]
    first = Codec(locked_schemas(), pinned={s.record: 1 for s in locked_schemas()})
    written: dict[str, list[tuple[bytes, Any]]] = {}
    for record in one_of_each():
        (topic,) = (t for t in all_topics() if t.record is type(record))
        mine = written.setdefault(topic.in_namespace(namespace).name, [])
        mine.append((encode(record), as_avro(asdict(record))))
        if len(versions_of(record.SCHEMA)) > 1:
            mine.append((first.encode(record), None))
    # The same usage again: a reader of the log has to count a request once.
    usage = written[USAGE.in_namespace(namespace).name]
    usage.append(usage[0])

    run_apart(put(env, [(topic, value) for topic, values in written.items() for value, _ in values]))
    run_apart(register(env, "digits", DIGITS, pool=POOL))
    office = Office(env, start_gateway(spawn, env), namespace, written)
    yield office
    for client in office.clients:
        client.close()


def test_confluents_client_reads_and_may_not_write(office: Office) -> None:
    client, other = office.client(), office.client()
    default, usage = office.subject(requests_topic()), office.subject(USAGE)
    everywhere = sorted({*map(office.subject, all_topics()), office.subject(requests_topic(POOL))})
    wait_until(lambda: client.get_subjects() == everywhere, what="the routed pool's queue among the subjects")
    for locked in locked_schemas():
        seen = client.get_schema(locked.id)
        assert json.loads(seen.schema_str or "") == locked.definition()
        subject = next(office.subject(t) for t in all_topics() if f"{t.name}-value" == locked.subject)
        registered = client.get_version(subject, locked.version)
        assert (registered.schema_id, registered.subject) == (locked.id, subject)
        assert other.get_schema_by_guid(registered.guid or "") == seen
        assert other.lookup_schema(subject, seen).schema_id == locked.id
    numbers = [s.version for s in versions_of(InferenceRequested.SCHEMA)]
    assert client.get_versions(default) == numbers
    assert client.get_latest_version(default).version == numbers[-1]
    # Pools are not in the lock file; their queues carry the same schemas, also before any model is routed there.
    unrouted = office.subject(requests_topic("not-yet"))
    assert client.get_latest_version(unrouted).schema_id == client.get_latest_version(default).schema_id
    assert client.get_subjects_by_schema_id(5) == [s for s in everywhere if ".requests." in s]
    assert [(v.subject, v.version) for v in client.get_schema_versions(3)] == [(usage, 1)]
    assert client.get_referenced_by(usage, 1) == []
    assert client.get_schema_types() == ["AVRO"]
    assert client.get_contexts() == ["."]
    assert client.get_compatibility() == client.get_compatibility(usage) == "FULL_TRANSITIVE"
    assert client.get_config(usage).compatibility_level == "FULL_TRANSITIVE"
    assert client.get_mode(usage) == client.get_global_mode() == "READONLY"

    mine = client.get_latest_version(usage).schema
    changed = json.loads(mine.schema_str or "")
    changed["fields"].append({"name": "note", "type": ["null", "string"], "default": None})
    added = Schema(json.dumps(changed))
    changed["fields"][-1] = {"name": "note", "type": "string"}
    unreadable = Schema(json.dumps(changed))
    for schema, fits in ((mine, True), (added, True), (unreadable, False)):
        assert client.test_compatibility(usage, schema) is fits
        assert client.test_compatibility_all_versions(usage, schema, verbose=True) is fits

    for write in (
        lambda: client.register_schema(usage, added),
        lambda: client.delete_subject(usage),
        lambda: client.delete_version(usage, 1),
        lambda: client.set_compatibility(level="NONE"),
        lambda: client.set_compatibility(usage, "NONE"),
        lambda: client.delete_config(usage),
        lambda: client.update_mode(usage, "READWRITE"),
        lambda: client.update_global_mode("READWRITE"),
    ):
        with pytest.raises(
            SchemaRegistryError, match=r"inferlog schemas add.*auto\.register\.schemas=false"
        ) as refused:
            write()
        assert (refused.value.http_status_code, refused.value.error_code) == (403, 40301)
    for ask, code in (
        (lambda: client.get_versions("nobody-value"), 40401),
        (lambda: client.get_version(usage, 9), 40402),
        (lambda: client.get_schema(900), 40403),
        (lambda: client.lookup_schema(usage, added), 40403),
        (lambda: client.lookup_schema(usage, Schema("{}")), 42201),
        (lambda: client.get_version(usage, 0), 42202),
    ):
        with pytest.raises(SchemaRegistryError) as wrong:
            ask()
        assert wrong.value.error_code == code


def test_every_record_is_what_strangers_say_it_is(office: Office) -> None:
    # One of them is by a writer of a newer release than this gateway, which learns the schema from the log.
    news, usage = NewerWriter(factories.usage()), USAGE.in_namespace(office.namespace).name
    later = replace(news.published, subject=f"{USAGE.name}-value", version=2)
    newer = news.write(encode(factories.usage()))
    run_apart(put(office.env, [(SCHEMAS.in_namespace(office.namespace).name, encode(later)), (usage, newer)]))
    client = office.client()
    wait_until(lambda: client.get_versions(f"{usage}-value") == [1, 2], what="the newer schema in the registry")

    deserialize = AvroDeserializer(client)
    values = {topic: [v for v, _ in found] for topic, found in office.written.items()}
    counts: Counter[str] = Counter()
    for topic, value in office.read(list(office.written)):
        counts[topic] += 1
        record = deserialize(value, SerializationContext(topic, MessageField.VALUE))
        if value == newer:
            assert record["added_later"] == "news"
        if value in values[topic]:
            expected = dict(office.written[topic])[value]
            assert expected is None or record == expected
    assert all(counts[topic] >= len(found) for topic, found in office.written.items())

    # And what strangers write, we read: the schema is looked up, not registered.
    for kind in map(type, one_of_each()):
        (topic,) = (t.in_namespace(office.namespace).name for t in all_topics() if t.record is kind)
        newest = office.client().get_version(f"{topic}-value", latest(kind.SCHEMA).version).schema
        serialize = AvroSerializer(office.client(), newest, conf={"auto.register.schemas": False})
        value, expected = office.written[topic][0]
        made = serialize(expected, SerializationContext(topic, MessageField.VALUE))
        assert made is not None
        assert decode(made, kind) == decode(value, kind)
    # Left at its default a serializer asks to publish; it is told what to do.
    eager = AvroSerializer(office.client(), newest)
    with pytest.raises(SchemaRegistryError, match=r"auto\.register\.schemas=false"):
        eager(expected, SerializationContext(topic, MessageField.VALUE))


def test_the_page_for_analysts_works_as_written(office: Office) -> None:
    page = in_namespace((ROOT / "docs" / "analysts.md").read_text(encoding="utf-8"), office)
    (addresses, look), (look_at_all,) = blocks(page, "Connect"), blocks(page, "Python")
    assert set(re.findall(r"\$(INFERLOG_\w+)", addresses)) <= set(office.gateway.env)
    subjects, usage, text = shell(office, look.replace("\n", "; echo\n")).splitlines()
    assert office.subject(USAGE) in json.loads(subjects)
    assert json.loads(usage)["schema"] == text
    told = json.loads(shell(office, look_at_all))
    # Each request once, although its usage is there twice.
    assert told["usage"] == {"cus_acme": {"requests": 1, "items": 1}}
    for topic, found in office.written.items():
        assert told["records"][topic] >= len(found)

    # Records that are none end nothing: they are counted, and each is named with its place.
    usage_topic = USAGE.in_namespace(office.namespace).name
    unknown = b"\x00\x00\x00\x27\x0f" + office.written[usage_topic][0][0][5:]
    run_apart(put(office.env, [(usage_topic, broken) for broken in (b"no record", unknown, b"")]))
    done = in_shell(office, look_at_all)
    assert json.loads(done.stdout) == {**told, "undecodable": 3}
    assert done.returncode == 1
    assert len(re.findall(rf"^{re.escape(usage_topic)} partition \d offset \d+: ", done.stderr, re.MULTILINE)) == 3
    assert len(done.stderr.splitlines()) == 3, done.stderr
    failed = in_shell(office, "python docs/read_every_topic.py")
    assert (failed.returncode, len(failed.stderr.splitlines())) == (1, 1), failed.stderr
    assert "expected BOOTSTRAP REGISTRY_URL" in failed.stderr

    (writing,) = blocks(page, "Python", language="python")
    value, record = office.written[USAGE.in_namespace(office.namespace).name][0]
    names = {"REGISTRY": office.registry_url, "record": record}
    exec(compile(writing, "docs/analysts.md", "exec"), names)
    office.clients.append(names["registry"])
    assert decode(names["value"], records.UsageRecorded) == decode(value, records.UsageRecorded)


@pytest.fixture
def _kcat() -> None:
    """Skips where there is no kcat, or one that cannot do what is asked."""
    about = (
        subprocess.run(["kcat", "-V"], capture_output=True, text=True, check=False) if shutil.which("kcat") else None
    )
    if about is None or "Avro" not in about.stdout:
        pytest.skip("there is no kcat that was built with Avro on the PATH")


@pytest.mark.usefixtures("_kcat", "office")
def test_kcat_reads_every_topic_with_the_command_of_the_page(office: Office) -> None:
    page = in_namespace((ROOT / "docs" / "analysts.md").read_text(encoding="utf-8"), office)
    (command,) = blocks(page, "kcat")
    usage = USAGE.in_namespace(office.namespace).name
    for topic, found in office.written.items():
        lines = [json.loads(line) for line in shell(office, command.replace(usage, topic)).splitlines()]
        assert len(lines) >= len(found)
        ids = {line["event_id"] for line in lines}
        assert ids >= {str(record["event_id"]) for _, record in found if record is not None}
        if topic == usage:
            assert [line["quantities"] for line in lines] == [{"requests": 1, "items": 1}] * 2


def in_namespace(page: str, office: Office) -> str:
    """The page as somebody reads it whose topics have a prefix."""
    return page.replace(USAGE.name, USAGE.in_namespace(office.namespace).name)


def blocks(page: str, section: str, *, language: str = "console") -> list[str]:
    """What a section of the page says to type."""
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    return [re.sub(r"^\$ ", "", block, flags=re.MULTILINE) for block in found]


def shell(office: Office, commands: str) -> str:
    """What commands of the page print."""
    done = in_shell(office, commands)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_shell(office: Office, commands: str) -> subprocess.CompletedProcess[str]:
    """Commands as somebody types them."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "BROKERS": office.bootstrap, "REGISTRY": office.registry_url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
