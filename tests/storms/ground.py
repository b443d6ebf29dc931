"""Where a storm takes place: a stack of its own in a folder of its own, both gone afterwards."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from infra.local.stack import Stack
from infra.provision import provision
from infra.settings import OperatorSettings, operator_settings

Say = Callable[[str], None]

#: What PostgreSQL writes to its log for each deadlock that it resolves.
DEADLOCK = "deadlock detected"


@dataclass(slots=True)
class Timeline:
    """Says each line with the seconds since it began."""

    say: Say
    began: float = field(default_factory=time.monotonic)

    def __call__(self, line: str) -> None:
        self.say(f"{self.seconds:7.1f} s  {line}")

    def begin(self) -> None:
        """Count from now."""
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Running servers, provisioned; `env` reaches them, `logs` is the folder of all logs."""

    stack: Stack
    env: dict[str, str]
    settings: OperatorSettings
    logs: Path

    def deadlocks(self) -> int:
        """How many PostgreSQL has noted."""
        with (self.logs / "postgres.log").open(errors="replace") as log:
            return sum(DEADLOCK in line for line in log)


@asynccontextmanager
async def open_ground(home: Path) -> AsyncIterator[Ground]:
    """A stack in this folder; its processes end with the block, its files stay."""
    stack = Stack(home)
    clients = logging.getLogger("aiokafka")
    level = clients.level
    clients.setLevel(logging.CRITICAL)  # servers go away on purpose; complaints about it would hide the timeline
    try:
        env = {**await asyncio.to_thread(stack.up, services_only=True), "INFERLOG_HOME": str(home)}
        settings = operator_settings(env)
        await provision(settings)
        yield Ground(stack=stack, env=env, settings=settings, logs=home / "logs")
    finally:
        await asyncio.to_thread(stack.down)
        clients.setLevel(level)


def drawn(seed: int | None) -> int:
    """The seed that was given, or a new one."""
    return seed if seed is not None else int.from_bytes(os.urandom(4), "big")


def storm(run: Callable[[Path], Coroutine[Any, Any, dict[str, Any]]], *, keep: bool) -> dict[str, Any]:
    """The figures of a storm run in a new folder, which is removed unless it is to be kept or the storm has not held.

    SIGTERM and Ctrl-C end the processes that it started, too.
    """
    home = Path(tempfile.mkdtemp(prefix="inferlog-storm-"))
    remove = False
    told: list[int] = []
    try:
        figures = asyncio.run(_interruptible(run(home), told))
        remove = bool(figures["held"]) and not keep
    except asyncio.CancelledError:
        if not told:
            raise
        remove = not keep
        raise SystemExit(f"ended by {signal.Signals(told[0]).name} before the storm was over") from None
    finally:
        Stack(home).down(wipe=remove)  # again, should the storm have failed to
        if remove:
            shutil.rmtree(home)
        else:
            click.echo(f"logs and tables are kept in {home} (`inferlog down --wipe` there removes them)", err=True)
    return figures


async def _interruptible(work: Coroutine[Any, Any, dict[str, Any]], told: list[int]) -> dict[str, Any]:
    task = asyncio.ensure_future(work)

    def end(number: int) -> None:
        told.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    return await task
