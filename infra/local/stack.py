"""Starting, watching and stopping the local stack as a whole, from any process and also after one was killed.
Every change holds the home's lock; what runs is read from pid files that the processes write themselves."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infra.local import addresses as address_book
from infra.local import kafka, postgres, processes, programs, seaweed, valkey
from infra.local.addresses import Addresses
from infra.local.home import Home
from infra.local.part import Part, PartError, Say
from infra.local.watch import PartStatus, status_of, wait_until_ready, with_log

__all__ = ["PROGRAMS", "SERVICES", "PartStatus", "Stack", "StackError"]

Maker = Callable[[Path, Addresses], Part]
SERVICES: tuple[Maker, ...] = (kafka.part, postgres.part, valkey.part, seaweed.part, programs.stripe)
PROGRAMS: tuple[Maker, ...] = (programs.api, programs.worker, programs.streams)

_PROVISION_WITHIN_S = 60.0
_PROVISION_DRIFT = 3  # its exit status when something exists otherwise than declared
_KILL_RESERVE_S = 1.0


class StackError(Exception):
    """One or more parts did not start. `failures` holds the reason per part, with the end of its log."""

    def __init__(self, failures: dict[str, str]) -> None:
        self.failures = failures
        super().__init__("\n\n".join(f"{name}: {why}" for name, why in failures.items()))


def _silent(line: str) -> None:
    pass


class Stack:
    """The local stack whose state lies in `home`. Callers in any number of processes take turns."""

    def __init__(self, home: Path) -> None:
        self._home = Home(folder=home.absolute())
        self._given_up = threading.Event()

    @property
    def home(self) -> Path:
        """The folder that holds the stack's state."""
        return self._home.folder

    def up(self, *, services_only: bool = False, progress: Say = _silent) -> dict[str, str]:
        """Bring every part up and return the settings that reach them. Parts that work are left alone.

        Raises StackError naming each part that did not become ready; the others are left running.
        """
        with self._home.locked(wait_s=300.0, progress=progress) as lock:
            addresses = self._settle_addresses(progress)
            services = [make(self.home, addresses) for make in SERVICES]
            ours = [] if services_only else [make(self.home, addresses) for make in PROGRAMS]
            self._home.want(self._home.wanted() | {part.name for part in (*services, *ours)})
            self._bring_up(services, addresses, lock, progress)
            if not services_only:
                self._provision(addresses, lock, progress)
                self._bring_up(ours, addresses, lock, progress)
            return addresses.environment()

    def down(self, *, deadline_s: float = 10.0, wipe: bool = False, progress: Say = _silent) -> list[str]:
        """Stop every part, our processes before the servers; returns the names of those that had to be forced.

        Nothing of this home runs afterwards. `wipe` also removes data and logs; addresses and credentials stay.
        """
        with self._home.locked(wait_s=60.0, progress=progress):
            ends = time.monotonic() + deadline_s - _KILL_RESERVE_S
            parts = {part.name: part for part in self._parts()}
            ours = [name for name in parts if name in ("streams", "worker", "api")] + [programs.PROVISION]
            servers = [name for name in parts if name not in ours]
            killed = self._stop(ours, parts, deadline_s=0.4 * deadline_s, progress=progress)
            killed += self._stop(servers, parts, deadline_s=max(0.5, ends - time.monotonic()), progress=progress)
            lost = processes.kill_strays(self.home)
            if lost:
                progress(f"killed {len(lost)} stray processes")
            self._home.want([])
            if wipe:
                postgres.wipe(self.home)
                for folder in ("data", "logs", "weights", "streams"):
                    shutil.rmtree(self.home / folder, ignore_errors=True)
                progress("removed data and logs")
            return killed

    def status(self) -> list[PartStatus]:
        """Do one real operation on every wanted part; takes at most a few seconds and changes nothing."""
        wanted = self._home.wanted()
        parts = [part for part in self._parts() if not wanted or part.name in wanted]
        with ThreadPoolExecutor(max(1, len(parts))) as pool:
            return list(pool.map(lambda part: status_of(part, self._home), parts))

    def stop_part(self, name: str, *, kill: bool = False) -> None:
        """Stop one part: ask it and wait up to 10 s, or kill it and its children at once. Raises KeyError."""
        with self._home.locked(wait_s=60.0):
            part = self._part(name)
            self._stop([name], {name: part}, deadline_s=0.0 if kill else 10.0, progress=_silent)

    def start_part(self, name: str) -> None:
        """Start one part on its former port with its data and wait until it is ready. Raises KeyError, StackError."""
        with self._home.locked(wait_s=60.0) as lock:
            part = self._part(name)
            addresses = address_book.load(self.home)
            assert addresses is not None  # `_part` found the part in them  # noqa: S101
            self._bring_up([part], addresses, lock, _silent)

    def pause_part(self, name: str) -> None:
        """Freeze one part: it keeps its connections and answers nothing. Raises KeyError, PartError."""
        processes.send(self._running(name), signal.SIGSTOP)

    def resume_part(self, name: str) -> None:
        """Let a frozen part go on. Raises KeyError, PartError."""
        processes.send(self._running(name), signal.SIGCONT)

    def _bring_up(self, parts: Sequence[Part], addresses: Addresses, lock: int, progress: Say) -> None:
        failures: dict[str, str] = {}
        turn = threading.Lock()

        def tell(line: str) -> None:
            with turn:  # whole lines only: the parts report from threads
                progress(line)

        def bring_up(part: Part) -> None:
            say = _prefixed(part.name, tell)
            try:
                self._ensure(part, addresses, lock, say)
            except (PartError, OSError) as error:
                failures[part.name] = str(error)
                say("failed")

        self._given_up.clear()
        with ThreadPoolExecutor(max(1, len(parts))) as pool:
            try:
                list(pool.map(bring_up, parts))
            except BaseException:
                self._given_up.set()  # Ctrl-C: do not wait for the other parts' deadlines
                raise
        if failures:
            raise StackError(failures)

    def _ensure(self, part: Part, addresses: Addresses, lock: int, say: Say) -> None:
        began = time.monotonic()
        running = self._noted(part.name)
        if running is None:
            say("starting")
        elif not processes.is_alive(running):
            say("starting again: its process is gone")
        else:
            reason = self._why_not_left(part, running, say)
            if not reason:
                return
            say(f"restarting: {reason}")
            self._stop([part.name], {part.name: part}, deadline_s=8.0, progress=_silent)
        running = processes.launch(
            part.command(say),
            pid_file=self._home.pid_file(part.name),
            log_file=self._home.log_file(part.name),
            environ=self._environ(part.name, addresses),
            fingerprint=part.fingerprint,
            lock=lock,
        )
        deadline = time.monotonic() + part.ready_within_s
        wait_until_ready(part, running, self._home, deadline=deadline, given_up=self._given_up)
        say(f"ready after {time.monotonic() - began:.1f} s (pid {running.pid})")

    def _why_not_left(self, part: Part, running: processes.Running, say: Say) -> str:
        """Return why a living part cannot be left as it is; empty when it works."""
        if running.fingerprint != part.fingerprint:
            return "its addresses changed"
        # An earlier `up` may have been killed while the part was still starting: it gets the rest of its time.
        age_s = max(0.0, time.time() - self._home.pid_file(part.name).stat().st_mtime)
        deadline = time.monotonic() + part.ready_within_s - age_s
        try:
            wait_until_ready(part, running, self._home, deadline=deadline, given_up=self._given_up)
        except PartError as error:
            return f"it does not work ({str(error).splitlines()[0]})"
        say(f"runs already (pid {running.pid})")
        return ""

    def _provision(self, addresses: Addresses, lock: int, progress: Say) -> None:
        name, began = programs.PROVISION, time.monotonic()
        say = _prefixed(name, progress)
        say("creating topics, tables and the bucket")
        running = processes.launch(
            programs.provision(),
            pid_file=self._home.pid_file(name),
            log_file=self._home.log_file(name),
            environ=self._environ(name, addresses),
            fingerprint="",
            lock=lock,
        )
        status = processes.wait_for_exit(running, timeout_s=_PROVISION_WITHIN_S)
        self._stop([name], {}, deadline_s=2.0, progress=_silent)
        if status == _PROVISION_DRIFT:
            say(f"found differences from what is declared; see {self._home.log_file(name)}")
        elif status != 0:
            why = f"not done within {_PROVISION_WITHIN_S:.0f} s" if status is None else f"ended with status {status}"
            raise StackError({name: with_log(name, self._home, why)})
        say(f"done after {time.monotonic() - began:.1f} s")

    def _stop(self, names: Sequence[str], parts: dict[str, Part], *, deadline_s: float, progress: Say) -> list[str]:
        victims = {}
        for name in names:
            running = self._noted(name)
            if running is not None and processes.is_alive(running):
                part = parts.get(name)
                victims[name] = processes.Victim(
                    running=running,
                    ask=part.stop_signal if part else signal.SIGTERM,
                    grace_s=min(deadline_s, part.grace_s) if part else deadline_s,
                )
        if victims:
            progress(f"stopping {', '.join(victims)}")
        killed = processes.stop(list(victims.values()))
        for name in names:
            self._home.pid_file(name).unlink(missing_ok=True)
            for leftover in parts[name].leftovers if name in parts else ():
                leftover.unlink(missing_ok=True)
        forced = (name for name, victim in victims.items() if victim.running.pid in killed)
        return [name for name in forced if name not in parts or not parts[name].kill_is_normal]

    def _settle_addresses(self, progress: Say) -> Addresses:
        known = [processes.read_pid_file(path) for path in self._home.pid_files()]
        alive = [running.pid for running in known if running is not None and processes.is_alive(running)]
        # A server whose pid file was lost still holds its port and its data: two on one folder would ruin it.
        lost = processes.kill_strays(self.home, known=alive)
        if lost:
            progress(f"killed {len(lost)} stray processes of an earlier start")
        found = address_book.load(self.home)
        addresses = found or address_book.complete({}, choose_port=address_book.free_port)
        for make in (*SERVICES, *PROGRAMS):
            part = make(self.home, addresses)
            if processes.is_alive(self._noted(part.name)):
                continue
            taken = [port for port in part.ports if not address_book.is_free(addresses.ports[port])]
            for port in taken:
                say = _prefixed(part.name, progress)
                say(f"port {addresses.ports[port]} is taken by another program; choosing another")
            addresses = address_book.with_new_ports(addresses, taken)
        if addresses != found:
            address_book.save(self.home, addresses)
        return addresses

    def _parts(self) -> list[Part]:
        addresses = address_book.load(self.home)
        return [make(self.home, addresses) for make in (*SERVICES, *PROGRAMS)] if addresses else []

    def _part(self, name: str) -> Part:
        parts = {part.name: part for part in self._parts()}
        if name not in parts:
            raise KeyError(f"no part {name!r} at {self.home}; there are: {', '.join(parts) or 'none, run up first'}")
        return parts[name]

    def _noted(self, name: str) -> processes.Running | None:
        return processes.read_pid_file(self._home.pid_file(name))

    def _running(self, name: str) -> processes.Running:
        running = self._noted(self._part(name).name)
        if running is None or not processes.is_alive(running):
            raise PartError(f"{name} does not run")
        return running

    def _environ(self, name: str, addresses: Addresses) -> dict[str, str]:
        # Home and part are the mark by which `down` finds even processes whose pid file was lost.
        marks = {processes.HOME_MARK: str(self.home), processes.PART_MARK: name}
        return {**os.environ, **addresses.environment(), **marks, "PYTHONUNBUFFERED": "1"}


def _prefixed(name: str, progress: Say) -> Say:
    return lambda line: progress(f"{name:<10}{line}")
