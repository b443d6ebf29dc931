"""The servers that all contenders share, one usage topic, and a database of its own for each of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from benchmarks.ledger.events import Generated, Sums
from docs.demo.shell import say
from infra.kafka import KeyedRecord, open_producer
from infra.local.stack import Stack
from infra.postgres import Connection, open_connection, queries
from infra.provision import provision
from infra.settings import KafkaSettings, PostgresSettings, operator_settings
from schemas.keys import ledger_group
from schemas.topics import USAGE

_SLICE = 20_000
_ACKNOWLEDGED_WITHIN_S = 60.0


class World:
    """`env` reaches the servers, `pids` are theirs, and `home` is a folder for whatever a contender leaves."""

    def __init__(self, home: Path, env: dict[str, str], pids: dict[str, int]) -> None:
        self.home = home
        self.env = env
        self.pids = pids
        self.kafka: KafkaSettings = operator_settings(env).kafka
        self.topic = USAGE.in_namespace(self.kafka.namespace).name
        self.group = ledger_group(self.kafka.namespace)

    async def write(self, generated: Generated) -> float:
        """Put the records on the topic; returns how many a second were drawn, encoded and acknowledged."""
        began = time.perf_counter()
        records = generated.records()
        async with open_producer(self.kafka) as producer:
            while part := [KeyedRecord(self.topic, key, value) for key, value in islice(records, _SLICE)]:
                sent, left = await producer.enqueue_all(part, timeout_s=_ACKNOWLEDGED_WITHIN_S, keys_repeat=True)
                if left:
                    raise RuntimeError(f"{len(left)} records were not taken by the producer in time")
                await producer.acknowledged([future for future, _ in sent], timeout_s=_ACKNOWLEDGED_WITHIN_S)
        return generated.events / (time.perf_counter() - began)

    @asynccontextmanager
    async def database(self, name: str) -> AsyncIterator[dict[str, str]]:
        """Settings with an empty ledger of this name, which is gone afterwards."""
        sql, template = queries("benchmarks.ledger"), urlsplit(self.env["INFERLOG_POSTGRES_DSN"]).path[1:]
        own = f"bench_{name.replace('-', '_')}"
        server = PostgresSettings(dsn=self._dsn("postgres"))
        async with open_connection(server, command_timeout_s=60) as connection:
            await connection.execute(sql["create_database"].format(database=own, template=template))
            await connection.execute(sql["checkpoint"])  # what an earlier contender wrote is not this one's to flush
        try:
            yield {**self.env, "INFERLOG_POSTGRES_DSN": self._dsn(own)}
        finally:
            async with open_connection(server, command_timeout_s=60) as connection:
                await connection.execute(sql["drop_database"].format(database=own))

    def _dsn(self, database: str) -> str:
        return urlunsplit(urlsplit(self.env["INFERLOG_POSTGRES_DSN"])._replace(path=f"/{database}"))

    async def position(self, connection: Connection) -> int:
        """Records of the topic that the ledger holds: nothing but records is on it, so offsets count them."""
        found: int = await connection.fetchval(queries("benchmarks.ledger")["position"], self.group, self.topic)
        return found


async def sums_of(connection: Connection) -> Sums:
    """What the ledger holds, summed as the generator sums."""
    rows = await connection.fetch(queries("benchmarks.ledger")["sums"])
    return Counter({(r["customer_id"], r["hour"], r["meter"]): r["quantity"] for r in rows})


@contextmanager
def servers(*, keep: bool) -> Iterator[World]:
    """A stack of its own, provisioned, that is gone afterwards."""
    home = Path(tempfile.mkdtemp(prefix="inferlog-bench-"))
    for name in [n for n in os.environ if n.startswith("INFERLOG_")]:
        del os.environ[name]  # what the caller set for another stack
    os.environ["INFERLOG_HOME"] = str(home)
    stack = Stack(home)
    try:
        env = {**stack.up(services_only=True, progress=lambda line: say(f"  {line}")), "INFERLOG_HOME": str(home)}
        asyncio.run(provision(operator_settings(env)))
        running: Mapping[str, int] = {s.name: s.pid for s in stack.status() if s.pid is not None}
        yield World(home, env, {name: running[name] for name in ("kafka", "postgres")})
    finally:
        stack.down(wipe=not keep)
        if not keep:
            shutil.rmtree(home, ignore_errors=True)
