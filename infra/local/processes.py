"""Starting, recognising and stopping the stack's processes.
A process is known by its pid and start time: a pid that was given to a stranger meanwhile is never touched."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.local.part import Account, Command, PartError

HOME_MARK = "INFERLOG_HOME"
PART_MARK = "INFERLOG_PART"

_POLL_S = 0.01
_LOG_LIMIT_BYTES = 8_000_000

# The process writes its own pid file before it becomes the program. Its standard input is the stack's lock: the
# lock stays held until the file is complete, even when `up` is killed in between, so `down` always sees all files.
_LAUNCHER = """\
umask 077
if [ -r "/proc/$$/stat" ]; then
  read -r a b c d e f g h i j k l m n o p q r s t u started rest < "/proc/$$/stat"
else
  started=$(ps -o lstart= -p $$)
fi
printf '{"pid": %s, "started": "%s", %s}\\n' "$$" "$started" "$2" > "$1"
shift 2
exec "$@" < /dev/null
"""

# Our own children, kept so that they are reaped: without it they would stay in the process table as zombies.
_children: dict[int, subprocess.Popen[bytes]] = {}


@atexit.register
def _let_go() -> None:
    """Parts outlive the command that started them; without this Python would warn of each at exit."""
    for child in _children.values():
        if child.poll() is None:
            child.returncode = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What a pid file says: who was started, when, as what, and with which addresses (a digest)."""

    pid: int
    started: str
    command: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A process to stop: the signal that asks it, and how long it may take before it is killed."""

    running: Running
    ask: signal.Signals
    grace_s: float


def read_pid_file(path: Path) -> Running | None:
    """Return the file's content; None when there is no file or it is not complete (yet)."""
    try:
        raw = json.loads(path.read_text())
        return Running(
            pid=raw["pid"],
            started=raw["started"],
            command=tuple(raw["command"]),
            fingerprint=raw["fingerprint"],
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def start_mark(pid: int) -> str | None:
    """Return what tells this process from any other that had or will have its pid; None if it is not running."""
    child = _children.get(pid)
    if child is not None and child.poll() is not None:
        del _children[pid]
        return None
    stat = Path(f"/proc/{pid}/stat")
    try:
        if stat.parent.parent.joinpath("self").exists():
            fields = stat.read_text().rpartition(")")[2].split()
            return None if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        return None
    asked = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def is_alive(running: Running | None) -> bool:
    """Say whether this very process still runs (a zombie does not)."""
    return running is not None and start_mark(running.pid) == running.started.strip()


def launch(
    command: Command, *, pid_file: Path, log_file: Path, environ: dict[str, str], fingerprint: str, lock: int
) -> Running:
    """Start the command in its own session, detached from ours, and return once its pid file is complete.

    Raises PartError when the launcher itself fails. That the program works is for the caller to find out.
    """
    argv = command.argv if command.run_as is None else drop_to(command.run_as, command.argv)
    about = json.dumps({"command": command.argv, "fingerprint": fingerprint})[1:-1]
    pid_file.unlink(missing_ok=True)
    with _open_log(log_file) as log:
        child = subprocess.Popen(
            ["/bin/sh", "-c", _LAUNCHER, "inferlog-launch", str(pid_file), about, *argv],
            stdin=lock,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=command.cwd,
            env={**environ, **command.environ},
            start_new_session=True,
        )
    _children[child.pid] = child
    deadline = time.monotonic() + 10.0
    while (running := read_pid_file(pid_file)) is None or running.pid != child.pid:
        if child.poll() is not None or time.monotonic() > deadline:
            raise PartError(f"could not write {pid_file}: {log_tail(log_file, 5)}")
        time.sleep(_POLL_S)
    return running


def wait_for_exit(running: Running, *, timeout_s: float) -> int | None:
    """Wait for a process this interpreter started; return its exit status, None when the time is up."""
    child = _children.get(running.pid)
    if child is None:
        return None
    try:
        status = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    _children.pop(running.pid, None)
    return status


def stop(victims: Sequence[Victim]) -> list[int]:
    """Ask all these processes to end, wait for them together, then kill what is left of them and their children.

    Returns the pids that had to be killed. When it returns none of them runs.
    """
    living = [victim for victim in victims if is_alive(victim.running)]
    families = {victim.running.pid: _family(victim.running.pid) for victim in living}
    for victim in living:
        if victim.grace_s > 0:
            _signal(victim.running.pid, victim.ask)
            _signal(victim.running.pid, signal.SIGCONT)  # a paused process would not see the request
    began, killed = time.monotonic(), []
    while living:
        for victim in living:
            pid = victim.running.pid
            if time.monotonic() - began >= victim.grace_s and is_alive(victim.running) and pid not in killed:
                families[pid].update(_family(pid))
                killed.append(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        living = [victim for victim in living if is_alive(victim.running)]
        time.sleep(_POLL_S)
    _kill_all({process for family in families.values() for process in family})
    return killed


def strays(home: Path) -> list[psutil.Process]:
    """Return the processes that carry this home's mark in their environment, whether or not a pid file names them."""
    ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in ours:
            continue
        try:
            environ = process.environ()
        except (psutil.Error, OSError):
            continue  # gone, or somebody else's
        if environ.get(HOME_MARK) == str(home) and PART_MARK in environ:
            found.append(process)
    return found


def kill_strays(home: Path, *, known: Iterable[int] = ()) -> list[int]:
    """Kill the marked processes outside the families of `known` pids; return their pids."""
    # Before the families: a child that is born between the two looks would be in no family, and be killed.
    marked = strays(home)
    spared = set(known)
    for pid in tuple(spared):
        spared.update(process.pid for process in _family(pid))
    lost = {process for process in marked if process.pid not in spared}
    _kill_all(lost)
    return sorted(process.pid for process in lost)


def send(running: Running, signal_: signal.Signals) -> None:
    """Send a signal to the process and everything in its family."""
    for process in (psutil.Process(running.pid), *_family(running.pid)):
        _signal(process.pid, signal_)


def log_tail(path: Path, lines: int) -> str:
    """Return the last lines of a log, decoded leniently; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64_000))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def drop_to(account: Account, argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command that becomes this account and then executes the given one, an absolute path and arguments."""
    # Nothing may be imported after the change of account: Python's own files may be out of its reach, too.
    program = (
        "import os, sys; uid, gid = map(int, sys.argv[1:3]); "
        "os.setgroups([]); os.setgid(gid); os.setuid(uid); os.execv(sys.argv[3], sys.argv[3:])"
    )
    return (sys.executable, "-I", "-S", "-c", program, str(account.uid), str(account.gid), *argv)


def _family(pid: int) -> set[psutil.Process]:
    """Return the descendants and the members of the process group: a child may leave one, hardly both."""
    family: set[psutil.Process] = set()
    with contextlib.suppress(psutil.Error):
        family.update(psutil.Process(pid).children(recursive=True))
    for other in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            if other != pid and os.getpgid(other) == pid:
                family.add(psutil.Process(other))
    return family


def _kill_all(processes: Iterable[psutil.Process]) -> None:
    remaining = list(processes)
    for process in remaining:
        with contextlib.suppress(psutil.Error):
            process.kill()  # checks the start time first
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline and any(start_mark(p.pid) is not None and p.is_running() for p in remaining):
        time.sleep(_POLL_S)


def _signal(pid: int, signal_: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal_)


@contextlib.contextmanager
def _open_log(path: Path) -> Iterator[int]:
    if path.exists() and path.stat().st_size > _LOG_LIMIT_BYTES:
        path.replace(path.with_suffix(".old.log"))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
