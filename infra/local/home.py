"""The folder that holds the state of one local stack, and the lock that lets one command at a time change it.
Layout: `stack.env` (addresses, credentials), `wanted` (part names), `lock`, and the folders pids, logs and data."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from infra.local.part import PartError, Say

_LOCK_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Paths below one absolute folder."""

    folder: Path

    def pid_file(self, name: str) -> Path:
        """Return where the part's process is noted."""
        return self.folder / "pids" / f"{name}.json"

    def pid_files(self) -> list[Path]:
        """Return every pid file there is."""
        return sorted(self.folder.glob("pids/*.json"))

    def log_file(self, name: str) -> Path:
        """Return where the part's output goes."""
        return self.folder / "logs" / f"{name}.log"

    def wanted(self) -> set[str]:
        """Return the names of the parts that `up` was asked for; empty when the stack is down."""
        try:
            return set((self.folder / "wanted").read_text().split())
        except FileNotFoundError:
            return set()

    def want(self, names: Iterable[str]) -> None:
        """Note which parts should run; none means that the stack is down."""
        lines = "".join(f"{name}\n" for name in sorted(names))
        (self.folder / "wanted").write_text(lines)

    @contextlib.contextmanager
    def locked(self, *, wait_s: float, progress: Say = lambda line: None) -> Iterator[int]:
        """Hold the lock of this home and yield its descriptor. Raises PartError when others hold it for too long.

        The lock ends with the last copy of the descriptor, so it cannot be left behind by a killed process.
        """
        self._make_folders()
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._take(descriptor, wait_s, progress)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)

    def _take(self, descriptor: int, wait_s: float, progress: Say) -> None:
        deadline, told = time.monotonic() + wait_s, False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                holder = os.pread(descriptor, 20, 0).decode() or "?"
            if time.monotonic() > deadline:
                raise PartError(f"process {holder} has been working on {self.folder} for over {wait_s:.0f} s")
            if not told:
                progress(f"waiting for process {holder}, which is working on {self.folder}")
                told = True
            time.sleep(_LOCK_POLL_S)

    def _make_folders(self) -> None:
        # Others may pass through, not look: the database server may run as another account.
        for name, mode in ((".", 0o711), ("data", 0o711), ("pids", 0o700), ("logs", 0o700)):
            folder = self.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(mode)
