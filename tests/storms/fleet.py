"""Ledger workers as an operator's supervisor keeps them: what ended is started again, what will not stop is killed.

Each place in the fleet has its own way of reading and its own batch size, so that both modes share the group.
"""

from __future__ import annotations

import json
import random
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.processes import Process, free_port

Say = Callable[[str], None]

#: Settings of the places, in turn: 1000 at once, the plain loop, small batches, the loop with middling ones.
RECIPES: tuple[Mapping[str, str], ...] = (
    {"INFERLOG_LEDGER_MODE": "agent"},
    {"INFERLOG_LEDGER_MODE": "loop"},
    {"INFERLOG_LEDGER_MODE": "agent", "INFERLOG_LEDGER_BATCH": "100"},
    {"INFERLOG_LEDGER_MODE": "loop", "INFERLOG_LEDGER_BATCH": "300"},
)
_SETTINGS = {
    "INFERLOG_LEDGER_SESSION_S": "2",
    "INFERLOG_LEDGER_STALL_S": "60",
    "INFERLOG_LEDGER_FUTURE_S": "86400",
}
_PAUSE_S = 0.5
#: A worker that was asked to end and has not after this long is killed, and counted as overdue.
GRACE_S = 30.0
_EXCEPTION = re.compile(r"[A-Za-z_.]+: \S")


@dataclass(slots=True, kw_only=True)
class Place:
    """One worker and those that come after it. `asked_s`: when it was told to end; `leaving`: nobody comes after it."""

    number: int
    process: Process | None = None
    port: int = 0
    start_s: float = 0.0
    asked_s: float | None = None
    killed: bool = False
    leaving: bool = False

    @property
    def alive(self) -> Process | None:
        """Its process, while that runs and was neither killed nor told to end."""
        p = self.process
        return p if p is not None and p.returncode is None and self.asked_s is None and not self.killed else None


class Fleet:
    """`env` reaches the servers. `keep` is what supervises: call it often."""

    def __init__(self, env: Mapping[str, str], logs: Path, say: Say, *, size: int, app: str) -> None:
        self._env = {**env, **_SETTINGS}
        self._logs = logs
        self._say = say
        self._app = app
        self._places: list[Place] = []
        self._numbers = 0
        self.starts = 0
        self.overdue = 0
        self.slowest_stop_s = 0.0
        self.ends: Counter[str] = Counter()
        for _ in range(size):
            self.join()

    @property
    def size(self) -> int:
        """Workers that ought to run."""
        return sum(not place.leaving for place in self._places)

    @property
    def running(self) -> int:
        """Workers that do."""
        return sum(place.alive is not None for place in self._places)

    def reading(self) -> bool:
        """Whether every one is ready and has partitions to read. Raises OSError for one that does not answer so."""
        for place in self._places:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{place.port}/readyz", timeout=2) as answer:
                    partitions = json.load(answer)["partitions"]
            except urllib.error.HTTPError as error:
                with error:
                    raise OSError(f"worker {place.number}: {error.code} {error.read()[:300]!r}") from None
            if not partitions:
                raise OSError(f"worker {place.number} has no partitions")
        return True

    def join(self) -> None:
        """One more from now on."""
        self._places.append(Place(number=self._numbers))
        self._numbers += 1

    def kill(self, rng: random.Random) -> bool:
        """SIGKILL to one that runs; False when none does."""
        place = self._any(rng)
        if place is None or place.process is None:
            return False
        place.killed = True
        place.process.kill()
        return True

    def stop(self, rng: random.Random, *, leave: bool = False) -> bool:
        """SIGTERM to one that runs, which does not come back when it is to leave; False when none runs."""
        place = self._any(rng)
        if place is None or place.process is None:
            return False
        place.asked_s, place.leaving = time.monotonic(), leave
        place.process.terminate()
        return True

    def _any(self, rng: random.Random) -> Place | None:
        alive = [place for place in self._places if place.alive is not None]
        return rng.choice(alive) if alive else None

    def keep(self) -> None:
        """Note what ended, start what is missing, kill what is overdue."""
        now = time.monotonic()
        for place in self._places:
            if place.process is not None and place.process.returncode is not None:
                self._note_end(place, now)
            elif place.asked_s is not None and now - place.asked_s > GRACE_S and place.process is not None:
                self._say(f"worker {place.number} has not ended within {GRACE_S:g} s of SIGTERM: killed")
                self.overdue += 1
                place.process.kill()
        self._places = [place for place in self._places if not (place.leaving and place.process is None)]
        for place in self._places:
            if place.process is None and now >= place.start_s:
                self._start(place)

    def _note_end(self, place: Place, now: float) -> None:
        process, place.process = place.process, None
        if process is None:
            return
        self.ends[str(process.returncode)] += 1
        if place.asked_s is not None:
            self.slowest_stop_s = max(self.slowest_stop_s, now - place.asked_s)
        elif not place.killed:
            self._say(f"worker {place.number} ended by itself with {process.returncode}: {_reason(process)}")
        place.asked_s, place.killed, place.start_s = None, False, now + _PAUSE_S

    def _start(self, place: Place) -> None:
        self.starts += 1
        recipe = RECIPES[place.number % len(RECIPES)]
        place.port = free_port()
        env = {**self._env, **recipe, "INFERLOG_STREAMS_PORT": str(place.port)}
        command = ["faust", "-A", self._app, "worker", "-l", "info"]
        place.process = Process(command, env, self._logs / f"worker-{place.number}.log")

    def end(self) -> None:
        """All of them, at once."""
        for place in self._places:
            if place.process is not None:
                place.process.end()


def _reason(process: Process) -> str:
    """What its log says last of why: the end of a traceback, else its last line."""
    lines = process.tail(300).splitlines()
    told = [line for line in lines if _EXCEPTION.match(line)]
    return (told or lines or ["its log is empty"])[-1].strip()[:400]
