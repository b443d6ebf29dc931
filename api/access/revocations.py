"""Redis' set of revoked keys, which the limiter reads in the call that admits, kept whole by every gateway.

It holds a revocation while Postgres is slow; that Redis may lose it costs nothing but that, because the feed refuses
the key as well. What Redis lost is put back within seconds, and so is what a command had no time to write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol
from uuid import uuid4

from api.access.keys import KeySourceAway
from infra.redis import Redis, RedisError
from schemas.keys import RedisKeys

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
_PAGE = 5_000
_MOST_WAITING = 100_000
#: A repair takes less, or another one begins.
_REPAIR_WITHIN_S = 60


class RevokedKey(NamedTuple):
    """A key that is revoked."""

    customer_id: str
    key_id: str


class RevokedSetAway(RuntimeError):
    """Redis did not take or tell anything in time."""


class RevokedSource(Protocol):
    """Where keys are stored."""

    async def revoked(self, after: str, *, at_most: int) -> Sequence[RevokedKey]:
        """Revoked keys that have not expired anyway, in the order of their ids, from the one after `after` on.

        Raises KeySourceAway.
        """


class RevokedSet(Protocol):
    """The set, and a mark beside it that says it is whole. All methods raise RevokedSetAway."""

    async def is_whole(self) -> bool:
        """Whether everything was put in since this server was started and last emptied."""

    async def begin(self) -> str:
        """Begin to put everything in; what is lost from now on is noticed by `finish` of what this returns."""

    async def add(self, keys: Sequence[RevokedKey]) -> None:
        """Put keys in, whether or not they are there."""

    async def finish(self, repair: str) -> bool:
        """Mark the set whole; False when Redis lost something since `begin`."""


class Revocations:
    """Keeps the set whole. `told` takes what the feed has found, `run` does the work."""

    def __init__(self, source: RevokedSource, revoked_set: RevokedSet) -> None:
        self._source = source
        self._set = revoked_set
        self._waiting: list[RevokedKey] = []
        self._some = asyncio.Event()

    def told(self, revoked: Sequence[RevokedKey]) -> None:
        """These are revoked: the command that did it may have died before it wrote to Redis."""
        if revoked:
            # Past its bound the oldest are left out: the feed refuses them too, and a repair knows all.
            self._waiting = [*self._waiting, *revoked][-_MOST_WAITING:]
            self._some.set()

    async def keep(self) -> bool:
        """Do what there is to do; True when the set had to be filled anew.

        Raises RevokedSetAway, KeySourceAway.
        """
        while self._waiting:
            batch = self._waiting[:_PAGE]
            await self._set.add(batch)
            del self._waiting[: len(batch)]
        self._some.clear()
        if await self._set.is_whole():
            return False
        # Write order; each line says what dying right after it costs.
        # 1 a mark of this repair's own     nothing; it ends by itself
        # 2 the keys, page by page          nothing; the set is not marked whole, so the next check begins again
        # 3 that mark becomes the set's     nothing; had Redis lost anything since 1, the mark would be gone as well
        repair = await self._set.begin()
        after = ""
        while page := await self._source.revoked(after, at_most=_PAGE):
            await self._set.add(page)
            after = page[-1].key_id
        await self._set.finish(repair)
        return True

    async def run(self) -> None:
        """Keep the set whole for ever; says when it was filled anew, and once when that cannot be done."""
        away = False
        while True:
            try:
                if await self.keep():
                    logger.info("the set of revoked keys was filled anew")
            except (RevokedSetAway, KeySourceAway) as error:
                if not away:
                    logger.warning("the set of revoked keys cannot be kept", extra={"fields": {"why": error}})
                away = True
                await asyncio.sleep(CHECK_EVERY_S)  # also when more was told meanwhile
            else:
                away = False
                await self._pause()

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._some.wait(), CHECK_EVERY_S)
        except asyncio.TimeoutError:
            return


class RedisRevokedSet:
    """Implements the port RevokedSet. The mark names the run of the server, since one that was started again may have
    come back with an earlier state."""

    def __init__(self, client: Redis, keys: RedisKeys) -> None:
        self._client = client
        self._keys = keys

    async def is_whole(self) -> bool:
        """See RevokedSet."""
        try:
            marked = await self._client.get(self._keys.revoked_whole())
            return marked is not None and marked == (await self._server()).encode()
        except (RedisError, OSError) as error:
            raise RevokedSetAway(f"{type(error).__name__}: {error}") from error

    async def begin(self) -> str:
        """See RevokedSet."""
        repair = self._keys.revoked_repair(str(uuid4()))
        try:
            await self._client.set(repair, await self._server(), ex=_REPAIR_WITHIN_S)
        except (RedisError, OSError) as error:
            raise RevokedSetAway(f"{type(error).__name__}: {error}") from error
        return repair

    async def add(self, keys: Sequence[RevokedKey]) -> None:
        """See RevokedSet."""
        by_customer: dict[str, list[str]] = {}
        for customer_id, key_id in keys:
            by_customer.setdefault(customer_id, []).append(key_id)
        try:
            async with self._client.pipeline(transaction=False) as pipeline:
                for customer_id, key_ids in by_customer.items():
                    pipeline.sadd(self._keys.revoked_keys(customer_id), *key_ids)
                await pipeline.execute()
        except (RedisError, OSError) as error:
            raise RevokedSetAway(f"{type(error).__name__}: {error}") from error

    async def finish(self, repair: str) -> bool:
        """See RevokedSet."""
        whole = self._keys.revoked_whole()
        try:
            # A mark that is gone cannot be renamed; persisted first, or the set's would end as a repair's does.
            return bool(await self._client.persist(repair)) and bool(await self._client.rename(repair, whole))
        except RedisError as error:
            if "no such key" in str(error):
                return False
            raise RevokedSetAway(f"{type(error).__name__}: {error}") from error
        except OSError as error:
            raise RevokedSetAway(f"{type(error).__name__}: {error}") from error

    async def _server(self) -> str:
        return str((await self._client.info("server"))["run_id"])
