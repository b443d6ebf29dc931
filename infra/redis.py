"""How Redis is reached: one client with a short deadline, and Lua scripts loaded from files by name.

A timed-out call is never repeated, because it may have taken effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from infra.settings import RedisSettings

__all__ = ["LuaCall", "LuaScript", "PubSub", "Redis", "RedisError", "lua", "open_redis"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LuaCall:
    """One run of a script: its keys and arguments, and the same as bytes for the wire."""

    keys: tuple[str, ...]
    args: tuple[str | int, ...]
    packed: bytes


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

    def prepare(self, keys: Sequence[str], args: Sequence[str | int]) -> LuaCall:
        """One run, already in wire form: worth keeping when the same run is asked for again and again."""
        return LuaCall(keys=tuple(keys), args=tuple(args), packed=_wire("EVALSHA", self.sha1, len(keys), *keys, *args))

    async def each(self, client: Redis, calls: Sequence[LuaCall]) -> list[Any]:
        """Run it once per call in one round trip; answers in order, a refused run's exception as its value.

        Runs are independent, not a transaction. Raises RedisError when the round trip itself failed.
        """
        # Straight on a connection, because packing and the pipeline's bookkeeping cost more than the round trip.
        pool = client.connection_pool
        connection = await pool.get_connection()  # type: ignore[no-untyped-call]  # redis leaves it bare
        answers: list[Any] = []
        try:
            await connection.send_packed_command([b"".join(call.packed for call in calls)])
            for _ in calls:
                try:
                    answers.append(await connection.read_response())
                except ResponseError as refused:
                    answers.append(refused)
        except BaseException:
            # Answers still to come would be taken for those of the next user.
            await connection.disconnect(nowait=True)
            raise
        finally:
            await pool.release(connection)
        for i, answer in enumerate(answers):
            if isinstance(answer, NoScriptError):
                answers[i] = await self(client, calls[i].keys, calls[i].args)
        return answers


def _wire(*words: str | int) -> bytes:
    """A command in Redis' protocol: an array of length-prefixed strings."""
    parts = [f"*{len(words)}\r\n".encode()]
    for word in words:
        text = str(word).encode()
        parts += (b"$%d\r\n" % len(text), text, b"\r\n")
    return b"".join(parts)


def lua(package: str, name: str) -> LuaScript:
    """The script `<name>.lua` beside a package's modules."""
    return LuaScript(files(package).joinpath(f"{name}.lua").read_text(encoding="utf-8"))
