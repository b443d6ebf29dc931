"""One real operation per server, used to decide that it is ready and later that it is healthy.
An open port proves little: these write something and read it back, and give up within a few seconds."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from infra.local.part import PartError
from infra.settings import KafkaSettings, PostgresSettings, RedisSettings, S3Settings

TIMEOUT_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReadyTopic:
    name: str = "inferlog.local.ready"
    partitions: int = 1

    def config(self) -> dict[str, str]:
        return {"retention.ms": "3600000"}


def kafka(bootstrap: str) -> None:
    """Create a topic if missing and have one record acknowledged."""
    _connect(bootstrap)
    _run(_kafka(KafkaSettings(bootstrap=bootstrap, namespace="")))


def postgres(dsn: str) -> None:
    """Log in and select."""
    _connect(urlsplit(dsn).netloc.rpartition("@")[2])
    _run(_postgres(PostgresSettings(dsn=dsn)))


def redis(url: str) -> None:
    """Authenticate, set a key and read it back."""
    _connect(urlsplit(url).netloc.rpartition("@")[2])
    _run(_redis(RedisSettings(url=url, namespace="")))


def s3(environment: Mapping[str, str]) -> None:
    """Create the bucket if missing, put an object once and get it back."""
    _connect(urlsplit(environment["INFERLOG_S3_ENDPOINT"]).netloc)
    settings = S3Settings(
        endpoint=environment["INFERLOG_S3_ENDPOINT"],
        bucket=environment["INFERLOG_S3_BUCKET"],
        access_key=environment["INFERLOG_S3_ACCESS_KEY"],
        secret_key=environment["INFERLOG_S3_SECRET_KEY"],
    )
    # The store's own timeouts are made for large uploads; a thread that may be left behind bounds them here.
    failures: list[BaseException | None] = []

    def attempt() -> None:
        try:
            _s3(settings)
        except Exception as error:  # noqa: BLE001 (raised again by the caller)
            failures.append(error)
        else:
            failures.append(None)

    thread = threading.Thread(target=attempt, name="probe-s3", daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if not failures:
        raise _no_answer()
    if failures[0] is not None:
        raise failures[0]


def http(url: str) -> None:
    """Get the URL and expect 200; raises PartError with the start of the answer otherwise."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 (always http on loopback)
            answer.read()
    except urllib.error.HTTPError as error:
        body = error.read(300).decode(errors="replace").strip()
        raise PartError(f"GET {url} answered {error.code}: {body}") from error
    except OSError as error:  # URLError and timeouts included
        raise PartError(f"GET {url}: {getattr(error, 'reason', error)}") from error


def _connect(address: str) -> None:
    # Cheap first question while a server comes up, and it keeps the clients from logging each refusal.
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S).close()
    except OSError as error:
        raise PartError(f"{address} refuses connections: {error.strerror or error}") from error


def _no_answer() -> PartError:
    return PartError(f"accepts connections but did not answer within {TIMEOUT_S:.0f} s")


def _run(operation: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        try:
            await asyncio.wait_for(operation, TIMEOUT_S)
        except asyncio.TimeoutError:
            raise _no_answer() from None

    asyncio.run(bounded())


# The client libraries are imported on use: `inferlog down` and a refused connection need none of them.


async def _kafka(settings: KafkaSettings) -> None:
    from infra.kafka import open_producer
    from infra.kafka_admin import open_admin

    topic = _ReadyTopic()
    async with open_admin(settings, request_timeout_ms=3000) as admin:
        await admin.create_topics([topic])
    async with open_producer(settings, request_timeout_ms=3000) as producer:
        await producer.send(topic.name, b"ready", timeout_s=3.0)


async def _postgres(settings: PostgresSettings) -> None:
    from infra.postgres import connect

    connection = await connect(settings, timeout_s=3.0, command_timeout_s=3.0)
    try:
        if await connection.fetchval("SELECT 1") != 1:
            raise PartError("SELECT 1 did not answer 1")
    finally:
        await connection.close(timeout=1.0)


async def _redis(settings: RedisSettings) -> None:
    from infra.redis import open_redis

    async with open_redis(settings, timeout_s=3.0) as client:
        await client.set("inferlog:local:ready", b"1", ex=60)
        if await client.get("inferlog:local:ready") != b"1":
            raise PartError("a key read back differs from what was set")


def _s3(settings: S3Settings) -> None:
    from infra.s3 import Store

    store, key = Store(settings), ".local/ready"
    store.create_bucket()
    store.put_once(key, b"ready")
    if store.get(key) != b"ready":
        raise PartError("an object read back differs from what was put")
