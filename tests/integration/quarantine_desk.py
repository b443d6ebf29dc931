"""What the tests of redriving do: a ledger that sets aside what it is told to, letters of workers, and the commands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from typing import Any

from click.testing import CliRunner, Result

from infra.cli import cli
from infra.kafka import open_producer
from infra.postgres import open_pool
from schemas.codec import decode_at, encode
from schemas.evidence import dead_letter
from schemas.records import DeadLetter, UsageRecorded
from schemas.topics import DEAD_LETTERS, USAGE
from streams.ledger.projections import LocatedUsage, content_digest
from streams.ledger.raw import RawRecord
from streams.ledger.stretches import stretches
from streams.ledger.tables import Ledger
from streams.log import open_log
from tests.conditions import eventually
from tests.conftest import run_apart
from tests.factories import usage
from tests.integration.ledger_world import LedgerWorld, Spawn

PARTITION = 3
UNKNOWN = "schema id 9999 is unknown here"
BECAUSE = ("--reason", "the ledger was upgraded")


class QuarantineDesk(LedgerWorld):
    """One installation's usage topic, ledger tables and commands."""

    def __init__(self, env: dict[str, str], spawn: Spawn) -> None:
        super().__init__(env, spawn)
        self._read = 0

    async def count_but(self, refused: Mapping[int, str]) -> None:
        """Read on in PARTITION as a ledger does that sets the records at these offsets aside, each for this reason."""
        async with open_log(self.settings.kafka) as reader:
            spans = await reader.freeze(self.topic, USAGE.partitions)
            entries = [e async for e in reader.read(self.topic, {PARTITION: spans[PARTITION]})][self._read :]
        records = [
            RawRecord(topic=e.topic, partition=e.partition, offset=e.offset, follows=e.offset, key=e.key, value=e.value)
            for e in entries
        ]
        self._read += len(records)
        now = datetime.now(timezone.utc)
        letters = [dead_letter(r, refused[r.offset], occurred_at=now) for r in records if r.offset in refused]
        async with open_pool(self.settings.postgres) as pool, Ledger(pool, group=self.group).transaction() as t:
            for r in records:
                if r.offset not in refused:
                    await t.count([_located(r)])
            new = await t.set_aside(letters)
            await t.advance(stretches(records))
            await t.tell(new)

    async def set_aside(self, records: Sequence[UsageRecorded | bytes], reason: str = UNKNOWN) -> list[str]:
        """Put records on the log and have each set aside; returns how commands call them."""
        first = self._read
        await self.produce(records, partition=PARTITION)
        await self.count_but({first + n: reason for n in range(len(records))})
        return [f"usage/{PARTITION}/{first + n}" for n in range(len(records))]

    @asynccontextmanager
    async def held(self, table: str) -> AsyncIterator[None]:
        """Inside, whoever writes to this table waits."""
        async with self.tables() as c:
            transaction = c.transaction()
            await transaction.start()
            await c.execute(f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE")
            try:
                yield
            finally:
                await transaction.rollback()

    async def waiting(self, sessions: int) -> None:
        """Until so many sessions of this database wait for a lock."""
        statement = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )

        async def wait() -> bool:
            return bool(await self.value(statement) == sessions)

        await eventually(wait, what=f"{sessions} sessions to wait for a lock")

    async def alone(self) -> None:
        """Until no other session of this database is left."""
        statement = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )

        async def alone() -> bool:
            return bool(await self.value(statement) == 0)

        await eventually(alone, what="the other sessions to end")

    async def tell(self, letters: Sequence[DeadLetter | bytes]) -> None:
        """Put these on the dead-letter topic, as a worker does."""
        topic = DEAD_LETTERS.in_namespace(self.settings.kafka.namespace).name
        async with open_producer(self.settings.kafka) as producer:
            for x in letters:
                value = encode(x) if isinstance(x, DeadLetter) else x
                await producer.send(topic, value, key=b"k", timeout_s=10)

    def call(self, *arguments: str) -> Result:
        """`inferlog dead-letters …` in this process."""
        return self.run("dead-letters", *arguments)

    def run(self, *arguments: str) -> Result:
        """`inferlog …` in this process."""
        return run_apart(asyncio.to_thread(CliRunner().invoke, cli, arguments, env=self.env))

    def said(self, *arguments: str, exit_code: int = 0) -> dict[str, Any]:
        """The JSON that a command printed."""
        result = self.call(*arguments, "--json")
        assert result.exit_code == exit_code, (result.output, result.exception)
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    def outcomes(self, *arguments: str, exit_code: int = 0) -> dict[str, int]:
        """How many letters came to what, those that none came to left out."""
        counts = self.said(*arguments, exit_code=exit_code)["counts"]
        return {outcome: n for outcome, n in counts.items() if n}

    async def states(self) -> dict[str, int]:
        async with self.tables() as c:
            rows = await c.fetch("SELECT state, count(*) AS letters FROM dead_letters GROUP BY state")
        return {r["state"]: r["letters"] for r in rows}


def _located(record: RawRecord) -> LocatedUsage:
    decoded = decode_at(record, UsageRecorded)
    return LocatedUsage(record=decoded, source=record, digest=content_digest(decoded))


def items(count: int) -> list[UsageRecorded]:
    """Usage of that many requests, 4 items each."""
    return [usage(customer_id=f"cus_{n % 7}", quantities={"requests": 1, "items": 4}) for n in range(count)]
