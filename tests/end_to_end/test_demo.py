"""`make demo`, twice: the second run adds exactly itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.local.stack import Stack
from schemas.topics import KEYS, MODELS, PRICES, RESULTS, ROUTES, SCHEMAS, USAGE, all_topics, requests_topic
from tests.integration.api_desk import run
from tests.processes import ROOT


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home for a stack of the demo's own; nothing of it is left."""
    yield tmp_path / "home"
    Stack(tmp_path / "home").down(wipe=True)


def _accepted(home: Path) -> Counter[str]:
    """Run the demo; what it says was accepted, by meter."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("INFERLOG_")}
    done = subprocess.run(
        [sys.executable, "-m", "docs.demo", "--json"],
        env={**clean, "INFERLOG_HOME": str(home)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["claims"] == 6
    assert report["failed"] == []
    return Counter(report["accepted"])


def _told_by_the_log(servers: dict[str, str]) -> Any:
    """What the page for analysts has a stranger's script say of the installation."""
    registry = f"http://127.0.0.1:{servers['INFERLOG_API_PORT']}/registry"
    done = subprocess.run(
        [sys.executable, "docs/read_every_topic.py", servers["INFERLOG_KAFKA_BOOTSTRAP"], registry],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def _told_by_the_api(servers: dict[str, str], env: dict[str, str]) -> dict[str, dict[str, int]]:
    """What each customer that used anything is told of its own usage."""
    told = {}
    for customer in run(env, "customers", "list", "--json"):
        key = run(env, "keys", "create", customer["customer_id"], "--label", "audit", "--json")["key"]
        request = urllib.request.Request(
            f"http://127.0.0.1:{servers['INFERLOG_API_PORT']}/v1/usage", headers={"Authorization": f"Bearer {key}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            told[customer["customer_id"]] = json.load(answer)["totals"]
    return {customer_id: totals for customer_id, totals in told.items() if totals}


@pytest.mark.timeout(600)
def test_the_demo_holds_and_a_second_run_adds_exactly_itself(home: Path) -> None:
    env = {**os.environ, "INFERLOG_HOME": str(home)}
    # The stack stays up between the runs, so that the totals can be read; each run finds it up and leaves it up.
    servers = Stack(home).up(progress=lambda line: None)
    first = _accepted(home)
    assert first["requests"] > 300
    assert Counter(run(env, "usage", "--json")["totals"]) == first
    log = _told_by_the_log(servers)
    assert log["usage"] == _told_by_the_api(servers, env)
    assert set(log["records"]) == {topic.name for topic in all_topics()}
    for topic in (requests_topic(), RESULTS, USAGE, MODELS, ROUTES, KEYS, PRICES, SCHEMAS):
        assert log["records"][topic.name] > 0, topic.name
    second = _accepted(home)
    assert Counter(run(env, "usage", "--json")["totals"]) == first + second
