"""What is remembered of a lost device outlives the process, and a broken file costs no more than the memory."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from gpu_worker import suspects as module
from gpu_worker.suspects import _MOST, Suspects
from tests.conditions import wait_until


def test_suspects_outlive_their_process_until_they_end(tmp_path: Path) -> None:
    path, ids = tmp_path / "suspects", [uuid4() for _ in range(3)]
    Suspects(path).add(ids[:2])
    second = Suspects(path)
    assert [one in second for one in ids] == [True, True, False]
    Suspects(path).add(ids[2:])
    second.clear(ids[:1])
    second.clear([uuid4()])
    assert [one in Suspects(path) for one in ids] == [False, True, True], "another process's are kept"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["suspects", "suspects.lock"]


def test_the_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    path, ids = tmp_path / "suspects", [uuid4() for _ in range(_MOST + 5)]
    Suspects(path).add(ids)
    found = Suspects(path)
    assert ids[-1] in found and ids[0] not in found


@pytest.mark.parametrize("content", [b"not an id\n", b"\xff\xfe", None])
def test_a_file_that_cannot_be_used_is_said_and_survived(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    path, one = tmp_path / "suspects", uuid4()
    path.mkdir() if content is None else path.write_bytes(content)
    suspects = Suspects(path)
    assert "suspects not read" in caplog.text
    suspects.add([one])
    assert one in suspects
    assert ("suspects not kept" in caplog.text) == (content is None)


@pytest.mark.parametrize("slow", ["add", "clear"])
def test_workers_that_lose_devices_together_forget_nothing_of_each_other(
    tmp_path: Path, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is held between reading the file and replacing it; the second must not change it meanwhile."""
    path, (old, one, other) = tmp_path / "suspects", (uuid4() for _ in range(3))
    Suspects(path).add([old])
    first, second = Suspects(path), Suspects(path)
    reading, waits, go = threading.Event(), threading.Event(), threading.Event()
    read, pause = Suspects._read, module.time.sleep

    def held(suspects: Suspects) -> list[Any]:
        found = read(suspects)
        if suspects is first:
            reading.set()
            assert go.wait(30)
        return found

    def sleep(seconds: float) -> None:
        waits.set()
        pause(seconds)

    monkeypatch.setattr(Suspects, "_read", held)
    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr(module, "_LOCK_WITHIN_S", 60.0)
    slowly: Callable[[], None] = (lambda: first.add([one])) if slow == "add" else (lambda: first.clear([old]))
    threads = [threading.Thread(target=slowly), threading.Thread(target=lambda: second.add([other]))]
    threads[0].start()
    assert reading.wait(30)
    threads[1].start()
    wait_until(lambda: waits.is_set() or not threads[1].is_alive())
    go.set()
    for thread in threads:
        thread.join(30)
    kept = Suspects(path)
    assert other in kept
    assert (one in kept) if slow == "add" else (old not in kept)


def test_a_lock_that_nobody_lets_go_of_costs_the_memory_and_not_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_LOCK_WITHIN_S", 0.05)
    path, one = tmp_path / "suspects", uuid4()
    with (tmp_path / "suspects.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        suspects = Suspects(path)
        suspects.add([one])
    assert one in suspects
    assert "suspects not kept" in caplog.text
    assert not path.exists()
