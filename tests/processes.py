"""Real processes of the product under test: started with given settings, ended with the test, their logs kept."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.conditions import wait_until

_BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Process:
    """One child in its own process group; `log` is the file that takes its output."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.command = list(command)
        program = _BIN / self.command[0]
        self.command[0] = str(program if program.exists() else self.command[0])
        clean = {k: v for k, v in os.environ.items() if not k.startswith("INFERLOG_")}
        with log.open("ab") as out:
            self._child = subprocess.Popen(
                self.command,
                env={**clean, "PYTHONUNBUFFERED": "1", **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, None while it runs."""
        return self._child.poll()

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL to the whole group, and reap."""
        self._signal(signal.SIGKILL)
        self._child.wait(timeout=10)

    def terminate(self) -> None:
        """SIGTERM to the process itself."""
        if self.returncode is None:
            self._child.terminate()

    def wait(self, timeout_s: float = 30.0) -> int:
        """Exit status once it ended."""
        return self._child.wait(timeout=timeout_s)

    def end(self) -> None:
        """Whatever it takes: nothing of the group is left."""
        self._signal(signal.SIGKILL)
        self._child.wait(timeout=10)

    def wait_ready(self, url: str, *, timeout_s: float = 60.0) -> None:
        """Wait until `url` answers 200; fails at once, with the log's end, when the process has ended."""

        def answered() -> bool:
            if self.returncode is not None:
                raise SystemError(f"{self.command} ended with {self.returncode}:\n{self.tail()}")
            try:
                with urllib.request.urlopen(url, timeout=2) as answer:
                    return bool(answer.status == 200)
            except urllib.error.HTTPError as error:
                raise RuntimeError(f"{error.code} {error.read()[:300]!r}") from error

        try:
            wait_until(answered, timeout_s=timeout_s, what=f"{url} ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from error

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._child.pid, number)
        except ProcessLookupError:
            return
