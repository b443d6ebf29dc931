"""How Redis is reached: one client with a short deadline, and Lua scripts loaded from files by name.

A timed-out call is never repeated, because it may have taken effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from infra.settings import RedisSettings

__all__ = ["LuaScript", "PubSub", "Redis", "RedisError", "lua", "open_redis"]


@asynccontextmanager
async def open_redis(
    settings: RedisSettings, *, timeout_s: float = 1.0, max_connections: int = 64
) -> AsyncIterator[Redis]:
    """A client whose every call ends within `timeout_s` (RedisError past it); waits for a free connection likewise.

    Connects lazily, reconnects by itself, and does not retry: a call that timed out may have taken effect.
    """
    pool = BlockingConnectionPool.from_url(
        settings.url,
        max_connections=max_connections,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=15,
    )
    client = Redis(connection_pool=pool)
    try:
        yield client
    finally:
        await client.aclose()
        await pool.disconnect()


class LuaScript:
    """A script called by its digest; sent whole only when the server says it does not know it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha1 = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, client: Redis, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        """Run it. NOSCRIPT proves that nothing ran, so only then is the call repeated, as EVAL."""
        try:
            return await client.evalsha(self.sha1, len(keys), *keys, *args)
        except NoScriptError:
            return await client.eval(self.source, len(keys), *keys, *args)

    async def each(self, client: Redis, calls: Sequence[tuple[Sequence[str], Sequence[str | int]]]) -> list[Any]:
        """Run it once per (keys, args) in one round trip; answers in order, a refused run's exception as its value.

        Runs are independent, not a transaction. Raises RedisError when the round trip itself failed.
        """
        if len(calls) == 1:
            keys, args = calls[0]
            return [await self(client, keys, args)]
        pipeline = client.pipeline(transaction=False)
        for keys, args in calls:
            pipeline.evalsha(self.sha1, len(keys), *keys, *args)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        for i, answer in enumerate(answers):
            if isinstance(answer, NoScriptError):
                answers[i] = await self(client, *calls[i])
        return answers


def lua(package: str, name: str) -> LuaScript:
    """The script `<name>.lua` beside a package's modules."""
    return LuaScript(files(package).joinpath(f"{name}.lua").read_text(encoding="utf-8"))
