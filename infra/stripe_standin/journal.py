"""An append-only file of JSON lines: what the stand-in has accepted, in order.

Each line is written whole and handed to the operating system before the caller is answered, so a killed process
forgets nothing it has confirmed; a line cut short by the kill was never confirmed and is dropped at the next start.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class JournalDamagedError(Exception):
    """A line other than a cut-off last one cannot be read; nothing is guessed."""


class Journal:
    """One journal file, held by one process.

    Raises BlockingIOError when another process holds it, JournalDamagedError from `replay` when a complete line
    is not a JSON object, and OSError from `append` when the line could not be written (then nothing of it stays).
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise BlockingIOError(f"{path} is in use by another stand-in") from error
        self._size_bytes = self._drop_torn_line()

    def _drop_torn_line(self) -> int:
        content = self._path.read_bytes()
        whole_bytes = content.rfind(b"\n") + 1
        if whole_bytes < len(content):
            os.ftruncate(self._file, whole_bytes)
        return whole_bytes

    def replay(self) -> Iterator[dict[str, Any]]:
        """Yield every entry from the first."""
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    entry = json.loads(line)
                except ValueError as error:
                    raise JournalDamagedError(f"{self._path} line {number} is not JSON: {error}") from error
                if not isinstance(entry, dict):
                    raise JournalDamagedError(f"{self._path} line {number} is not a JSON object")
                yield entry

    def append(self, entry: dict[str, Any]) -> None:
        """Write one entry; on return the operating system has it."""
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            os.ftruncate(self._file, self._size_bytes)
            raise
        self._size_bytes += len(line)

    def close(self) -> None:
        """Let another process hold the file."""
        os.close(self._file)
