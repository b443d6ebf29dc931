"""Commands that change what is published take turns: one at a time per checkout, and nobody reads half a change.

The lock is on the folder itself and ends with the process, so that nothing is left behind by one that died.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_AGAIN_AFTER_S = 0.05


class Busy(RuntimeError):
    """Another command did not end within the time; the message says what to do."""


@contextmanager
def turn(folder: Path, *, shared: bool = False, within_s: float = 10.0) -> Iterator[None]:
    """Hold the folder while the block runs; with `shared` beside others who only read. Raises Busy."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ends_s = time.monotonic() + within_s
        while not _taken(handle, shared):
            if time.monotonic() >= ends_s:
                raise Busy(
                    f"{folder}: another  inferlog schemas  command has worked on it for {within_s:.0f} s; nothing was "
                    f"done. Wait until it ends (lsof {folder} shows it) and run this again"
                )
            time.sleep(_AGAIN_AFTER_S)
        yield
    finally:
        os.close(handle)


def _taken(handle: int, shared: bool) -> bool:
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
