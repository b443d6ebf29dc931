"""The ledger's health port in use by another process: one line at the end says so, and no server is needed for that."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from tests.processes import Process


def test_a_ledger_whose_port_is_taken_ends_with_one_line(spawn: Callable[..., Process], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        env = {
            "INFERLOG_HOME": str(tmp_path),
            "INFERLOG_KAFKA_BOOTSTRAP": "127.0.0.1:1",
            "INFERLOG_POSTGRES_DSN": "postgresql://x:y@127.0.0.1:1/x",
            "INFERLOG_STREAMS_PORT": str(port),
        }
        ledger = spawn(["faust", "-A", "streams.app", "worker", "-l", "info"], env, name="ledger")
        assert ledger.wait(60) == 1
    assert ledger.tail(1).startswith(f"Error: INFERLOG_STREAMS_PORT {port} is in use")
    assert "Traceback" not in ledger.log.read_text()
