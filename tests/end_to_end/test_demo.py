"""`make demo`, twice: the second run adds exactly itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.stack import Stack
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


@pytest.mark.timeout(600)
def test_the_demo_holds_and_a_second_run_adds_exactly_itself(home: Path) -> None:
    env = {**os.environ, "INFERLOG_HOME": str(home)}
    # The stack stays up between the runs, so that the totals can be read; each run finds it up and leaves it up.
    Stack(home).up(progress=lambda line: None)
    first = _accepted(home)
    assert first["requests"] > 300
    assert Counter(run(env, "usage", "--json")["totals"]) == first
    second = _accepted(home)
    assert Counter(run(env, "usage", "--json")["totals"]) == first + second
