"""A program that is started, watched while it reads the topic, and stopped."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.ledger.pace import Sample
from benchmarks.meters import cpu_seconds
from docs.demo.shell import ROOT

_PAUSE_S = 0.2
_READ_WITHIN_S = 600.0
_STOP_WITHIN_S = 15.0
_SHOWN_LINES = 15
_LOOKS = 5


class Failed(RuntimeError):
    """A contender ended or stood still before it had read the topic; the message has the end of its log."""


@asynccontextmanager
async def program(argv: Sequence[str], env: Mapping[str, str], log: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """The running program, which is asked to end afterwards, and killed when it does not."""
    process = await asyncio.to_thread(_start, argv, {**os.environ, **env}, log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start(argv: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(argv, env=env, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)


def faust_worker(app: str) -> list[str]:
    """The command that starts a Faust worker, as a user would."""
    return [str(Path(sys.executable).parent / "faust"), "-A", app, "worker", "-l", "info"]


async def watch(
    process: subprocess.Popen[bytes],
    position: Callable[[], Awaitable[int]],
    *,
    total: int,
    log: Path,
    servers: Mapping[str, int],
) -> list[Sample]:
    """Samples until the position is `total`. Raises Failed."""
    own = psutil.Process(process.pid)
    ends = time.monotonic() + _READ_WITHIN_S
    samples: list[Sample] = []
    while not samples or samples[-1].records < total:
        records = await position()
        if process.poll() is not None:
            raise Failed(f"exited {process.returncode} at {records} of {total} records\n{tail(log)}")
        times = own.cpu_times()
        cpu_s = {"own": times.user + times.system, "queued": queued_s(process.pid), **servers_cpu(servers)}
        samples.append(Sample(at_s=time.monotonic(), records=records, cpu_s=cpu_s))
        if time.monotonic() > ends:
            raise Failed(f"at {records} of {total} records after {_READ_WITHIN_S:.0f} s\n{tail(log)}")
        await asyncio.sleep(_PAUSE_S)
    return samples


def queued_s(pid: int) -> float:
    """Seconds that a process's threads could have run and had no core, where the system tells (Linux), else 0.

    Large where others keep the machine busy: what is measured then is the machine.
    """
    found = 0.0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has just ended
            found += int(file.read_text().split()[1]) / 1e9
    return found


def servers_cpu(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds of the servers. Postgres ends children as it likes, also between listing and looking."""
    for _ in range(_LOOKS):
        with suppress(psutil.NoSuchProcess):
            return cpu_seconds(pids)
    return cpu_seconds(pids)


def tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
