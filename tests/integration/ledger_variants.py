"""The ledger with one mechanism removed each, for the tests that must fail without it.

Started like the real one: `faust -A tests.integration.ledger_variants:double_counting worker -l info`.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import faust
from faust.transport.drivers import aiokafka as kafka_driver
from mode.supervisors import CrashingSupervisor

from infra import schema_feed
from infra.postgres import Connection
from infra.settings import streams_settings
from streams.agents import Deliver, raw_record, raw_topic
from streams.app import LedgerApp, build
from streams.ledger import Ledger, LedgerTransaction
from streams.projections import LocatedUsage


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


class FailsLedger(Ledger):
    """Raises in the middle of every batch, which no deadline and no retry covers."""

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[LedgerTransaction]:
        async with super().transaction() as transaction:
            yield transaction
            raise RuntimeError("an error that nobody foresaw")


class FailsApp(LedgerApp):
    def new_ledger(self, pool: Any) -> Ledger:
        return FailsLedger(pool, group=self.conf.id)


class CommitsAcknowledgedApp(LedgerApp):
    """With Faust's own consumer, which commits what its streams acknowledged."""

    def _new_transport(self) -> Any:
        return kafka_driver.Transport(self.conf.broker_consumer, self)


class LearnsNothingApp(LedgerApp):
    """Without the schemas on the log: what the lock file of this process lacks is unknown for ever."""

    async def on_start(self) -> None:
        schema_feed.teach = lambda _records, _learn=None: Counter()
        await super().on_start()


double_counting = build(streams_settings(), app_class=CountsEverythingApp)
dies_after_commit = build(streams_settings(), app_class=DiesAfterCommitApp)
early_ack = build(streams_settings(), app_class=CommitsAcknowledgedApp, register=register_with_take)
stuck = build(streams_settings(), register=register_stuck)
fails = build(streams_settings(), app_class=FailsApp)
learns_nothing = build(streams_settings(), app_class=LearnsNothingApp)
