"""The storm over the ledger for a minute, in every run, as `make soak-ledger SECONDS=60` starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conditions import wait_until
from tests.processes import ROOT, Process
from tests.storms.faults import Kind

SECONDS = 60
EVENTS = 60_000


def command(*options: object) -> list[str]:
    return [sys.executable, "-m", "tests.storms.ledger", *map(str, options)]


@pytest.mark.timeout(600)
def test_a_minute_of_storm_loses_nothing_and_bills_nothing_twice(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command("--seconds", SECONDS, "--events", EVENTS), env=env, cwd=ROOT, capture_output=True, text=True
    )
    told = done.stdout + done.stderr  # its first line has the seed
    assert done.returncode == 0, told
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(figures["faults"]) == {kind.name.lower() for kind in Kind}, told
    assert (figures["events"], figures["missing"], figures["double"], figures["wrong_sums"]) == (EVENTS, 0, 0, 0), told
    assert figures["verified"] is figures["all_read_at_the_end"] is figures["held"] is True, told
    assert not list(tmp_path.glob("inferlog-storm-*"))


def test_a_storm_that_is_told_to_end_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    process = Process(command("--seconds", 600), {"TMPDIR": str(tmp_path)}, tmp_path / "log")
    try:
        wait_until(lambda: "ledger at" in process.log.read_text(), timeout_s=120, what="the storm to begin")
        (home,) = tmp_path.glob("inferlog-storm-*")
        process.terminate()
        assert process.wait(60) == 1
        assert f"ended by {signal.SIGTERM.name}" in process.log.read_text()
        assert not home.exists()
        running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert str(home) not in running
        assert not [p for p in Path("/proc").glob("[0-9]*/environ") if str(home).encode() in _read(p)]
    finally:
        process.end()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile
        return b""
