from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infra.local import processes
from infra.local.part import Command
from infra.local.processes import HOME_MARK, PART_MARK, Running, Victim
from tests.conditions import wait_until

FOR_LONG = "exec sleep 600"
DEAF = "trap '' TERM; echo deaf; while :; do sleep 600; done"


class Ground:
    """A folder in which processes are launched as the stack does it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
        self.started: list[Running] = []

    def launch(self, script: str, name: str = "part") -> Running:
        running = processes.launch(
            Command(argv=("/bin/sh", "-c", script), cwd=self.folder),
            pid_file=self.folder / f"{name}.json",
            log_file=self.folder / f"{name}.log",
            environ={**os.environ, HOME_MARK: str(self.folder), PART_MARK: name},
            fingerprint="f",
            lock=self.lock,
        )
        self.started.append(running)
        return running

    def log(self, name: str = "part") -> str:
        return processes.log_tail(self.folder / f"{name}.log", 20)


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    ground = Ground(tmp_path)
    yield ground
    processes.kill_strays(tmp_path)
    for running in ground.started:
        processes.wait_for_exit(running, timeout_s=5)
    os.close(ground.lock)


def victim(running: Running, *, grace_s: float) -> Victim:
    return Victim(running=running, ask=signal.SIGTERM, grace_s=grace_s)


def test_the_pid_file_names_the_running_process(ground: Ground) -> None:
    running = ground.launch(FOR_LONG)
    assert processes.read_pid_file(ground.folder / "part.json") == running
    assert processes.is_alive(running)
    wait_until(lambda: psutil.Process(running.pid).name() == "sleep")
    assert processes.is_alive(running)  # the mark survives the exec
    assert running.command == ("/bin/sh", "-c", FOR_LONG)


def test_output_goes_to_the_log(ground: Ground) -> None:
    ground.launch("echo hello; echo trouble >&2")
    wait_until(lambda: ground.log() == "hello\ntrouble")


def test_a_process_that_ended_is_not_alive_though_nobody_reaped_it(ground: Ground) -> None:
    running = ground.launch("exit 3")
    wait_until(lambda: not processes.is_alive(running))


def test_a_stranger_with_the_same_pid_is_left_alone(ground: Ground) -> None:
    stranger = ground.launch(FOR_LONG)
    note = replace(stranger, started="1")  # what an old pid file says of that pid
    assert not processes.is_alive(note)
    assert processes.stop([victim(note, grace_s=0)]) == []
    assert processes.is_alive(stranger)


def test_half_a_pid_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    assert processes.read_pid_file(path) is None
    for text in ("", '{"pid": 12, "sta', "[]", "{}"):
        path.write_text(text)
        assert processes.read_pid_file(path) is None


def test_a_process_that_listens_is_asked_only(ground: Ground) -> None:
    running = ground.launch(FOR_LONG)
    assert processes.stop([victim(running, grace_s=10)]) == []
    assert not processes.is_alive(running)


def test_a_deaf_process_is_killed_with_its_children(ground: Ground) -> None:
    running = ground.launch(DEAF)
    wait_until(lambda: ground.log() == "deaf")
    children = wait_until(lambda: psutil.Process(running.pid).children())
    assert processes.stop([victim(running, grace_s=0.1)]) == [running.pid]
    assert not processes.is_alive(running)
    assert not any(processes.start_mark(child.pid) for child in children)


def test_children_that_outlive_their_parent_are_killed(ground: Ground) -> None:
    running = ground.launch("sleep 600 & echo ready; wait")
    wait_until(lambda: ground.log() == "ready")
    (child,) = psutil.Process(running.pid).children()
    processes.stop([victim(running, grace_s=10)])
    assert processes.start_mark(child.pid) is None


def test_a_paused_process_can_be_stopped(ground: Ground) -> None:
    running = ground.launch(FOR_LONG)
    processes.send(running, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(running.pid).status() == psutil.STATUS_STOPPED)
    assert processes.stop([victim(running, grace_s=10)]) == []
    assert not processes.is_alive(running)


def test_a_process_whose_pid_file_was_lost_is_found_by_its_mark(ground: Ground) -> None:
    kept, lost = ground.launch(FOR_LONG, "kept"), ground.launch(FOR_LONG, "lost")
    assert processes.kill_strays(ground.folder, known=[kept.pid]) == [lost.pid]
    assert processes.is_alive(kept)
    assert not processes.is_alive(lost)


@pytest.mark.parametrize("look", ["_family", "strays"])
def test_a_child_that_is_born_while_strays_are_looked_for_is_spared(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    parent = ground.launch("until [ -e go ]; do sleep 0.01; done; sleep 600 & echo $! > child; wait")
    real = getattr(processes, look)

    def then_born(of: object) -> object:
        found = real(of)
        (ground.folder / "go").touch()
        wait_until((ground.folder / "child").read_text)
        return found

    monkeypatch.setattr(processes, look, then_born)
    processes.kill_strays(ground.folder, known=[parent.pid])
    child = int((ground.folder / "child").read_text())
    assert processes.start_mark(child) is not None
    assert processes.is_alive(parent)


def test_other_homes_are_not_touched(ground: Ground, tmp_path: Path) -> None:
    running = ground.launch(FOR_LONG)
    assert processes.kill_strays(tmp_path / "other") == []
    assert processes.is_alive(running)


def test_the_lock_is_held_until_the_pid_file_is_complete_even_when_the_starter_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it `down` could look for pid files between the start of a process and the writing of its file."""
    held_back = "until [ -e go ]; do sleep 0.01; done\n" + processes._LAUNCHER
    monkeypatch.setattr(processes, "_LAUNCHER", held_back)
    ground = Ground(tmp_path)
    fcntl.flock(ground.lock, fcntl.LOCK_EX)
    starter = threading.Thread(target=lambda: ground.launch("exit 0"))
    starter.start()
    wait_until(lambda: processes.strays(tmp_path))
    os.close(ground.lock)  # as if `up` had been killed
    other = os.open(tmp_path / "lock", os.O_RDWR)

    def lock() -> bool:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True

    with pytest.raises(BlockingIOError):
        lock()
    (tmp_path / "go").touch()
    starter.join(10)
    assert processes.read_pid_file(tmp_path / "part.json") == ground.started[0]
    wait_until(lock)
    os.close(other)
    processes.wait_for_exit(ground.started[0], timeout_s=5)


def test_a_log_that_grew_large_is_put_aside(ground: Ground) -> None:
    (ground.folder / "part.log").write_bytes(b"x" * 8_000_001)
    ground.launch("echo fresh")
    wait_until(lambda: ground.log() == "fresh")
    assert (ground.folder / "part.old.log").exists()
