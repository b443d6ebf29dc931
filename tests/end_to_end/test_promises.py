"""I3 and I4 over HTTP with every process real: routes switched, workers killed, and all of it checked from the log.

What each mechanism does when taken out is shown here for I3, and in integration/test_worker_crash.py for I4.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.conditions import eventually
from tests.end_to_end.installation import Installation, Spawn, call_digits, statuses
from tests.integration.api_desk import run
from tests.integration.worker_desk import constant_bundle

# A worker that serves whatever the route says when it runs, instead of what the request was admitted with.
LATEST_VERSION_WINS = """
import dataclasses, pathlib
import gpu_worker.inbox as inbox
real = inbox.decode
def decode(value, kind):
    record = real(value, kind)
    return dataclasses.replace(record, version=pathlib.Path({path!r}).read_text())
inbox.decode = decode
"""


@pytest.fixture
def installation(env: dict[str, str], spawn: Spawn) -> Installation:
    made = Installation(env=env, spawn=spawn)
    made.make_customer("acme")
    return made


async def _switch_while_waiting(installation: Installation, tmp_path: Path, *, changed: str = "") -> set[str]:
    """200 requests wait for a worker while the route moves to another version; the versions that answered them."""
    old = installation.publish("digits", str(constant_bundle(tmp_path / "old", 1.0)))
    installation.start_api(INFERLOG_DEADLINE_S="120")
    await installation.routed("digits", old)
    waiting = asyncio.ensure_future(call_digits(installation.url, installation.key, 200, at_once=200, timeout_s=180))
    await eventually(lambda: _admitted(installation) == 200, what="200 admitted requests")
    new = installation.publish("digits", str(constant_bundle(tmp_path / "new", 2.0)))
    await installation.routed("digits", new)
    (tmp_path / "latest").write_text(new)
    installation.start_worker(changed=changed.format(path=str(tmp_path / "latest")))
    answers = await waiting
    assert statuses(answers) == {200: 200}
    fresh = await call_digits(installation.url, installation.key, 5)
    assert {a.document["model_version"] for a in fresh} == {new}
    values = {value for a in answers for value in a.document["outputs"][0]["data"]}
    return {{1.0: "old", 2.0: "new"}[value] for value in values}


def _admitted(installation: Installation) -> int:
    report = run(installation.env, "verify", "--json")
    return int(report["proofs"]["I4"]["figures"]["accepted"])


async def test_i3_a_route_switched_while_200_wait_changes_none_of_them(
    installation: Installation, tmp_path: Path
) -> None:
    assert await _switch_while_waiting(installation, tmp_path) == {"old"}
    installation.start_ledger()
    assert installation.verify()["holds"] is True


async def test_i3_without_the_version_in_the_request_they_get_the_new_one(
    installation: Installation, tmp_path: Path
) -> None:
    assert await _switch_while_waiting(installation, tmp_path, changed=LATEST_VERSION_WINS) == {"new"}


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
