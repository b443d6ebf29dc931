"""The sink without its reader: decoded batches straight into the ledger, and the same rows as bare statements.

What these do is the ceiling of whatever reads the topic into this Postgres.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from benchmarks.ledger.pace import Pace, Sample, between
from benchmarks.ledger.watched import servers_cpu
from benchmarks.ledger.world import World
from infra.kafka import TopicPartition, open_consumer
from infra.postgres import open_connection, open_pool, queries
from infra.settings import PostgresSettings
from schemas.topics import USAGE
from streams.ledger.delivery import Delivery
from streams.ledger.ports import Transaction
from streams.ledger.projections import hourly_rows, processed_rows
from streams.ledger.raw import RawRecord
from streams.ledger.sorting import SortedBatch
from streams.ledger.stretches import following
from streams.ledger.tables import Ledger

Columns = list[list[object]]


async def decoded_batches(world: World, *, records: int, batch: int) -> list[SortedBatch]:
    """The first records of the topic as batches of this size, ready to be written."""
    preparing = Delivery(_NoLedger(), give_up_s=1.0)
    found: list[SortedBatch] = []
    async with open_consumer(world.kafka, group=None, max_poll_records=batch) as consumer:
        places = [TopicPartition(world.topic, p) for p in range(USAGE.partitions)]
        consumer.assign(places)
        await consumer.seek_to_beginning(*places)
        stands = dict.fromkeys(places, 0)
        while sum(b.total for b in found) < records:
            raw: list[RawRecord] = []
            for tp, fetched in (await consumer.getmany(timeout_ms=1000, max_records=batch)).items():
                for follows, r in following(fetched, stands[tp]):
                    place = {"topic": tp.topic, "partition": tp.partition, "offset": r.offset, "follows": follows}
                    raw.append(RawRecord(**place, key=r.key, value=r.value))
                stands[tp] = raw[-1].offset + 1
            if raw:
                found.append(await preparing.prepare(raw))
    return found


class _NoLedger:
    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        raise AssertionError("nothing is written here")


async def through_ledger(world: World, env: dict[str, str], batches: Sequence[SortedBatch]) -> Pace:
    """The ledger's own transaction, batch after batch, on one connection."""
    async with open_pool(PostgresSettings(dsn=env["INFERLOG_POSTGRES_DSN"]), max_size=1) as pool:
        delivery = Delivery(Ledger(pool, group=world.group), give_up_s=1.0)
        first = None
        for batch in batches:
            await delivery.write(batch)
            first = first or _sample(world, batch.total)  # the first one opened the connection and made the statements
        assert first is not None
        return between(first, _sample(world, sum(b.total for b in batches)))


async def bare_statements(world: World, env: dict[str, str], batches: Sequence[SortedBatch]) -> Pace:
    """The same rows as columns made before, three prepared statements and a COMMIT a batch; no answer is looked at."""
    sql = queries("streams.ledger")
    ready = [_columns_of(b) for b in batches]
    async with open_connection(PostgresSettings(dsn=env["INFERLOG_POSTGRES_DSN"])) as connection:
        insert, add = await connection.prepare(sql["insert_processed"]), await connection.prepare(sql["add_usage"])
        place = await connection.prepare(queries("benchmarks.ledger")["note_positions"])
        first = None
        for batch, (processed, hourly, positions) in zip(batches, ready, strict=True):
            async with connection.transaction():
                await insert.fetch(*processed)
                await add.fetch(*hourly)
                await place.fetch(world.group, world.topic, *positions)
            first = first or _sample(world, batch.total)
        assert first is not None
        return between(first, _sample(world, sum(b.total for b in batches)))


def _columns_of(batch: SortedBatch) -> tuple[Columns, Columns, Columns]:
    usages = batch.usages.turns[0]
    positions = [(s.partition, s.end) for s in batch.stretches]
    return _columns(processed_rows(usages)), _columns([r.values() for r in hourly_rows(usages)]), _columns(positions)


def _columns(rows: Sequence[tuple[object, ...]]) -> Columns:
    return [list(column) for column in zip(*rows, strict=True)]


def _sample(world: World, records: int) -> Sample:
    return Sample(at_s=time.monotonic(), records=records, cpu_s={"own": time.process_time(), **servers_cpu(world.pids)})
