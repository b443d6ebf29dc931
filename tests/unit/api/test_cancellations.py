from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

import pytest

from api import cancellations as module
from api.cancellations import Cancellations
from infra.kafka import BusUnavailable
from schemas.codec import decode
from schemas.headers import SCHEMA
from schemas.ids import cancelled_id, new_request_id
from schemas.records import RequestCancelled
from tests.conditions import eventually
from tests.fakes import FakeSender

NOON = datetime(2026, 5, 1, 12, tzinfo=timezone.utc)


class Desk:
    """Cancellations and the senders that were opened for them; `away` keeps new ones from being opened."""

    def __init__(self) -> None:
        self.senders: list[FakeSender] = []
        self.away = False
        self.fails: Exception | None = None
        self.cancellations = Cancellations(self.open, namespace="n", now=lambda: NOON)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        if self.away:
            raise BusUnavailable("switched off")
        self.senders.append(sender := FakeSender())
        sender.fails = self.fails
        yield sender

    def told(self) -> list[RequestCancelled]:
        return [decode(value, RequestCancelled) for s in self.senders for _, _, _, value in s.sent]


@pytest.fixture
async def desk(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    monkeypatch.setattr(module, "_REOPEN_PAUSE_S", 0.0)
    desk = Desk()
    running = asyncio.ensure_future(desk.cancellations.run())
    yield desk
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_workers_hear_whose_caller_has_gone(desk: Desk) -> None:
    ids = [new_request_id() for _ in range(200)]
    for at, request_id in enumerate(ids):
        desk.cancellations.gone(request_id, f"cust_{at % 3}")
    await eventually(lambda: len(desk.told()) == 200)
    told = {r.request_id: r for r in desk.told()}
    assert told[ids[4]] == RequestCancelled(
        event_id=cancelled_id(ids[4]),
        occurred_at=NOON,
        request_id=ids[4],
        customer_id="cust_1",
        reason="caller gone",
    )
    (sender,) = desk.senders
    assert {topic for topic, _, _, _ in sender.sent} == {"n.inference.cancellations.v1"}
    assert {key for _, _, key, _ in sender.sent} == {i.bytes for i in ids}
    assert sender.headers[SCHEMA] == RequestCancelled.SCHEMA.encode()


async def test_nothing_is_opened_while_nobody_has_gone(desk: Desk) -> None:
    await asyncio.sleep(0)
    assert desk.senders == []


async def test_while_kafka_is_away_the_newest_wait_in_bounded_memory(desk: Desk) -> None:
    desk.away = True
    ids = [new_request_id() for _ in range(3000)]
    for request_id in ids:
        desk.cancellations.gone(request_id, "cust_a")
    assert desk.cancellations.counts == {"callers_gone": 3000, "cancellations_dropped": 2000}
    desk.away = False
    await eventually(lambda: [r.request_id for r in desk.told()] == ids[-1000:])


async def test_what_cannot_be_sent_is_dropped_and_another_sender_is_opened(desk: Desk) -> None:
    desk.fails = BusUnavailable("not acknowledged")
    desk.cancellations.gone(new_request_id(), "cust_a")
    await eventually(lambda: desk.cancellations.counts["cancellations_dropped"] == 1)
    await eventually(lambda: desk.senders[0].abandoned)
    desk.fails = None
    later: UUID = new_request_id()
    desk.cancellations.gone(later, "cust_a")
    await eventually(lambda: [r.request_id for r in desk.told()] == [later])
