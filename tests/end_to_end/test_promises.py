"""I3 and I4 over HTTP with every process real: routes switched, workers killed, and all of it checked from the log.

What each mechanism does when taken out is shown here for I3, and in integration/test_worker_crash.py for I4.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from infra.kafka import TopicPartition, open_consumer
from infra.settings import KafkaSettings, operator_settings
from schemas.lockfile import latest
from schemas.topics import RESULTS, USAGE, requests_topic
from tests.conditions import eventually
from tests.end_to_end.installation import Installation, Spawn, call_digits, statuses
from tests.integration.api_desk import run
from tests.integration.worker_desk import constant_bundle

# A worker that serves whatever the route says when it runs, instead of what the request was admitted with.
LATEST_VERSION_WINS = """
import dataclasses, pathlib
import gpu_worker.inbox as inbox
real = inbox.decode_at
def decode_at(raw, kind):
    record = real(raw, kind)
    return dataclasses.replace(record, version=pathlib.Path({path!r}).read_text())
inbox.decode_at = decode_at
"""


TRACEPARENT = f"00-{'4b' * 16}-{'a7' * 8}-01"


async def _every_record_says_what_it_is(settings: KafkaSettings) -> None:
    """Headers name schema, fingerprint and producer on every record, and the caller's trace on all three of a call."""
    written = {requests_topic(): "api", RESULTS: "gpu_worker", USAGE: "gpu_worker"}
    for topic, producer in written.items():
        kind, name = topic.record, topic.in_namespace(settings.namespace).name
        # Usage is logged after the answer may be read.
        await eventually(
            lambda name=name, topic=topic: _is_traced(settings, name, topic.partitions), what=f"trace on {name}"
        )
        traces = []
        for headers in await _headers(settings, name, topic.partitions):
            assert headers["inferlog.schema"] == kind.SCHEMA.encode()
            assert headers["inferlog.fingerprint"] == latest(kind.SCHEMA).fingerprint.encode()
            assert headers["inferlog.producer"].startswith(f"{producer}/".encode())
            traces += [headers["traceparent"]] if "traceparent" in headers else []
        assert traces == [TRACEPARENT.encode()], f"{name}: {traces}"


async def _is_traced(settings: KafkaSettings, name: str, partitions: int) -> bool:
    return any("traceparent" in headers for headers in await _headers(settings, name, partitions))


async def _headers(settings: KafkaSettings, topic: str, partitions: int) -> list[dict[str, bytes]]:
    places = [TopicPartition(topic, n) for n in range(partitions)]
    async with open_consumer(settings, group=None) as consumer:
        consumer.assign(places)
        await consumer.seek_to_beginning(*places)
        ends = await consumer.end_offsets(places)
        found: list[dict[str, bytes]] = []
        while any([await consumer.position(p) < ends[p] for p in places]):
            batches = await consumer.getmany(timeout_ms=1000)
            found += [dict(r.headers) for records in batches.values() for r in records]
        return found


@pytest.fixture
def installation(env: dict[str, str], spawn: Spawn) -> Installation:
    made = Installation(env=env, spawn=spawn)
    made.make_customer("acme")
    return made


async def _switch_while_waiting(
    installation: Installation, tmp_path: Path, *, waiting: int, changed: str = ""
) -> set[str]:
    """Requests wait for a worker while the route moves to another version; the versions that answered them."""
    old = installation.publish("digits", str(constant_bundle(tmp_path / "old", 1.0)))
    installation.start_api(INFERLOG_DEADLINE_S="120", INFERLOG_MAX_IN_FLIGHT_PER_CUSTOMER="2048")
    await installation.routed("digits", old)
    url, key = installation.url, installation.key
    asked = asyncio.ensure_future(call_digits(url, key, waiting, at_once=waiting, timeout_s=180))
    await eventually(lambda: _admitted(installation) == waiting, what=f"{waiting} admitted requests")
    new = installation.publish("digits", str(constant_bundle(tmp_path / "new", 2.0)))
    await installation.routed("digits", new)
    (tmp_path / "latest").write_text(new)
    installation.start_worker(changed=changed.format(path=str(tmp_path / "latest")))
    answers = await asked
    assert statuses(answers) == {200: waiting}
    assert {a.document["model_version"] for a in answers} == {old if not changed else new}
    fresh = await call_digits(installation.url, installation.key, 5)
    assert {a.document["model_version"] for a in fresh} == {new}
    values = {value for a in answers for value in a.document["outputs"][0]["data"]}
    return {{1.0: "old", 2.0: "new"}[value] for value in values}


def _admitted(installation: Installation) -> int:
    report = run(installation.env, "verify", "--json")
    return int(report["proofs"]["I4"]["figures"]["accepted"])


async def test_i3_a_route_switched_while_1000_wait_changes_none_of_them(
    installation: Installation, tmp_path: Path
) -> None:
    assert await _switch_while_waiting(installation, tmp_path, waiting=1000) == {"old"}
    installation.start_ledger()
    assert installation.verify()["holds"] is True
    await call_digits(installation.url, installation.key, 1, headers={"traceparent": TRACEPARENT})
    await _every_record_says_what_it_is(operator_settings(installation.env).kafka)


async def test_i3_without_the_version_in_the_request_they_get_the_new_one(
    installation: Installation, tmp_path: Path
) -> None:
    changed = LATEST_VERSION_WINS
    assert await _switch_while_waiting(installation, tmp_path, waiting=200, changed=changed) == {"new"}


async def test_i4_a_worker_killed_under_load_loses_nothing_and_bills_once(
    installation: Installation, tmp_path: Path
) -> None:
    version = installation.publish("digits", str(constant_bundle(tmp_path / "bundle", 1.0)))
    installation.start_api(INFERLOG_DEADLINE_S="120")
    installation.start_ledger()
    await installation.routed("digits", version)
    worker = installation.start_worker()
    load = asyncio.ensure_future(call_digits(installation.url, installation.key, 1500, timeout_s=180))
    for kill in (1, 2):
        await eventually(lambda goal=kill * 300: _answered(installation) >= goal, what="load under way")
        worker.kill()
        worker = installation.start_worker()
    answers = await load
    assert statuses(answers) == {200: 1500}
    report = installation.verify()
    assert report["holds"] is True
    assert report["proofs"]["I4"]["figures"]["succeeded"] == 1500
    assert installation.usage() == {"requests": 1500, "items": 1500}


def _answered(installation: Installation) -> int:
    return int(installation.usage().get("requests", 0))
