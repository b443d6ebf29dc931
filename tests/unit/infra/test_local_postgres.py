"""Which pid files a start of the local PostgreSQL takes for those of a server that was killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from infra.local.postgres import _START
from tests.conditions import wait_until

REST = "/some/folder\n1753700000\n5432\n\n127.0.0.1\n 123 456\nready\n"


@pytest.fixture
def start(tmp_path: Path) -> list[str]:
    """The command; its server writes down its pid and the pid file that it finds."""
    programs, root = tmp_path / "bin", tmp_path / "root"
    programs.mkdir()
    (root / "cluster").mkdir(parents=True)
    (root / "cluster" / "PG_VERSION").touch()
    server = programs / "postgres"
    server.write_text(f'#!/bin/sh\n{{ echo $$; cat "{root}/cluster/postmaster.pid"; }} > "{tmp_path}/seen"\n')
    server.chmod(0o755)
    return ["/bin/sh", "-c", _START, "start", str(programs), str(root)]


def leave(tmp_path: Path, pid: int) -> None:
    (tmp_path / "root" / "cluster" / "postmaster.pid").write_text(f"{pid}\n{REST}")


def seen(tmp_path: Path) -> tuple[str, str, str]:
    """The server's pid, and the first line and the rest of the file that it found."""
    pid, first, rest = (tmp_path / "seen").read_text().split("\n", 2)
    return pid, first, rest


@pytest.mark.parametrize("left", ["a process that nobody reaps", "another program of the same pid", "nothing"])
def test_a_server_that_is_gone_does_not_keep_the_next_from_starting(
    tmp_path: Path, start: list[str], left: str
) -> None:
    other = subprocess.Popen(["sleep", "60"] if "program" in left else ["true"])
    try:
        if "program" not in left:
            wait_until(lambda: psutil.Process(other.pid).status() == psutil.STATUS_ZOMBIE)
        if left == "nothing":
            other.wait()
        leave(tmp_path, other.pid)
        subprocess.run(start, check=True, timeout=30)
    finally:
        other.kill()
        other.wait()
    pid, first, rest = seen(tmp_path)
    assert (first, rest) == (pid, REST), "PostgreSQL takes a file with its own pid for stale, and reads on in it"


def test_a_server_that_is_still_ending_is_waited_for(tmp_path: Path, start: list[str]) -> None:
    program = tmp_path / "postgres"
    program.write_text("#!/bin/sh\nread line\n")
    program.chmod(0o755)
    ending = subprocess.Popen([program], stdin=subprocess.PIPE)
    wait_until(lambda: psutil.Process(ending.pid).name() == "postgres")
    leave(tmp_path, ending.pid)
    starting = subprocess.Popen(start)
    waits = psutil.Process(starting.pid)
    wait_until(lambda: (tmp_path / "seen").exists() or any(c.name() == "sleep" for c in waits.children()))
    assert not (tmp_path / "seen").exists()
    ending.communicate(b"\n")
    assert starting.wait(30) == 0
    pid, first, _ = seen(tmp_path)
    assert first == pid


def test_a_first_start_has_no_pid_file(tmp_path: Path, start: list[str]) -> None:
    subprocess.run(start, check=False, timeout=30)
    assert not (tmp_path / "root" / "cluster" / "postmaster.pid").exists()
