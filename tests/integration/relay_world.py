"""One installation's outbox and its topics, and relays as processes, as the relay's tests need them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

from aiokafka.admin import AIOKafkaAdminClient

from infra.kafka_admin import open_admin
from infra.outbox import add_facts
from infra.postgres import Connection, connect, queries
from infra.settings import PostgresSettings, ReplaySettings, replay_settings
from infra.turns import Turn
from schemas.codec import DecodeError, decode_at
from schemas.facts import Fact, PriceBookPublished, RouteChanged
from schemas.headers import Stamp
from schemas.ids import new_event_id
from schemas.topics import PRICES, ROUTES, Topic
from streams.log import open_log
from streams.outbox.relay import Relay
from streams.outbox.standing import Standing
from tests.conditions import eventually
from tests.factories import VERSION
from tests.processes import Process

STAMP = Stamp("tests")


def price(name: str) -> PriceBookPublished:
    return PriceBookPublished(
        event_id=new_event_id(),
        occurred_at=datetime.now(timezone.utc),
        price_id=name,
        currency="usd",
        amounts_micros={"items": 100},
        actor="tests",
    )


def route(model: str, *, reason: str | None = None) -> RouteChanged:
    return RouteChanged(
        event_id=new_event_id(),
        occurred_at=datetime.now(timezone.utc),
        model=model,
        version=VERSION,
        pool="default",
        spread=1,
        price_id="standard-v1",
        actor="tests",
        reason=reason,
    )


class RelayWorld:
    """`env` reaches the servers; `spawn` starts processes that end with the test."""

    def __init__(self, env: dict[str, str], spawn: Callable[..., Process]) -> None:
        self.env = env
        self.settings: ReplaySettings = replay_settings(env)
        self._spawn = spawn

    def relay(self) -> Process:
        """A relay as documented."""
        return self._spawn(["inferlog", "outbox", "relay"], self.env, name="relay")

    def variant(self, name: str) -> Process:
        """A relay of tests.integration.relay_variants."""
        return self._spawn(["python", "-m", "tests.integration.relay_variants", name], self.env, name=name)

    @asynccontextmanager
    async def relaying(self, standing: Standing | None = None) -> AsyncIterator[Relay]:
        """A relay inside the test."""
        relay = Relay(self.settings.kafka, self.settings.postgres)
        relay.standing = standing or relay.standing
        task = asyncio.create_task(relay.run())
        try:
            yield relay
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    @asynccontextmanager
    async def tables(self) -> AsyncIterator[Connection]:
        connection = await connect(PostgresSettings(dsn=self.env["INFERLOG_POSTGRES_DSN"]))
        try:
            yield connection
        finally:
            connection.terminate()

    async def told(self) -> None:
        """As if a relay had run before: nothing is older than the outbox."""
        async with self.tables() as c:
            await c.execute(
                "INSERT INTO outbox_backfill (source) "
                "VALUES ('prices'), ('model_versions'), ('routes'), ('api_keys'), ('customers')"
            )

    async def write(self, facts: Sequence[Fact], *, topic: Topic = PRICES) -> None:
        """One change with these facts."""
        async with self.tables() as c, c.transaction():
            await add_facts(c, topic, [("k", fact) for fact in facts], stamp=STAMP)

    async def write_many(self, count: int, *, writers: int, seed: int) -> dict[str, list[UUID]]:
        """Changes by several writers at once, some rolled back; the ids of the others per topic, in table order."""
        chance = random.Random(seed)
        plan = [
            [(chance.random(), chance.choice([PRICES, ROUTES]), chance.randint(1, 3)) for _ in range(200)]
            for _ in range(writers)
        ]
        left = [count]

        async def writer(changes: list[tuple[float, Topic, int]]) -> None:
            async with self.tables() as c:
                for number, topic, facts in changes:
                    if left[0] <= 0:
                        return
                    made = [price("p") if topic is PRICES else route("m") for _ in range(facts)]
                    transaction = c.transaction()
                    await transaction.start()
                    await add_facts(c, topic, [("k", fact) for fact in made], stamp=STAMP)
                    if number < 0.2:
                        await transaction.rollback()
                        continue
                    await c.executemany(
                        "INSERT INTO written SELECT position, event_id, topic FROM outbox WHERE event_id = $1",
                        [(fact.event_id,) for fact in made],
                    )
                    await transaction.commit()
                    left[0] -= facts

        async with self.tables() as c:
            await c.execute("CREATE TABLE IF NOT EXISTS written (position bigint, event_id uuid, topic text)")
            await asyncio.gather(*(writer(changes) for changes in plan))
            rows = await c.fetch("SELECT event_id, topic FROM written ORDER BY position")
        return {t.name: [r["event_id"] for r in rows if r["topic"] == t.name] for t in (PRICES, ROUTES)}

    async def published(self, topic: Topic = PRICES) -> list[UUID]:
        """The event ids on a topic as a reader of committed records decodes them; what is no fact is passed over."""
        name = topic.in_namespace(self.settings.kafka.namespace).name
        found = []
        async with open_log(self.settings.kafka) as reader:
            async for record in reader.read(name, await reader.freeze(name, 1)):
                with suppress(DecodeError):
                    found.append(decode_at(record, topic.record).event_id)
        return found

    async def remake(self, topic: Topic) -> None:
        """Delete a topic and make it anew, as somebody may do who was told that it is broken."""
        own = topic.in_namespace(self.settings.kafka.namespace)
        client = AIOKafkaAdminClient(bootstrap_servers=self.settings.kafka.bootstrap)
        await client.start()
        try:
            await client.delete_topics([own.name])

            async def gone() -> bool:
                return own.name not in await client.list_topics()

            await eventually(gone, what=f"{own.name} deleted")
        finally:
            await client.close()
        async with open_admin(self.settings.kafka) as admin:
            assert await admin.create_topics([own]) == [own.name]

    async def noted(self, topic: Topic = PRICES) -> int | None:
        """The offset up to which a topic has been looked at."""
        async with self.tables() as c:
            found: int | None = await c.fetchval("SELECT next_offset FROM outbox_topics WHERE topic = $1", topic.name)
        return found

    async def emptied(self, *, timeout_s: float = 60.0) -> None:
        """Until nothing waits."""

        async def empty() -> bool:
            async with self.tables() as c:
                return not await c.fetchval("SELECT count(*) FROM outbox")

        await eventually(empty, timeout_s=timeout_s, what="an empty outbox")

    async def active_session(self) -> int | None:
        """The Postgres session that holds the relay's lock."""
        async with self.tables() as c:
            row: Any = await c.fetchrow(queries("infra")["outbox_relay_session"], Turn.RELAY)
        return None if row is None else int(row["pid"])


async def frozen(process: Process) -> None:
    """Until the process has stopped itself."""

    def stopped() -> bool:
        assert process.returncode is None, process.tail()
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    await eventually(stopped, timeout_s=60, what="a frozen relay")
