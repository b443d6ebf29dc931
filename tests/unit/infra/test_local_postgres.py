from __future__ import annotations

import subprocess
from pathlib import Path

import psutil

from infra.local.postgres import _START
from tests.conditions import wait_until


def test_a_start_waits_until_the_remains_of_a_killed_server_are_reaped(tmp_path: Path) -> None:
    """PostgreSQL takes a process that has ended but was not reaped for a running server, and refuses to start."""
    programs, root, seen = tmp_path / "bin", tmp_path / "root", tmp_path / "seen"
    programs.mkdir()
    (root / "cluster").mkdir(parents=True)
    (root / "cluster" / "PG_VERSION").touch()
    remains = subprocess.Popen(["true"])
    wait_until(lambda: psutil.Process(remains.pid).status() == psutil.STATUS_ZOMBIE)
    (root / "cluster" / "postmaster.pid").write_text(f"{remains.pid}\n{root}\n")
    server = programs / "postgres"
    server.write_text(f'#!/bin/sh\nps -o stat= -p {remains.pid} > "{seen}.part"; mv "{seen}.part" "{seen}"\n')
    server.chmod(0o755)
    start = subprocess.Popen(["/bin/sh", "-c", _START, "start", str(programs), str(root)])
    waits = psutil.Process(start.pid)
    wait_until(lambda: seen.exists() or any(c.name() == "sleep" for c in waits.children()))
    remains.wait()
    start.wait()
    assert seen.read_text().strip() == ""
