"""What one gateway process is connected to: one context per server and use, each bounded by itself.

Uses that must not hold up each other have connections of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web

from api.limits.limiter import TIMEOUT_S
from api.once.book import PostgresBook
from api.services import CATALOGUE, LEDGER, SETTINGS, TURNS
from api.turns import Turns
from infra.blobs import ClaimCheck
from infra.postgres import Pool, open_pool
from infra.redis import Redis, open_redis
from infra.s3 import Store
from infra.schema_feed import SchemaFeed, open_schema_feed
from schemas.codec import learn
from schemas.facts import SchemaPublished

REGISTRY = web.AppKey("registry", Pool)
SPEND_POOL = web.AppKey("spend_pool", Pool)
LIMITER_REDIS = web.AppKey("limiter_redis", Redis)
RESULTS_REDIS = web.AppKey("results_redis", Redis)
SCHEMAS = web.AppKey("schemas", SchemaFeed)
CLAIM_CHECK = web.AppKey("claim_check", ClaimCheck)
BOOK = web.AppKey("book", PostgresBook)

#: The longest a call to S3 may take, and what share of the longest deadline; less than a request waits for it, so that
#: such a wait shows that S3 is away.
_BLOBS_WITHIN_S = 2.0
_BLOBS_SHARE = 0.2


async def _turns(app: web.Application) -> AsyncIterator[None]:
    app[TURNS] = turns = Turns()
    yield
    await turns.close()


async def _registry(app: web.Application) -> AsyncIterator[None]:
    async with open_pool(app[SETTINGS].postgres, connect_timeout_s=1.0, command_timeout_s=2.0) as pool:
        app[REGISTRY] = pool
        yield


async def _ledger(app: web.Application) -> AsyncIterator[None]:
    # Its own small pool: customers who read their usage cannot hold up the look-up of keys.
    async with open_pool(app[SETTINGS].postgres, max_size=2, connect_timeout_s=1.0, command_timeout_s=2.0) as pool:
        app[LEDGER] = pool
        yield


async def _spend_pool(app: web.Application) -> AsyncIterator[None]:
    # Its own as well: customers who read their usage cannot make the spending of others unknown.
    async with open_pool(app[SETTINGS].postgres, max_size=2, connect_timeout_s=1.0, command_timeout_s=2.0) as pool:
        app[SPEND_POOL] = pool
        yield


async def _limiter_redis(app: web.Application) -> AsyncIterator[None]:
    async with open_redis(app[SETTINGS].redis, timeout_s=2 * TIMEOUT_S, max_connections=4) as client:
        app[LIMITER_REDIS] = client
        yield


async def _results_redis(app: web.Application) -> AsyncIterator[None]:
    async with open_redis(app[SETTINGS].redis, timeout_s=1.0, max_connections=8) as client:
        app[RESULTS_REDIS] = client
        yield


async def _schemas(app: web.Application) -> AsyncIterator[None]:
    def learn_and_show(published: SchemaPublished) -> bool:
        new = learn(published)
        app[CATALOGUE].learn(published)
        return new

    async with open_schema_feed(app[SETTINGS].kafka, learn=learn_and_show) as feed:
        app[SCHEMAS] = feed
        yield


async def _claim_check(app: web.Application) -> AsyncIterator[None]:
    settings = app[SETTINGS]
    patience_s = min(_BLOBS_WITHIN_S, _BLOBS_SHARE * settings.deadline_s)
    store = await asyncio.to_thread(Store, settings.s3, timeout_s=_BLOBS_WITHIN_S, attempts=1)
    app[CLAIM_CHECK] = check = ClaimCheck(store, inline_bytes=settings.claim_check_bytes, patience_s=patience_s)
    yield
    check.close()


async def _claims(app: web.Application) -> AsyncIterator[None]:
    # Its own pool: neither do keys wait for claims, nor claims for keys.
    settings = app[SETTINGS].postgres
    async with open_pool(settings, max_size=3, connect_timeout_s=1.0, command_timeout_s=10.0, resets=False) as pool:
        app[BOOK] = PostgresBook(pool)
        yield


#: In the order in which they are opened.
RESOURCES: Final = (
    _turns,
    _registry,
    _ledger,
    _spend_pool,
    _limiter_redis,
    _results_redis,
    _schemas,
    _claim_check,
    _claims,
)
