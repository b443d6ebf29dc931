from __future__ import annotations

import asyncio
import socket

import pytest

from api.app import serve
from infra.settings import api_settings

SETTINGS = {
    "INFERLOG_KAFKA_BOOTSTRAP": "127.0.0.1:1",
    "INFERLOG_POSTGRES_DSN": "postgresql://u:p@127.0.0.1:1/x",
    "INFERLOG_REDIS_URL": "redis://127.0.0.1:1/0",
    "INFERLOG_S3_ACCESS_KEY": "k",
    "INFERLOG_S3_SECRET_KEY": "s",
}


async def test_a_taken_port_is_told_before_anything_starts_and_nothing_is_left_running() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: .*INFERLOG_API_PORT"):
            await serve(api_settings({**SETTINGS, "INFERLOG_API_PORT": str(port)}))
    assert len(asyncio.all_tasks()) == 1
