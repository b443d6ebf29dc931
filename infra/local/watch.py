"""Finding out whether a part works: once for `status`, or again and again until it is ready or its time is up.
The answer is always a reason a person can act on, with the end of the part's log where that helps."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from infra.local import processes
from infra.local.home import Home
from infra.local.part import Part, PartError

_PROBE_PAUSE_S = 0.1
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


def status_of(part: Part, home: Home) -> PartStatus:
    """Do one real operation on the part and say how it is; takes a few seconds at most."""
    running = processes.read_pid_file(home.pid_file(part.name))
    pid, why = None, "not started"
    if running is not None and processes.is_alive(running):
        pid, why = running.pid, _fault(part)
    elif running is not None:
        why = f"its process {running.pid} is gone"
    log = home.log_file(part.name)
    return PartStatus(name=part.name, address=part.address, pid=pid, healthy=not why, why=why, log=log)


def wait_until_ready(
    part: Part, running: processes.Running, home: Home, *, deadline: float, given_up: threading.Event
) -> None:
    """Return once a real operation succeeded. Raises PartError with the end of the log when the process ended,
    the deadline (monotonic seconds) passed, or somebody set `given_up`."""
    while reason := _fault(part):
        if not processes.is_alive(running):
            raise PartError(with_log(part.name, home, f"its process ended ({reason})"))
        if time.monotonic() > deadline:
            raise PartError(with_log(part.name, home, f"not ready in time ({reason})"))
        if given_up.wait(_PROBE_PAUSE_S):
            raise PartError("interrupted")


def with_log(name: str, home: Home, why: str) -> str:
    """Return the reason followed by where the part's log lies and its last lines."""
    log = home.log_file(name)
    tail = processes.log_tail(log, _LOG_LINES) or "(it wrote nothing)"
    return f"{why}\n--- last lines of {log}\n{tail}"


def _fault(part: Part) -> str:
    try:
        part.probe()
    except Exception as error:  # noqa: BLE001 (whatever a client library raises means that the part does not work)
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return line if isinstance(error, PartError) else f"{type(error).__name__}: {line}"
    return ""
