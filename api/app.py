"""Wires one gateway process: one resource per context, one place where everything meets.

It starts whether or not Kafka, Redis and Postgres are there, says in `/readyz` what is missing, and heals by itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

from aiohttp import web

from api.admission.deadlines import Queues
from api.admission.gate import Gate
from api.admission.keys import Keys
from api.admission.limits import TIMEOUT_S, Limiter, RedisScript
from api.admission.registry import PostgresKeys, PostgresRegistry
from api.admission.space import Space
from api.admission.versions import Versions
from api.connections import Connections, room_for_files
from api.health import Health, tell_counts
from api.inference import Inference
from api.large_tensors import LargeTensors
from api.middleware import connected, envelope, paced
from api.registry_catalogue import Catalogue
from api.request_log import ACK_WITHIN_S, RequestLog
from api.results import RedisCache, Results
from api.routes import ROUTES
from api.services import (
    CATALOGUE,
    CONNECTIONS,
    GATE,
    HEALTH,
    INFERENCE,
    LEDGER,
    QUEUES,
    SETTINGS,
    STRANGERS,
    TURNS,
    VERSIONS,
)
from api.strangers import Strangers
from api.turns import Turns
from infra.blobs import ClaimCheck
from infra.kafka_sender import open_sender
from infra.lag import open_lag_reader
from infra.postgres import Pool, open_pool
from infra.redis import Redis, open_redis
from infra.s3 import Store
from infra.schema_feed import SchemaFeed, open_schema_feed
from infra.settings import ApiSettings
from infra.tasks import end
from schemas.codec import learn
from schemas.facts import SchemaPublished
from schemas.keys import RedisKeys
from schemas.lockfile import locked_schemas

logger = logging.getLogger(__name__)

REGISTRY = web.AppKey("registry", Pool)
LIMITER_REDIS = web.AppKey("limiter_redis", Redis)
RESULTS_REDIS = web.AppKey("results_redis", Redis)
RESULTS = web.AppKey("results", Results)
SCHEMAS = web.AppKey("schemas", SchemaFeed)
CLAIM_CHECK = web.AppKey("claim_check", ClaimCheck)

_BACKLOG = 1024
#: How long what is left of a body that nobody wants is read before its connection is closed.
_LINGER_S = 1.0
_DRAIN_WITHIN_S = 1.5
_CLOSE_WITHIN_S = 1.0
_RESTART_PAUSE_S = 1.0
#: The longest a call to S3 may take, and what share of the longest deadline; less than a request waits for it, so that
#: such a wait shows that S3 is away.
_BLOBS_WITHIN_S = 2.0
_BLOBS_SHARE = 0.2


def create_app(settings: ApiSettings) -> web.Application:
    """The application of one process; nothing is connected before it is started."""
    app = web.Application(middlewares=[connected, envelope, paced], client_max_size=settings.max_body_bytes)
    app[SETTINGS] = settings
    app[STRANGERS] = Strangers(per_s=settings.strangers_per_s)
    app[CATALOGUE] = Catalogue(locked_schemas(), namespace=settings.kafka.namespace)
    app.add_routes(ROUTES)
    app.cleanup_ctx.extend(
        [_turns, _registry, _ledger, _limiter_redis, _results_redis, _claim_check, _schemas, _services]
    )
    app.on_shutdown.append(_drain)
    return app


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


async def _services(app: web.Application) -> AsyncIterator[None]:
    settings = app[SETTINGS]
    redis_keys = RedisKeys(namespace=settings.redis.namespace)
    versions = Versions(PostgresRegistry(app[REGISTRY]))
    queues = Queues(namespace=settings.kafka.namespace, max_queued=settings.max_queued)
    schemas = app[SCHEMAS]
    results = Results(RedisCache(app[RESULTS_REDIS]), redis_keys, instance=settings.instance, schemas=schemas)
    request_log = RequestLog(
        lambda: open_sender(settings.kafka, request_timeout_ms=round(ACK_WITHIN_S * 1000)),
        namespace=settings.kafka.namespace,
    )
    gate = Gate(
        keys=Keys(PostgresKeys(app[REGISTRY]), environment=settings.environment),
        versions=versions,
        queues=queues,
        limiter=Limiter(RedisScript(app[LIMITER_REDIS]), redis_keys),
        space=Space(max_in_flight=settings.max_in_flight),
        once=None,
        money=None,
        deadline_s=settings.deadline_s,
    )
    app[GATE], app[QUEUES], app[RESULTS], app[VERSIONS] = gate, queues, results, versions
    check = app[CLAIM_CHECK]
    app[INFERENCE] = Inference(
        gate=gate,
        request_log=request_log,
        results=results,
        large=LargeTensors(check),
        instance=settings.instance,
    )
    app[HEALTH] = Health(
        {
            "kafka": lambda: request_log.trouble() or queues.trouble(),
            "redis": results.trouble,
            "postgres": versions.trouble,
        },
        minor={"s3": check.trouble, "schemas": schemas.trouble},
        counts=(check.counts, app[STRANGERS].counts, app[CONNECTIONS].counts),
    )
    loops = [
        _forever(versions.run),
        _forever(lambda: queues.run(lambda: open_lag_reader(settings.kafka), versions.pools)),
        _forever(request_log.run),
        _forever(results.listen),
        _forever(results.sweep),
        _forever(app[CONNECTIONS].sweep),
        _forever(lambda: tell_counts((app[STRANGERS].counts, app[CONNECTIONS].counts))),
    ]
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    yield
    await end(tasks, within_s=_CLOSE_WITHIN_S)


async def _forever(loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Keep a background loop going. It handles what it foresees; anything else is logged and it starts again."""
    while True:
        try:
            await loop()
        except Exception:
            logger.exception("a background loop failed and starts again")
        await asyncio.sleep(_RESTART_PAUSE_S)


async def _drain(app: web.Application) -> None:
    await app[RESULTS].drain(within_s=_DRAIN_WITHIN_S)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; "
            "does a gateway of `inferlog up` run there? Name another port with INFERLOG_API_PORT"
        ) from error


def _protocol(runner: web.AppRunner) -> asyncio.Protocol:
    if runner.server is None:
        raise RuntimeError("a connection came before the application was started")
    return runner.server()


async def serve(settings: ApiSettings) -> None:
    """Run until SIGTERM or SIGINT: then take no new calls, answer those that wait, and close within 5 s.

    Raises OSError when the address is taken, before anything else is started.
    """
    listener = _listen(settings.host, settings.port)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    app = create_app(settings)
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=_CLOSE_WITHIN_S,
        lingering_time=_LINGER_S,
        handler_cancellation=True,  # a caller that hangs up stops waiting at once, and its place is free
    )
    app[CONNECTIONS] = connections = Connections(
        lambda: _protocol(runner),
        most=room_for_files(settings.max_connections),
        barred=app[STRANGERS].crowding,
        wasted=app[STRANGERS].wasted,
    )
    await runner.setup()
    server: asyncio.Server | None = None
    try:
        server = await loop.create_server(connections, sock=listener, backlog=_BACKLOG)
        host, port = listener.getsockname()[:2]
        logger.info("listening", extra={"fields": {"url": f"http://{host}:{port}", "instance": settings.instance}})
        await stop.wait()
    finally:
        if server is not None:
            server.close()
        await runner.cleanup()
    logger.info("stopped")
