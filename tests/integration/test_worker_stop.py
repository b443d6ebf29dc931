"""A worker told to stop, or one that crashed, ends: no thread of it holds the process, whatever it waits for."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.local.stack import Stack
from tests.conditions import wait_until
from tests.integration.worker_desk import WORKER, admitted, constant_bundle, open_desk, start_worker, store_bundle
from tests.processes import Process, free_port

Spawn = Callable[..., Process]

#: A download from a store that hangs gives up after 3 x 30 s; one that is waited for makes this too short.
PROMPTLY_S = 20.0

PLAIN_EXIT = "import os\nos._exit = lambda status: None"
CRASH_WHILE_DOWNLOADING = """
import os
from pathlib import Path
from gpu_worker.inbox import Inbox
take = Inbox.take
async def broken(self):
    if list(Path(os.environ["INFERLOG_WEIGHTS_DIR"]).glob(".incoming-*")):
        raise RuntimeError("broken on purpose")
    return await take(self)
Inbox.take = broken
"""


@pytest.fixture
def hanging_store(stack: Stack, env: dict[str, str]) -> Iterator[Callable[[], None]]:
    """Call it to freeze S3 until the test ends."""
    paused = []

    def pause() -> None:
        stack.pause_part("s3")
        paused.append(True)

    yield pause
    if paused:
        stack.resume_part("s3")


async def ask_for_a_new_version(env: dict[str, str], version: str) -> None:
    async with open_desk(env) as desk:
        await desk.submit([admitted(version, within_s=120)])


def download_begins(env: dict[str, str]) -> None:
    root = Path(env["INFERLOG_WEIGHTS_DIR"])
    wait_until(lambda: bool(list(root.glob(".incoming-*"))), what="a download under way")


async def test_a_worker_stops_while_a_download_hangs(
    env: dict[str, str], spawn: Spawn, tmp_path: Path, hanging_store: Callable[[], None]
) -> None:
    version = store_bundle(env, constant_bundle(tmp_path / "b", 1.0))
    worker = start_worker(spawn, env)
    hanging_store()
    await ask_for_a_new_version(env, version)
    download_begins(env)
    worker.terminate()
    assert worker.wait(PROMPTLY_S) == 0
    assert "worker stopped" in worker.log.read_text()


async def test_a_worker_that_crashes_while_a_download_hangs_ends_and_says_so(
    env: dict[str, str], spawn: Spawn, tmp_path: Path, hanging_store: Callable[[], None]
) -> None:
    version = store_bundle(env, constant_bundle(tmp_path / "b", 1.0))
    worker = start_worker(spawn, env, changed=CRASH_WHILE_DOWNLOADING)
    hanging_store()
    await ask_for_a_new_version(env, version)
    assert worker.wait(PROMPTLY_S) == 1
    assert "RuntimeError: broken on purpose" in worker.log.read_text()


async def test_with_a_plain_exit_it_would_wait_for_the_download(
    env: dict[str, str], spawn: Spawn, tmp_path: Path, hanging_store: Callable[[], None]
) -> None:
    version = store_bundle(env, constant_bundle(tmp_path / "b", 1.0))
    worker = start_worker(spawn, env, changed=PLAIN_EXIT)
    hanging_store()
    await ask_for_a_new_version(env, version)
    download_begins(env)
    worker.terminate()
    wait_until(lambda: "worker stopped" in worker.log.read_text(), what="the orderly close")
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(5)


def test_a_worker_stops_while_it_still_imports_what_it_needs_later(env: dict[str, str], spawn: Spawn) -> None:
    port = free_port()
    worker = spawn(WORKER, {**env, "INFERLOG_WORKER_PORT": str(port)}, name="worker")

    def alive() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2) as answer:
            return bool(answer.status == 200)

    wait_until(alive, timeout_s=60, what="alive")
    worker.terminate()
    assert worker.wait(PROMPTLY_S) == 0
