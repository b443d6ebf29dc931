"""One installation's usage topic, ledger tables and Faust workers, as the ledger's tests need them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from infra.kafka import TopicPartition, open_producer
from infra.kafka_admin import open_admin
from infra.postgres import Connection, connect
from infra.settings import PostgresSettings, ReplaySettings, replay_settings
from schemas.codec import encode
from schemas.keys import ledger_group
from schemas.records import UsageRecorded
from schemas.topics import USAGE
from streams.replay.verify import wait_for_ledger
from tests.conditions import eventually
from tests.factories import usage
from tests.processes import Process, free_port

Spawn = Callable[..., Process]

#: A killed worker's partitions are free after this long, instead of 10 s.
SESSION = {"INFERLOG_LEDGER_SESSION_S": "3"}


class LedgerWorld:
    """`env` reaches the servers; `spawn` starts processes that end with the test."""

    def __init__(self, env: dict[str, str], spawn: Spawn) -> None:
        self.env = env
        self.spawn = spawn
        self.settings: ReplaySettings = replay_settings(env)
        self.topic = USAGE.in_namespace(self.settings.kafka.namespace).name
        self.group = ledger_group(self.settings.kafka.namespace)

    def worker(
        self, app: str = "streams.app", *, settings: Mapping[str, str] | None = None, ready: bool = True
    ) -> Process:
        """A Faust worker, started exactly as documented."""
        port = str(free_port())
        process = self.spawn(
            ["faust", "-A", app, "worker", "-l", "info"],
            {**self.env, **SESSION, "INFERLOG_STREAMS_PORT": port, **(settings or {})},
            name="ledger",
        )
        process.url = f"http://127.0.0.1:{port}"  # type: ignore[attr-defined]
        if ready:
            process.wait_ready(f"http://127.0.0.1:{port}/readyz")
        return process

    async def produce(self, records: Sequence[UsageRecorded | bytes], *, partition: int | None = None) -> None:
        """Put records on the usage topic, in order."""
        async with open_producer(self.settings.kafka) as producer:
            futures = [
                await producer.enqueue(
                    self.topic,
                    encode(r) if isinstance(r, UsageRecorded) else r,
                    key=r.customer_id.encode() if isinstance(r, UsageRecorded) else b"?",
                    partition=partition,
                    timeout_s=30,
                )
                for r in records
            ]
            await producer.acknowledged(futures, timeout_s=30)

    @asynccontextmanager
    async def tables(self) -> AsyncIterator[Connection]:
        connection = await connect(PostgresSettings(dsn=self.env["INFERLOG_POSTGRES_DSN"]))
        try:
            yield connection
        finally:
            await connection.close(timeout=5)

    async def sums(self) -> dict[str, int]:
        """Total per meter."""
        async with self.tables() as c:
            rows = await c.fetch("SELECT meter, sum(quantity) AS quantity FROM usage_hourly GROUP BY meter")
        return {r["meter"]: int(r["quantity"]) for r in rows}

    async def value(self, statement: str) -> Any:
        async with self.tables() as c:
            return await c.fetchval(statement)

    async def positions(self) -> dict[int, int]:
        """The ledger's next offset per partition."""
        statement = "SELECT partition, next_offset FROM consumer_offsets WHERE consumer_group = $1"
        async with self.tables() as c:
            rows = await c.fetch(statement, self.group)
        return {r["partition"]: r["next_offset"] for r in rows}

    async def committed(self) -> dict[int, int]:
        """The broker's committed offset of the group per partition."""
        async with open_admin(self.settings.kafka) as admin:
            found: dict[TopicPartition, int] = await admin.committed(self.group)
        return {tp.partition: offset for tp, offset in found.items()}

    async def caught_up(self) -> None:
        """The ledger holds all that is on the topic."""
        await wait_for_ledger(self.settings, timeout_s=60)

    async def acknowledged(self) -> None:
        """The broker's committed offsets are where the ledger is."""

        async def equal() -> bool:
            return await self.committed() == await self.positions()

        await eventually(equal, what="broker and ledger at the same offsets")

    @asynccontextmanager
    async def blocked_batch(self) -> AsyncIterator[None]:
        """Inside, a batch waits in the middle of its transaction: processed_requests written, usage_hourly locked."""
        async with self.tables() as c:
            transaction = c.transaction()
            await transaction.start()
            await c.execute("LOCK TABLE usage_hourly IN ACCESS EXCLUSIVE MODE")
            try:
                yield
            finally:
                await transaction.rollback()

    async def wait_blocked(self) -> None:
        """Until some writer waits for that lock."""

        async def waiting() -> bool:
            return bool(
                await self.value(
                    "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'usage_hourly'::regclass "
                    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
                )
            )

        await eventually(waiting, what="a batch in the middle of its transaction")


def health(process: Process) -> dict[str, Any]:
    """What /healthz says."""
    with urllib.request.urlopen(f"{process.url}/healthz", timeout=5) as answer:  # type: ignore[attr-defined]
        found: dict[str, Any] = json.load(answer)
        return found


def usages(count: int, *, customers: int = 7) -> list[UsageRecorded]:
    """Usage of that many requests, 4 items each, over several customers and so over several partitions."""
    return [usage(customer_id=f"cus_{n % customers}", quantities={"requests": 1, "items": 4}) for n in range(count)]
