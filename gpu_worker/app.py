"""Wires one worker process: settings, clients, the loop, and the two health endpoints.

Starting waits for Kafka instead of failing; stopping ends what runs, commits it and leaves the group.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, NoReturn

import uvloop
from aiohttp import web

from gpu_worker import runner
from gpu_worker.batching import Limits
from gpu_worker.blame import Blame
from gpu_worker.cancellations import open_cancellations
from gpu_worker.claims import KEEP_WITHIN_S, LargeTensors
from gpu_worker.device import Device
from gpu_worker.health import Health
from gpu_worker.inbox import Inbox, open_inbox
from gpu_worker.outcomes import KafkaRedisOutcomes
from gpu_worker.suspects import Suspects
from gpu_worker.weights import Weights
from gpu_worker.worker import Worker
from infra.blobs import ClaimCheck
from infra.kafka import BusUnavailable, Producer, open_producer
from infra.pause import Pause
from infra.redis import open_redis
from infra.s3 import Store
from infra.schema_feed import open_schema_feed
from infra.settings import WorkerSettings, worker_settings
from infra.telemetry import configure_logging

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.2
_LONGEST_RETRY_S = 5.0
_SUSPECTS_FILE = ".suspects"


class PortTaken(RuntimeError):
    """Another process listens where the health endpoints should; the message says what to do."""


def main() -> NoReturn:
    """Run one worker until SIGTERM or SIGINT, then end the process: with status 0, or 1 for anything else that ended
    it. Raises SettingsError before anything is started.
    """
    settings = worker_settings()
    configure_logging()
    runner.use_threads(1)
    status = 1
    try:
        uvloop.run(serve(settings))
        status = 0
    except PortTaken as error:
        sys.stderr.write(f"Error: {error}\n")
    except BaseException:
        log.critical("worker failed", exc_info=True)
    # All is closed and committed. A plain exit would now wait for threads: a download from a store that does not
    # answer holds one for a minute and more, a model that runs for as long as it likes; nobody wants their results.
    try:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


async def serve(settings: WorkerSettings) -> None:
    """Run one worker until a signal says stop. Raises what ended it otherwise; nothing is committed for that."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # A thread of its own: the first version to load must not wait for it, nor the process at its end (`main`).
    threading.Thread(target=runner.prime, name="prime", daemon=True).start()
    health = Health()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(_health_server(health, settings.health_port))
        clients = await _reach_kafka(settings, stack, stop)
        if clients is None:
            return
        producer, inbox = clients
        redis = await stack.enter_async_context(open_redis(settings.redis, timeout_s=2.0))
        weights = Weights(Store(settings.s3), settings.cache_dir, max_bytes=settings.cache_bytes)
        stack.callback(weights.close)
        device = Device(
            weights,
            load=lambda folder, manifest: runner.load(folder, manifest, device=settings.device),
            max_bytes=settings.device_bytes,
            start_thread=lambda: runner.use_threads(1),
        )
        stack.callback(device.close)
        check = ClaimCheck(
            Store(settings.s3, timeout_s=KEEP_WITHIN_S, attempts=1),
            inline_bytes=settings.claim_check_bytes,
            patience_s=KEEP_WITHIN_S,
        )
        stack.callback(check.close)
        large = LargeTensors(check)
        blame = Blame()
        outcomes = KafkaRedisOutcomes(
            producer, redis, large, blame, namespace=settings.kafka.namespace, result_ttl_s=settings.result_ttl_s
        )
        cancellations = await stack.enter_async_context(open_cancellations(settings.kafka))
        worker = Worker(
            name=settings.worker,
            inbox=inbox,
            claims=large,
            runner=device,
            outcomes=outcomes,
            limits=Limits(max_items=settings.max_batch_items, linger_s=settings.linger_ms / 1000),
            clock=time.time,
            blame=blame,
            suspects=Suspects(settings.cache_dir / _SUSPECTS_FILE),
            is_cancelled=cancellations.includes,
        )
        health.watch(
            worker=worker, inbox=inbox, outcomes=outcomes, redis=redis, check=check, cancellations=cancellations
        )
        # What was imported lives as long as the process; looking through it for garbage again and again
        # costs more than some of the work.
        gc.collect()
        gc.freeze()
        log.info("worker started", extra={"fields": {"worker": settings.worker, "pool": settings.pool}})
        await worker.run(stop)
    log.info("worker stopped", extra={"fields": dict(worker.counts)})


async def _reach_kafka(
    settings: WorkerSettings, stack: AsyncExitStack, stop: asyncio.Event
) -> tuple[Producer, Inbox] | None:
    """Producer and inbox, as soon as Kafka answers; None when told to stop before."""
    schemas = await stack.enter_async_context(open_schema_feed(settings.kafka))
    pause = Pause(_FIRST_RETRY_S, _LONGEST_RETRY_S)
    while not stop.is_set():
        attempt = AsyncExitStack()
        try:
            producer = await attempt.enter_async_context(open_producer(settings.kafka, linger_ms=1))
            inbox = await attempt.enter_async_context(
                open_inbox(settings.kafka, producer, pool=settings.pool, learn_schemas=schemas.catch_up)
            )
        except BusUnavailable as error:
            await attempt.aclose()
            log.warning("waiting for Kafka", extra={"fields": {"reason": error}})
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), pause.next_s())
        else:
            stack.push_async_exit(attempt)
            return producer, inbox
    return None


@asynccontextmanager
async def _health_server(health: Health, port: int) -> AsyncIterator[None]:
    async def answer(request: web.Request) -> web.Response:
        ask: Any = health.alive if request.path == "/healthz" else health.ready
        reasons = await ask()
        body = {"status": "unhealthy" if reasons else "ok", "reasons": reasons, **health.figures()}
        return web.json_response(body, status=503 if reasons else 200)

    app = web.Application()
    app.add_routes([web.get("/healthz", answer), web.get("/readyz", answer)])
    server = web.AppRunner(app, access_log=None)
    await server.setup()
    try:
        await _listen(server, port)
        yield
    finally:
        await server.cleanup()


async def _listen(server: web.AppRunner, port: int) -> None:
    try:
        await web.TCPSite(server, "127.0.0.1", port).start()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise PortTaken(
            f"INFERLOG_WORKER_PORT {port} is in use (is a worker of `inferlog up` running? set another port)"
        ) from error
