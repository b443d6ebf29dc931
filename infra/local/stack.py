"""Starting, watching and stopping the local stack as a whole; every change holds the home's lock, so two never mix.
State: `stack.env` (addresses, credentials), `wanted` (part names), `pids/`, `logs/` and `data/`, all under the home."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from infra.local import addresses as address_book
from infra.local import kafka, postgres, processes, programs, seaweed, valkey
from infra.local.addresses import Addresses
from infra.local.part import Part, PartError, Say

SERVICES: tuple[Callable[[Path, Addresses], Part], ...] = (
    kafka.part,
    postgres.part,
    valkey.part,
    seaweed.part,
    programs.stripe,
)
PROGRAMS: tuple[Callable[[Path, Addresses], Part], ...] = (programs.api, programs.worker, programs.streams)

_PROBE_PAUSE_S = 0.1
_PROVISION_WITHIN_S = 60.0
_LOG_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus:
    """How one part is: `why` says what is wrong, empty when it is healthy."""

    name: str
    address: str
    pid: int | None
    healthy: bool
    why: str
    log: Path


class StackError(Exception):
    """`up` or a step of it failed. `failures` holds the reason per part, with the end of its log."""

    def __init__(self, failures: dict[str, str]) -> None:
        self.failures = failures
        super().__init__("\n\n".join(f"{name}: {why}" for name, why in failures.items()))


class Stack:
    """The local stack whose state lies in `home`. Every method may be called from any process, one at a time."""

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()

    def up(self, *, services_only: bool = False, progress: Say = lambda line: None) -> dict[str, str]:
        """Bring every part up and return the environment that reaches them. Parts that work are left alone.

        Raises StackError naming each part that did not become ready; the others are left running.
        """
        with self._locked(wait_s=300.0, progress=progress) as lock:
            addresses = self._settle_addresses(progress)
            self._want(services_only=services_only)
            self._bring_up([make(self.home, addresses) for make in SERVICES], addresses, lock, progress)
            if not services_only:
                self._provision(addresses, lock, progress)
                self._bring_up([make(self.home, addresses) for make in PROGRAMS], addresses, lock, progress)
            return addresses.environment()

    def down(self, *, deadline_s: float = 10.0, wipe: bool = False, progress: Say = lambda line: None) -> list[str]:
        """Stop every part, the project's processes before the servers; returns the names of those that had to be killed.

        Nothing of this home runs afterwards. `wipe` also removes the data; addresses and credentials stay.
        """
        with self._locked(wait_s=60.0, progress=progress):
            ends = time.monotonic() + deadline_s - 1.0  # the last second is for killing
            asks = {part.name: part.stop_signal for part in self._parts()}
            ours = [name for name in (programs.PROVISION, "streams", "worker", "api")]
            servers = [name for name in asks if name not in ours]
            killed = self._stop(ours, asks, deadline_s=0.45 * deadline_s, progress=progress)
            killed += self._stop(servers, asks, deadline_s=max(0.5, ends - time.monotonic()), progress=progress)
            lost = processes.kill_strays(self.home)
            if lost:
                progress(f"killed {len(lost)} stray processes")
            (self.home / "wanted").unlink(missing_ok=True)
            if wipe:
                postgres.wipe(self.home)
                for folder in ("data", "logs", "weights"):
                    shutil.rmtree(self.home / folder, ignore_errors=True)
                progress("removed data and logs")
            return killed

    def status(self) -> list[PartStatus]:
        """Do one real operation on every wanted part; takes at most a few seconds and changes nothing."""
        wanted = self._wanted()
        parts = [part for part in self._parts() if not wanted or part.name in wanted]
        with ThreadPoolExecutor(max(1, len(parts))) as pool:
            return list(pool.map(self._status, parts))

    def stop_part(self, name: str, *, kill: bool = False) -> None:
        """Stop one part: ask it and wait up to 10 s, or kill it and its children at once. Raises KeyError."""
        with self._locked(wait_s=60.0):
            part = self._part(name)
            running = processes.read_pid_file(self._pid_file(name))
            if running is not None:
                processes.stop([(running, part.stop_signal)], deadline_s=0.0 if kill else 10.0)
            self._pid_file(name).unlink(missing_ok=True)

    def start_part(self, name: str) -> None:
        """Start one part on its former port with its data and wait until it is ready. Raises KeyError, StackError."""
        with self._locked(wait_s=60.0) as lock:
            self._bring_up([self._part(name)], self._addresses(), lock, lambda line: None)

    def pause_part(self, name: str) -> None:
        """Freeze one part: it keeps its connections and answers nothing. Raises KeyError, PartError."""
        processes.send(self._running(name), signal.SIGSTOP)

    def resume_part(self, name: str) -> None:
        """Let a frozen part go on. Raises KeyError, PartError."""
        processes.send(self._running(name), signal.SIGCONT)

    def log_file(self, name: str) -> Path:
        """Return where the part's output goes."""
        return self.home / "logs" / f"{name}.log"

    def _bring_up(self, parts: Sequence[Part], addresses: Addresses, lock: int, progress: Say) -> None:
        failures: dict[str, str] = {}

        def bring_up(part: Part) -> None:
            try:
                self._ensure(part, addresses, lock, lambda line: progress(f"{part.name:<10}{line}"))
            except PartError as error:
                failures[part.name] = str(error)
                progress(f"{part.name:<10}failed")

        with ThreadPoolExecutor(max(1, len(parts))) as pool:
            list(pool.map(bring_up, parts))
        if failures:
            raise StackError(failures)

    def _ensure(self, part: Part, addresses: Addresses, lock: int, say: Say) -> None:
        began = time.monotonic()
        running = processes.read_pid_file(self._pid_file(part.name))
        if running is not None and processes.is_alive(running):
            reason = "its addresses changed"
            if running.fingerprint == part.fingerprint:
                try:
                    part.probe()
                except Exception as error:
                    reason = f"it does not work ({_short(error)})"
                else:
                    say(f"runs already (pid {running.pid})")
                    return
            say(f"restarting: {reason}")
            processes.stop([(running, part.stop_signal)], deadline_s=8.0)
        elif running is not None:
            say("restarting: its process is gone")
        else:
            say("starting")
        running = processes.launch(
            part.command(say),
            pid_file=self._pid_file(part.name),
            log_file=self.log_file(part.name),
            environ=self._environ(part.name, addresses),
            fingerprint=part.fingerprint,
            lock=lock,
        )
        self._wait_until_ready(part, running)
        say(f"ready after {time.monotonic() - began:.1f} s (pid {running.pid})")

    def _wait_until_ready(self, part: Part, running: processes.Running) -> None:
        deadline = time.monotonic() + part.ready_within_s
        while True:
            try:
                part.probe()
            except Exception as error:
                reason = _short(error)
            else:
                return
            if not processes.is_alive(running):
                raise PartError(self._with_log(part.name, f"its process ended ({reason})"))
            if time.monotonic() > deadline:
                late = f"not ready within {part.ready_within_s:.0f} s ({reason})"
                raise PartError(self._with_log(part.name, late))
            time.sleep(_PROBE_PAUSE_S)

    def _provision(self, addresses: Addresses, lock: int, progress: Say) -> None:
        name, began = programs.PROVISION, time.monotonic()
        progress(f"{name:<10}creating topics, tables and the bucket")
        running = processes.launch(
            programs.provision(),
            pid_file=self._pid_file(name),
            log_file=self.log_file(name),
            environ=self._environ(name, addresses),
            fingerprint="",
            lock=lock,
        )
        status = processes.wait_for_exit(running, timeout_s=_PROVISION_WITHIN_S)
        if status is None:
            processes.stop([(running, signal.SIGTERM)], deadline_s=2.0)
        self._pid_file(name).unlink(missing_ok=True)
        if status != 0:
            why = f"not done within {_PROVISION_WITHIN_S:.0f} s" if status is None else f"ended with status {status}"
            raise StackError({name: self._with_log(name, why)})
        progress(f"{name:<10}done after {time.monotonic() - began:.1f} s")

    def _stop(self, names: Sequence[str], asks: dict[str, signal.Signals], *, deadline_s: float, progress: Say) -> list[str]:
        found = {name: processes.read_pid_file(self._pid_file(name)) for name in names}
        running = {name: it for name, it in found.items() if it is not None and processes.is_alive(it)}
        if running:
            progress(f"stopping {', '.join(running)}")
        victims = [(it, asks.get(name, signal.SIGTERM)) for name, it in running.items()]
        killed = processes.stop(victims, deadline_s=deadline_s)
        for name in names:
            self._pid_file(name).unlink(missing_ok=True)
        return [name for name, it in running.items() if it.pid in killed]

    def _status(self, part: Part) -> PartStatus:
        running = processes.read_pid_file(self._pid_file(part.name))
        alive = processes.is_alive(running)
        why = "" if alive else ("not started" if running is None else f"its process {running.pid} is gone")
        if alive:
            try:
                part.probe()
            except Exception as error:
                why = _short(error)
        return PartStatus(
            name=part.name,
            address=part.address,
            pid=running.pid if alive and running is not None else None,
            healthy=not why,
            why=why,
            log=self.log_file(part.name),
        )

    def _settle_addresses(self, progress: Say) -> Addresses:
        known = [processes.read_pid_file(path) for path in self.home.joinpath("pids").glob("*.json")]
        alive = [it.pid for it in known if it is not None and processes.is_alive(it)]
        # A server whose pid file was lost still holds its port and its data: two on one folder would ruin it.
        lost = processes.kill_strays(self.home, known=alive)
        if lost:
            progress(f"killed {len(lost)} stray processes of an earlier start")
        found = address_book.load(self.home)
        addresses = found or address_book.complete({}, choose_port=address_book.free_port)
        for make in (*SERVICES, *PROGRAMS):
            part = make(self.home, addresses)
            if processes.is_alive(processes.read_pid_file(self._pid_file(part.name))):
                continue
            taken = [port for port in part.ports if not address_book.is_free(addresses.ports[port])]
            for port in taken:
                progress(f"{part.name:<10}port {addresses.ports[port]} is taken by another program; choosing another")
            addresses = address_book.with_new_ports(addresses, taken)
        if addresses != found:
            address_book.save(self.home, addresses)
        return addresses

    def _addresses(self) -> Addresses:
        addresses = address_book.load(self.home)
        if addresses is None:
            raise StackError({"stack": f"nothing was started at {self.home} yet; run `inferlog up` first"})
        return addresses

    def _parts(self) -> list[Part]:
        addresses = address_book.load(self.home)
        return [make(self.home, addresses) for make in (*SERVICES, *PROGRAMS)] if addresses else []

    def _part(self, name: str) -> Part:
        self._addresses()
        parts = {part.name: part for part in self._parts()}
        if name not in parts:
            raise KeyError(f"no part {name!r}; there are {', '.join(parts)}")
        return parts[name]

    def _running(self, name: str) -> processes.Running:
        self._part(name)
        running = processes.read_pid_file(self._pid_file(name))
        if running is None or not processes.is_alive(running):
            raise PartError(f"{name} does not run")
        return running

    def _environ(self, name: str, addresses: Addresses) -> dict[str, str]:
        # The last two are the mark by which `down` finds even processes whose pid file was lost.
        marks = {"INFERLOG_HOME": str(self.home), "INFERLOG_PART": name}
        return {**os.environ, **addresses.environment(), **marks, "PYTHONUNBUFFERED": "1"}

    def _want(self, *, services_only: bool) -> None:
        addresses = self._addresses()
        makers = SERVICES if services_only else (*SERVICES, *PROGRAMS)
        names = {make(self.home, addresses).name for make in makers} | self._wanted()
        (self.home / "wanted").write_text("".join(f"{name}\n" for name in sorted(names)))

    def _wanted(self) -> set[str]:
        try:
            return set((self.home / "wanted").read_text().split())
        except FileNotFoundError:
            return set()

    def _pid_file(self, name: str) -> Path:
        return self.home / "pids" / f"{name}.json"

    def _with_log(self, name: str, why: str) -> str:
        log = self.log_file(name)
        tail = processes.log_tail(log, _LOG_LINES) or "(it wrote nothing)"
        return f"{why}\n--- last lines of {log}\n{tail}"

    @contextlib.contextmanager
    def _locked(self, *, wait_s: float, progress: Say = lambda line: None) -> Iterator[int]:
        # Others may pass through but not list: the database server may run as another account.
        for folder, mode in ((self.home, 0o711), (self.home / "data", 0o711), (self.home / "pids", 0o700), (self.home / "logs", 0o700)):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(mode)
        descriptor = os.open(self.home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline, told = time.monotonic() + wait_s, False
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    holder = os.pread(descriptor, 20, 0).decode() or "unknown"
                    if time.monotonic() > deadline:
                        raise StackError({"stack": f"process {holder} still works on {self.home}; try again"}) from None
                    if not told:
                        progress(f"waiting for process {holder}, which is working on {self.home}")
                        told = True
                    time.sleep(0.05)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)


def _short(error: BaseException) -> str:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first if isinstance(error, PartError) else f"{type(error).__name__}: {first}"
