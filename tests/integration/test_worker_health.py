"""What a worker says of itself when the servers around it come and go, and that it needs no restart for that."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from infra.local.stack import Stack
from tests.conditions import wait_until
from tests.integration.worker_desk import WORKER
from tests.processes import Process, free_port

Spawn = Callable[..., Process]


def ask(port: int, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_worker_is_alive_without_servers_ready_with_them_and_says_what_it_lacks(
    env: dict[str, str], spawn: Spawn, stack: Stack
) -> None:
    port = free_port()
    stack.stop_part("kafka", kill=True)
    try:
        worker = spawn(WORKER, {**env, "INFERLOG_WORKER_PORT": str(port)}, name="worker")
        wait_until(lambda: ask(port, "/healthz")[0] == 200, what="alive without Kafka")
        assert ask(port, "/readyz") == (503, {"status": "unhealthy", "reasons": ["Kafka was not reached yet"]})
    finally:
        stack.start_part("kafka")
    worker.wait_ready(f"http://127.0.0.1:{port}/readyz")

    stack.stop_part("valkey", kill=True)
    try:
        status, body = ask(port, "/readyz")
        assert status == 503
        assert [reason.split(":")[0] for reason in body["reasons"]] == ["Redis"]
        assert ask(port, "/healthz")[0] == 200, "a restart would not help"
    finally:
        stack.start_part("valkey")
    worker.wait_ready(f"http://127.0.0.1:{port}/readyz")

    worker.terminate()
    assert worker.wait() == 0
    assert "worker stopped" in worker.log.read_text()


def test_a_worker_whose_port_is_taken_says_which_in_one_line(env: dict[str, str], spawn: Spawn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        worker = spawn(WORKER, {**env, "INFERLOG_WORKER_PORT": str(port)}, name="worker")
        assert worker.wait() == 1
    assert worker.tail(1).startswith(f"Error: INFERLOG_WORKER_PORT {port} is in use")
    assert "Traceback" not in worker.log.read_text()


def test_a_worker_without_settings_says_which(env: dict[str, str], spawn: Spawn) -> None:
    worker = spawn(WORKER, {"INFERLOG_HOME": env["INFERLOG_HOME"], "INFERLOG_DEVICE": "tpu"}, name="worker")
    assert worker.wait() != 0
    assert "INFERLOG_KAFKA_BOOTSTRAP is not set" in worker.tail()
    assert "INFERLOG_DEVICE is 'tpu', expected 'cpu', 'cuda' or 'cuda:N'" in worker.tail()
