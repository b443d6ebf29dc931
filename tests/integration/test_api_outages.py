"""Every command that needs a server, when it is away or nothing was ever set up: one clear line, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.processes import ROOT

#: Port 9 of the loopback address, where nobody listens.
GONE = {
    "INFERLOG_KAFKA_BOOTSTRAP": "127.0.0.1:9",
    "INFERLOG_POSTGRES_DSN": "postgresql://inferlog:hidden@127.0.0.1:9/inferlog",
    "INFERLOG_REDIS_URL": "redis://:hidden@127.0.0.1:9/0",
    "INFERLOG_S3_ENDPOINT": "http://127.0.0.1:9",
    "INFERLOG_S3_ACCESS_KEY": "k",
    "INFERLOG_S3_SECRET_KEY": "hidden",
    "INFERLOG_STRIPE_API_BASE": "http://127.0.0.1:9",
    "INFERLOG_STRIPE_API_KEY": "sk_test_hidden",
}
COMMANDS = {
    "provision": 1,
    "customers list": 1,
    "customers create A --requests-per-s 1 --burst 1": 1,
    "keys list": 1,
    "keys create A": 1,
    "keys revoke 000000000000": 1,
    "models list": 1,
    "models route digits abcd1234": 1,
    "usage": 1,
    "billing run --once": 1,
    "billing compare": 1,
    "verify": 2,  # its own status for "could not check"
}


def inferlog(command: str, env: Mapping[str, str], home: Path) -> tuple[int, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("INFERLOG_")}
    done = subprocess.run(
        [sys.executable, "-m", "infra.cli", *command.split()],
        env={**clean, **env, "PYTHONPATH": str(ROOT), "INFERLOG_HOME": str(home)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_with_every_server_away(command: str, tmp_path: Path) -> None:
    status, said = inferlog(command, GONE, tmp_path)
    assert status == COMMANDS[command], said
    assert "Traceback" not in said
    assert "hidden" not in said
    told = [line for line in said.splitlines() if line.startswith(("Error: ", "could not check: "))]
    assert len(told) == 1, said
    assert "127.0.0.1" in told[0] or "does not answer" in told[0] or " is away" in told[0], said


@pytest.mark.parametrize("command", [*COMMANDS, "api --check", "worker"])
def test_with_nothing_set_up(command: str, tmp_path: Path) -> None:
    status, said = inferlog(command, {}, tmp_path)
    assert status in (1, 2), said
    assert "Traceback" not in said
    assert "is not set" in said
    assert "inferlog up" in said
