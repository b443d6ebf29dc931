"""A key never exceeds its rate, also across a killed Valkey."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from api.admission.buckets import Limit
from api.admission.limits import Limiter, RedisScript
from api.errors import RateLimited
from infra.local import valkey
from infra.local.stack import Stack
from infra.redis import open_redis
from infra.settings import RedisSettings
from schemas.keys import RedisKeys
from tests.fakes import demand


async def spent(environment: dict[str, str], key: str) -> list[bool]:
    """Whether each of five calls was admitted; a bucket of three that takes a quarter of an hour per unit."""
    limits = (Limit(name=f"key:{key}", interval_us=900_000_000, burst=3),)
    admitted = []
    async with open_redis(RedisSettings(url=environment["INFERLOG_REDIS_URL"], namespace="")) as client:
        limiter = Limiter(RedisScript(client), RedisKeys())
        for _ in range(5):
            try:
                await limiter.take(demand("c", key, limits))
                admitted.append(True)
            except RateLimited:
                admitted.append(False)
    return admitted


@pytest.mark.parametrize("keeps", [True, False], ids=["as it is", "without its file"])
def test_a_killed_limiter_remembers_what_was_spent(
    stack: Stack, servers: dict[str, str], monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """Or every restart would admit each key's burst once more, far above its rate."""
    if not keeps:
        monkeypatch.setattr(valkey, "_CONFIGURATION", valkey._CONFIGURATION.replace("appendonly yes", "appendonly no"))
        stack.stop_part("valkey")
        stack.start_part("valkey")
    environment, key = servers, f"k-{uuid4()}"
    assert asyncio.run(spent(environment, key)) == [True, True, True, False, False]
    for _ in range(2):
        stack.stop_part("valkey", kill=True)
        stack.start_part("valkey")
        again = asyncio.run(spent(environment, key))
        assert again == ([False] * 5 if keeps else [True, True, True, False, False])
    if not keeps:
        monkeypatch.undo()
        stack.stop_part("valkey")
        stack.start_part("valkey")
