"""Requests that were running when a device was lost. Its process can run nothing more, so the next one must know.

A suspect runs alone. One that then loses the device again is the one that does it, and fails; without this memory the
same batch would end each worker at its start. A device that is lost by itself costs its requests nothing but time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

log = logging.getLogger(__name__)

#: Some were run meanwhile by other workers, on other disks; the newest matter.
_MOST = 4096
#: Who holds the lock reads and writes one small file; only one that is frozen holds it for longer.
_LOCK_WITHIN_S = 1.0
_LOCK_POLL_S = 0.01


class Suspects:
    """Ids of such requests, in a file that the workers of one disk share; None keeps them in memory.

    It is read when made. A worker that reads it later than another writes it finds out for itself, once.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._ids = dict.fromkeys(self._read())

    def __contains__(self, request_id: UUID) -> bool:
        return request_id in self._ids

    def add(self, request_ids: Iterable[UUID]) -> None:
        """Remember these before the process ends. A disk that refuses is logged: it must not hide the lost device."""
        new = dict.fromkeys(request_ids)
        self._ids |= new
        # Not all that are known here: others may have cleared some of those.
        self._change(lambda kept: [*dict.fromkeys([*kept, *new])])

    def clear(self, request_ids: Iterable[UUID]) -> None:
        """These have ended, and the log says so. A disk that refuses is logged."""
        ended = {one for one in request_ids if one in self._ids}
        if ended:
            self._ids = {one: None for one in self._ids if one not in ended}
            self._change(lambda kept: [one for one in kept if one not in ended])

    def _read(self) -> list[UUID]:
        found = []
        try:
            lines = [] if self._path is None else self._path.read_text().split()
            found = [UUID(line) for line in lines]
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("suspects not read", extra={"fields": {"path": self._path, "reason": error}})
        return found

    def _change(self, change: Callable[[Sequence[UUID]], Sequence[UUID]]) -> None:
        """Replace what the file holds by what becomes of it, with no other worker's change in between."""
        if self._path is None:
            return
        try:
            # Its own file: the other is replaced, and a lock on it would be a lock on what it was.
            with _locked(self._path.with_name(f"{self._path.name}.lock")):
                incoming = self._path.with_name(f"{self._path.name}.{os.getpid()}")
                incoming.write_text("".join(f"{one}\n" for one in change(self._read())[-_MOST:]))
                incoming.replace(self._path)
        except OSError as error:
            log.error("suspects not kept", extra={"fields": {"path": self._path, "reason": error}})


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises TimeoutError, an OSError, when another process keeps the lock. The file stays, as any lock file must."""
    ends_s = time.monotonic() + _LOCK_WITHIN_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= ends_s:
                    raise TimeoutError(f"{path}: another process has held it for {_LOCK_WITHIN_S:.0f} s") from None
            time.sleep(_LOCK_POLL_S)
        yield
