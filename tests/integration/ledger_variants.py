"""The ledger with one mechanism removed each, for the tests that must fail without it.

Started like the real one: `faust -A tests.integration.ledger_variants:double_counting worker -l info`.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import faust
from aiokafka import AIOKafkaConsumer
from faust.transport.drivers import aiokafka as kafka_driver
from mode.supervisors import CrashingSupervisor

import streams.app
import streams.ledger.transaction
from infra import schema_feed
from infra.postgres import Connection
from infra.settings import streams_settings
from schemas.records import DeadLetter
from streams.agents import Deliver, raw_record, raw_topic
from streams.app import LedgerApp, build
from streams.ledger.loop import UsageLoop
from streams.ledger.projections import Counted, LocatedUsage
from streams.ledger.stretches import Stretch
from streams.ledger.tables import Ledger
from streams.ledger.transaction import LedgerTransaction


class CountsEverything(LedgerTransaction):
    """Without I1's mechanism: whatever the insert into processed_requests says, all of it is counted."""

    async def _insert_processed(self, usages: Sequence[LocatedUsage]) -> Sequence[LocatedUsage]:
        await super()._insert_processed(usages)
        return usages


class CountsEverythingLedger(Ledger):
    def on(self, connection: Connection) -> LedgerTransaction:
        return CountsEverything(connection, group=self._group)


class CountsEverythingApp(LedgerApp):
    def new_ledger(self, pool: Any) -> Ledger:
        return CountsEverythingLedger(pool, group=self.conf.id)


class DiesAfterCommitLedger(Ledger):
    """The process is gone between a COMMIT and its acknowledgement."""

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[LedgerTransaction]:
        async with super().transaction() as transaction:
            yield transaction
        os._exit(9)


class DiesAfterCommitApp(LedgerApp):
    def new_ledger(self, pool: Any) -> Ledger:
        return DiesAfterCommitLedger(pool, group=self.conf.id)


def die_at(point: str) -> None:
    """kill -9 to this process, when the test wants it to die here."""
    if os.environ.get("DIES_AT") == point:
        os.kill(os.getpid(), signal.SIGKILL)


class DiesAtTransaction(LedgerTransaction):
    """Dies at one of POINTS, in the first batch that gets there."""

    async def count(self, usages: Sequence[LocatedUsage]) -> Counted:
        die_at("before count")
        counted = await super().count(usages)
        die_at("after count")
        return counted

    async def set_aside(self, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
        new = await super().set_aside(letters)
        die_at("after set_aside")
        return new

    async def advance(self, stretches: Sequence[Stretch]) -> None:
        await super().advance(stretches)
        die_at("after advance")

    async def tell(self, letters: Sequence[DeadLetter]) -> None:
        await super().tell(letters)
        die_at("after tell")


class DiesAtLedger(Ledger):
    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[LedgerTransaction]:
        async with super().transaction() as transaction:
            yield transaction
        die_at("after COMMIT")

    def on(self, connection: Connection) -> LedgerTransaction:
        return DiesAtTransaction(connection, group=self._group)


class DiesAtApp(LedgerApp):
    def new_ledger(self, pool: Any) -> Ledger:
        return DiesAtLedger(pool, group=self.conf.id)

    async def on_start(self) -> None:
        commit = AIOKafkaConsumer.commit

        async def commit_and_die(self: AIOKafkaConsumer, offsets: Any = None) -> None:
            await commit(self, offsets)
            die_at("after the offsets")

        AIOKafkaConsumer.commit = commit_and_die
        await super().on_start()


def register_with_take(
    app: faust.App, topic_name: str, deliver: Deliver, *, batch_records: int, batch_wait_s: float
) -> Any:
    """Faust's usual way: a batch is acknowledged when its body is left, however it is left."""

    @app.agent(raw_topic(app, topic_name), concurrency=1, supervisor_strategy=CrashingSupervisor)
    async def usage_ledger(stream: Any) -> None:
        stream.get_root_stream().add_processor(_event)
        async for events in stream.take(batch_records, within=batch_wait_s):
            for event in events:
                event.message.follows = event.message.offset
            await deliver([raw_record(event) for event in events])

    return usage_ledger


async def _event(_value: bytes) -> Any:
    """The event behind a value, which `take` does not hand out."""
    return faust.streams.current_event()


def register_stuck(app: faust.App, topic_name: str, deliver: Deliver, **_options: Any) -> Any:
    """A consumer as seen in the field: in its group, heartbeating, and never getting anywhere."""

    @app.agent(raw_topic(app, topic_name), concurrency=1, supervisor_strategy=CrashingSupervisor)
    async def usage_ledger(stream: Any) -> None:
        async for _events in stream.noack_take(10, within=0.1):
            await asyncio.Event().wait()

    return usage_ledger


def register_silent(
    app: faust.App, topic_name: str, deliver: Deliver, *, batch_records: int, batch_wait_s: float
) -> Any:
    """A stream that ends after its first batch, as one does whose codec raises: the process lives on."""

    @app.agent(raw_topic(app, topic_name), concurrency=1, supervisor_strategy=CrashingSupervisor)
    async def usage_ledger(stream: Any) -> None:
        consumer: Any = app.consumer
        async for events in stream.noack_take(batch_records, within=batch_wait_s):
            consumer.cover(await deliver([raw_record(event) for event in events]))
            return

    return usage_ledger


class SilentLoop(UsageLoop):
    """The same of the loop: it stops to read after its first batch."""

    async def _step(self, consumer: Any) -> None:
        await super()._step(consumer)
        if self._writing is not None:
            await self._writing
            await asyncio.Event().wait()


class SilentApp(LedgerApp):
    async def on_start(self) -> None:
        vars(streams.app)["UsageLoop"] = SilentLoop
        await super().on_start()


class FailsLedger(Ledger):
    """Raises in the middle of a batch, which no deadline and no retry covers; FAILS_AFTER batches pass before."""

    _left = int(os.environ.get("FAILS_AFTER", "0"))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[LedgerTransaction]:
        async with super().transaction() as transaction:
            yield transaction
            if self._left <= 0:
                raise RuntimeError("an error that nobody foresaw")
        self._left -= 1


class FailsApp(LedgerApp):
    def new_ledger(self, pool: Any) -> Ledger:
        return FailsLedger(pool, group=self.conf.id)


class CommitsAcknowledgedApp(LedgerApp):
    """With Faust's own consumer, which commits what its streams acknowledged."""

    def _new_transport(self) -> Any:
        return kafka_driver.Transport(self.conf.broker_consumer, self)

    async def _watch_group(self) -> None:
        """It tells nothing of its group."""


class LearnsNothingApp(LedgerApp):
    """Without the schemas on the log: what the lock file of this process lacks is unknown for ever."""

    async def on_start(self) -> None:
        schema_feed.teach = lambda _records, _learn=None: Counter()
        await super().on_start()


class UnorderedApp(LedgerApp):
    """Writes rows in the order of a hat, so that writers of the same rows wait for each other in circles."""

    async def on_start(self) -> None:
        for name in ("processed_rows", "hourly_rows"):
            _shuffle(vars(streams.ledger.transaction), name)
        await super().on_start()


def _shuffle(names: dict[str, Any], name: str) -> None:
    ordered = names[name]
    names[name] = lambda usages: random.sample(rows := ordered(usages), len(rows))


double_counting = build(streams_settings(), app_class=CountsEverythingApp)
dies_after_commit = build(streams_settings(), app_class=DiesAfterCommitApp)
early_ack = build(streams_settings(), app_class=CommitsAcknowledgedApp, register=register_with_take)
stuck = build(streams_settings(), register=register_stuck)
fails = build(streams_settings(), app_class=FailsApp)
learns_nothing = build(streams_settings(), app_class=LearnsNothingApp)
dies_at = build(streams_settings(), app_class=DiesAtApp)
silent = build(streams_settings(), app_class=SilentApp, register=register_silent)
unordered = build(streams_settings(), app_class=UnorderedApp)
