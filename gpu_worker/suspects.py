"""Requests that were running when a device was lost. Its process can run nothing more, so the next one must know.

A suspect runs alone. One that then loses the device again is the one that does it, and fails; without this memory the
same batch would end each worker at its start. A device that is lost by itself costs its requests nothing but time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from uuid import UUID

log = logging.getLogger(__name__)

#: Some were run meanwhile by other workers, on other disks; the newest matter.
_MOST = 4096


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
        self._ids |= dict.fromkeys(request_ids)
        self._write(dict.fromkeys([*self._read(), *self._ids]))

    def clear(self, request_id: UUID) -> None:
        """This one has ended."""
        if request_id in self._ids:
            del self._ids[request_id]
            self._write({one: None for one in self._read() if one != request_id})

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

    def _write(self, ids: dict[UUID, None]) -> None:
        if self._path is None:
            return
        try:
            incoming = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            incoming.write_text("".join(f"{one}\n" for one in list(ids)[-_MOST:]))
            incoming.replace(self._path)
        except OSError as error:
            log.error("suspects not kept", extra={"fields": {"path": self._path, "reason": error}})
