"""Wires one gateway process: one resource per context, one place where everything meets.

It starts whether or not Kafka, Redis and Postgres are there, says in `/readyz` what is missing, and heals by itself.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

from aiohttp import web

from api.access.key_feed import KeyFeed
from api.access.key_source import PostgresKeys
from api.access.keys import Keys
from api.access.revocations import RedisRevokedSet, Revocations
from api.admission.deadlines import Queues
from api.admission.space import Space
from api.cancellations import Cancellations
from api.door.bodies import Bodies
from api.door.files import room_for_files
from api.door.pace import RARE_PER_S, Pace
from api.door.server import BACKLOG, CLOSE_WITHIN_S, listen, make_runner, open_door
from api.gate import Gate
from api.health import Health, tell_counts
from api.inference import Inference
from api.large_tensors import LargeTensors
from api.limits.limiter import Limiter, RedisScript
from api.middleware import connected, envelope, paced
from api.once.last_word import LogsLastWord
from api.once.once import Once
from api.once.pruning import prune
from api.registry_catalogue import Catalogue
from api.repeated import Repeated
from api.request_log import ACK_WITHIN_S, RequestLog
from api.resources import BOOK, CLAIM_CHECK, LIMITER_REDIS, REGISTRY, RESOURCES, RESULTS_REDIS, SCHEMAS, SPEND_POOL
from api.results.cache import RedisCache
from api.results.log import Log
from api.results.readers import Readers
from api.results.result_log import ResultLog
from api.results.status import RequestStatus
from api.results.waiting import Results
from api.routes import ROUTES
from api.routing.registry import PostgresRegistry
from api.routing.versions import Versions
from api.services import (
    BODIES,
    CATALOGUE,
    CONNECTIONS,
    FREE,
    GATE,
    HEALTH,
    INFERENCE,
    LARGE,
    QUEUES,
    REQUESTS,
    SETTINGS,
    STRANGERS,
    VERSIONS,
)
from api.spend.confirmed import PostgresLedger, PostgresPrices
from api.spend.price_book import PriceBook
from api.spend.spend import Spend
from infra.kafka_lookup import open_lookup
from infra.kafka_lookups import Lookups
from infra.kafka_sender import open_sender
from infra.lag import open_lag_reader
from infra.settings import ApiSettings
from infra.tasks import end
from schemas.keys import RedisKeys
from schemas.lockfile import locked_schemas
from schemas.topics import RESULTS as RESULTS_TOPIC

logger = logging.getLogger(__name__)

RESULTS = web.AppKey("results", Results)

_DRAIN_WITHIN_S = 1.5
_RESTART_PAUSE_S = 1.0


def create_app(settings: ApiSettings) -> web.Application:
    """The application of one process; nothing is connected before it is started."""
    app = web.Application(middlewares=[connected, envelope, paced], client_max_size=settings.max_body_bytes)
    app[SETTINGS] = settings
    app[STRANGERS] = Pace(per_s=settings.strangers_per_s)
    what = "reads and refused calls with {}"
    app[FREE] = Pace(
        per_s=settings.free_per_s, share=0.25, rare_per_s=RARE_PER_S, name="free_calls", what=what, whose="this key"
    )
    app[BODIES] = Bodies(most_bytes=settings.body_bytes)
    app[CATALOGUE] = Catalogue(locked_schemas(), namespace=settings.kafka.namespace)
    app.add_routes(ROUTES)
    app.cleanup_ctx.extend((*RESOURCES, _services))
    app.on_shutdown.append(_drain)
    return app


async def _services(app: web.Application) -> AsyncIterator[None]:
    settings = app[SETTINGS]
    redis_keys = RedisKeys(namespace=settings.redis.namespace)
    versions = Versions(PostgresRegistry(app[REGISTRY]))
    queues = Queues(namespace=settings.kafka.namespace, max_queued=settings.max_queued, deadline_s=settings.deadline_s)
    schemas = app[SCHEMAS]
    cache = RedisCache(app[RESULTS_REDIS], ttl_s=settings.result_ttl_s)
    # Two readers for waiting calls, and two for status reads and last words: neither can hold up the other.
    results_topic = RESULTS_TOPIC.in_namespace(settings.kafka.namespace).name
    lookups, status_lookups = (Lookups[Log](lambda: open_lookup(settings.kafka), most=2) for _ in range(2))
    readers = Readers(status_lookups)
    result_log = ResultLog(
        lambda: open_lookup(settings.kafka),
        lookups,
        topic=results_topic,
        schemas=schemas,
    )
    results = Results(cache, redis_keys, result_log, instance=settings.instance, schemas=schemas)
    app[REQUESTS] = status = RequestStatus(
        cache,
        redis_keys,
        readers,
        namespace=settings.kafka.namespace,
        pools=versions.pools,
        deadline_s=settings.deadline_s,
        learn_schemas=schemas.catch_up,
    )
    request_log = RequestLog(
        lambda: open_sender(settings.kafka, request_timeout_ms=round(ACK_WITHIN_S * 1000)),
        namespace=settings.kafka.namespace,
    )
    cancellations = Cancellations(
        lambda: open_sender(settings.kafka, request_timeout_ms=round(ACK_WITHIN_S * 1000)),
        namespace=settings.kafka.namespace,
    )
    spend = Spend(
        PostgresLedger(app[SPEND_POOL], namespace=settings.kafka.namespace),
        PriceBook(PostgresPrices(app[SPEND_POOL])),
        view_s=settings.spend_view_s,
    )
    key_source = PostgresKeys(app[REGISTRY])
    keys = Keys(key_source, environment=settings.environment)
    revocations = Revocations(key_source, RedisRevokedSet(app[RESULTS_REDIS], redis_keys))
    key_feed = KeyFeed(key_source, keys, revoked=revocations.told)
    horizon_s = 3600.0 * settings.idempotency_hours
    once = Once(app[BOOK], horizon_s=horizon_s)
    limiter = Limiter(RedisScript(app[LIMITER_REDIS]), redis_keys, replicas=settings.replicas)
    gate = Gate(
        keys=keys,
        versions=versions,
        queues=queues,
        limiter=limiter,
        space=Space(
            max_in_flight=settings.max_in_flight,
            max_per_customer=settings.max_in_flight_per_customer,
            max_bytes=settings.max_in_flight_bytes,
        ),
        once=once,
        money=spend,
        deadline_s=settings.deadline_s,
    )
    app[GATE], app[QUEUES], app[RESULTS], app[VERSIONS] = gate, queues, results, versions
    check = app[CLAIM_CHECK]
    app[LARGE] = LargeTensors(check)
    app[INFERENCE] = Inference(
        gate=gate,
        request_log=request_log,
        results=results,
        large=app[LARGE],
        instance=settings.instance,
        gone=cancellations.gone,
        repeated=Repeated(results, once=once, last_word=LogsLastWord(readers, topic=results_topic)),
    )
    app[HEALTH] = Health(
        {
            "kafka": lambda: request_log.trouble() or queues.trouble(),
            "redis": results.trouble,
            "postgres": versions.trouble,
            "keys": key_feed.trouble,
        },
        minor={
            "s3": check.trouble,
            "schemas": schemas.trouble,
            "claims": once.trouble,
            "limits": limiter.trouble,
            "results_cache": results.slowness,
            "results_log": result_log.trouble,
        },
        counts=(
            check.counts,
            app[STRANGERS].counts,
            app[FREE].counts,
            app[CONNECTIONS].counts,
            app[BODIES].counts,
            cancellations.counts,
            spend.counts,
            limiter.counts,
            once.counts,
            results.counts,
            result_log.counts,
            status.counts,
        ),
    )
    loops = [
        _forever(key_feed.run),
        _forever(revocations.run),
        _forever(versions.run),
        _forever(lambda: queues.run(lambda: open_lag_reader(settings.kafka), versions.pools)),
        _forever(spend.run),
        _forever(limiter.run),
        _forever(request_log.run),
        _forever(cancellations.run),
        _forever(once.run),
        _forever(lambda: prune(app[BOOK], horizon_s=horizon_s)),
        _forever(results.listen),
        _forever(results.sweep),
        _forever(result_log.follow),
        *(_forever(result_log.look) for _ in range(2)),
        *(_forever(shared.run) for shared in (lookups, status_lookups)),
        _forever(app[CONNECTIONS].sweep),
        _forever(lambda: tell_counts([app[kind].counts for kind in (STRANGERS, FREE, CONNECTIONS, BODIES)])),
    ]
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    yield
    await end(tasks, within_s=CLOSE_WITHIN_S)
    await once.close()


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


async def serve(settings: ApiSettings) -> None:
    """Run until SIGTERM or SIGINT: then take no new calls, answer those that wait, and close within 5 s.

    Raises OSError when the address is taken, before anything else is started.
    """
    listener = listen(settings.host, settings.port)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    app = create_app(settings)
    runner = make_runner(app)
    app[CONNECTIONS] = connections = open_door(runner, app[STRANGERS], most=room_for_files(settings.max_connections))
    await runner.setup()
    server: asyncio.Server | None = None
    try:
        server = await loop.create_server(connections, sock=listener, backlog=BACKLOG)
        host, port = listener.getsockname()[:2]
        logger.info("listening", extra={"fields": {"url": f"http://{host}:{port}", "instance": settings.instance}})
        await stop.wait()
    finally:
        if server is not None:
            server.close()
        await runner.cleanup()
    logger.info("stopped")
