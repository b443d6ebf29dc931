"""Where workers put copies of results, and their hints that there are some: Redis, as the gateway reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, cast

from infra.redis import PubSub, Redis, RedisError

#: A call to Redis is over after this long, connecting included.
CALL_WITHIN_S = 0.5


class CacheAway(RuntimeError):
    """The results cache did not answer."""


class Hints(Protocol):
    """A subscription that the server has confirmed."""

    async def next(self, timeout_s: float) -> bytes | None:
        """The next hint, concatenated 16-byte request ids; None when none came in time. Raises CacheAway."""


class Cache(Protocol):
    """Where workers put results."""

    async def read(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """The values of these keys; without keys it only shows that the cache answers. Raises CacheAway."""

    async def put_back(self, values: Mapping[str, bytes]) -> None:
        """Copies by their keys, for the usual lifetime; where there is one it stays. Raises CacheAway."""

    def subscribe(self, channel: str) -> AbstractAsyncContextManager[Hints]:
        """A subscription, entered once the server has confirmed it. Raises CacheAway."""


class RedisCache:
    """Implements the port Cache. `ttl_s` is how long a copy is kept that is put back."""

    def __init__(self, client: Redis, *, ttl_s: int) -> None:
        self._client = client
        self._ttl_s = ttl_s

    async def read(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """See Cache."""
        try:
            if not keys:
                await asyncio.wait_for(self._client.ping(), CALL_WITHIN_S)
                return ()
            values: Any = await asyncio.wait_for(self._client.mget(keys), CALL_WITHIN_S)
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            raise _away(error) from error
        return cast(Sequence[bytes | None], values)

    async def put_back(self, values: Mapping[str, bytes]) -> None:
        """See Cache."""
        pipeline = self._client.pipeline(transaction=False)
        for key, value in values.items():
            pipeline.execute_command("SET", key, value, "NX", "EX", self._ttl_s)
        try:
            await asyncio.wait_for(pipeline.execute(), CALL_WITHIN_S)
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            raise _away(error) from error

    @asynccontextmanager
    async def subscribe(self, channel: str) -> AsyncIterator[Hints]:
        """See Cache."""
        async with self._client.pubsub() as subscription:
            try:
                await subscription.subscribe(channel)
                confirmation = await subscription.get_message(timeout=1.0)
            except (RedisError, OSError, asyncio.TimeoutError) as error:
                raise _away(error) from error
            if confirmation is None:
                raise CacheAway("a subscription was not confirmed in 1 s")
            yield _RedisHints(subscription)


class _RedisHints:
    def __init__(self, subscription: PubSub) -> None:
        self._subscription = subscription

    async def next(self, timeout_s: float) -> bytes | None:
        try:
            message = await self._subscription.get_message(ignore_subscribe_messages=True, timeout=timeout_s)
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            raise _away(error) from error
        return message["data"] if message is not None else None


def _away(error: Exception) -> CacheAway:
    return CacheAway(f"{type(error).__name__}: {error}")
