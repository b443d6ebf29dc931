"""One part of the local stack as a value: how it starts, where it listens, and what proves that it works.
Each server module builds its own; the stack only starts, watches and stops them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Say = Callable[[str], None]
"""Takes one short line of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The unprivileged account that a server runs as when `up` runs as root."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to execute: arguments, folder, variables added to our own, and the account if not ours."""

    argv: tuple[str, ...]
    cwd: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    run_as: Account | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A process of the stack.

    `command` may do slow work first (fetch, unpack, write a configuration) and reports it through its argument.
    `probe` does one real operation and raises when it fails; it returns within a few seconds in any case.
    `fingerprint` changes when a running process must be restarted to see new addresses or credentials.
    `grace_s` is how long it may take to stop by itself before it is killed, which for some is the normal end.
    `leftovers` are files outside the home that it leaves behind.
    """

    name: str
    address: str
    ports: tuple[str, ...]
    fingerprint: str
    command: Callable[[Say], Command]
    probe: Callable[[], None]
    ready_within_s: float = 30.0
    stop_signal: signal.Signals = signal.SIGTERM
    grace_s: float = 8.0
    kill_is_normal: bool = False
    leftovers: tuple[Path, ...] = ()


class PartError(Exception):
    """A part cannot be started or does not work; the message says why and what to do."""
