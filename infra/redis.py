"""How Redis is reached: one client with a short deadline, and Lua scripts loaded from files by name.

A timed-out call is never repeated, because it may have taken effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, NamedTuple

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from infra.settings import RedisSettings

__all__ = ["LuaCall", "LuaScript", "LuaStart", "PubSub", "Redis", "RedisError", "lua", "open_redis", "run_each"]


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


class LuaStart:
    """What many runs of a script have in common: its keys and first arguments, in wire form.

    Each run has `more` arguments of its own behind them.
    """

    __slots__ = ("args", "keys", "packed", "rest", "script", "words")

    def __init__(self, script: LuaScript, keys: Sequence[str], args: Sequence[str | int], *, more: int) -> None:
        self.script = script
        self.keys, self.args = tuple(keys), tuple(args)
        self.words = b"*%d\r\n" % (3 + len(keys) + len(args) + more)
        self.rest = _words(len(keys), *keys, *args)
        self.packed = self.words + _words("EVALSHA", script.sha1) + self.rest

    def call(self, *args: str | int) -> LuaCall:
        """One run; `args` are its own, as many as were said."""
        words = "".join([f"${len(text)}\r\n{text}\r\n" for text in map(str, args)])
        return LuaCall(self, words.encode() if words.isascii() else _words(*args))


class LuaCall(NamedTuple):
    """One run of a script: what it has in common with others, and its own arguments in wire form."""

    start: LuaStart
    tail: bytes = b""

    @property
    def packed(self) -> bytes:
        """The run, by the script's digest."""
        return self.start.packed + self.tail

    @property
    def whole(self) -> bytes:
        """The run, by the script's text."""
        start = self.start
        return start.words + _words("EVAL", start.script.source) + start.rest + self.tail


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

    def start(self, keys: Sequence[str], args: Sequence[str | int], *, more: int = 0) -> LuaStart:
        """Runs with these keys and first arguments: worth keeping when they are asked for again and again."""
        return LuaStart(self, keys, args, more=more)


async def run_each(client: Redis, calls: Sequence[LuaCall]) -> list[Any]:
    """Run scripts, one run per call, in one round trip; answers in order, a refused run's exception as its value.

    Runs are independent, not a transaction. Those of which the server says that it does not know the script did not
    happen, and go in a second round trip by its text. Raises RedisError when a round trip itself failed.
    """
    answers = await _round_trip(client, [call.packed for call in calls])
    unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
    if unknown:
        told = await _round_trip(client, [calls[i].whole for i in unknown])
        for i, answer in zip(unknown, told, strict=True):
            answers[i] = answer
    return answers


async def _round_trip(client: Redis, packed: Sequence[bytes]) -> list[Any]:
    # Straight on a connection, because packing and the pipeline's bookkeeping cost more than the round trip.
    pool = client.connection_pool
    connection = await pool.get_connection()  # type: ignore[no-untyped-call]  # redis leaves it bare
    answers: list[Any] = []
    try:
        await connection.send_packed_command([b"".join(packed)])
        for _ in packed:
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
    return answers


def _words(*words: str | int) -> bytes:
    """Words in Redis' protocol: length-prefixed strings."""
    parts: list[bytes] = []
    for word in words:
        text = str(word).encode()
        parts += (b"$%d\r\n" % len(text), text, b"\r\n")
    return b"".join(parts)


def lua(package: str, name: str) -> LuaScript:
    """The script `<name>.lua` beside a package's modules."""
    return LuaScript(files(package).joinpath(f"{name}.lua").read_text(encoding="utf-8"))
