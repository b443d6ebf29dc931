from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from api import request_log as module
from api.errors import AcceptanceUnknown, TooLarge, Unavailable
from api.request_log import RequestLog
from infra.kafka import BusUnavailable, RecordTooLarge
from infra.kafka_sender import NotSent
from schemas.codec import decode
from schemas.records import InferenceRequested
from schemas.topics import partition_for
from tests.conditions import eventually
from tests.factories import requested
from tests.fakes import FakeSender


class Opening:
    """Hands out senders, or fails to."""

    def __init__(self) -> None:
        self.senders: list[FakeSender] = []
        self.away = False

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[FakeSender]:
        if self.away:
            raise BusUnavailable("switched off")
        self.senders.append(FakeSender())
        yield self.senders[-1]


@asynccontextmanager
async def running(opening: Opening, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RequestLog]:
    monkeypatch.setattr(module, "_REOPEN_PAUSE_S", 0.01)
    log = RequestLog(opening, namespace="")
    task = asyncio.ensure_future(log.run())
    if not opening.away:
        await eventually(lambda: log.trouble() is None)
    yield log
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_request_goes_to_a_partition_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, record = Opening(), requested()
    async with running(opening, monkeypatch) as log:
        await log.publish(record, pool="default", spread=2)
    topic, partition, key, value = opening.senders[0].sent[0]
    assert topic == "inference.requests.default.v1"
    assert partition == partition_for(record.version, record.request_id.int, partitions=8, spread=2)
    assert key == record.request_id.bytes
    assert decode(value, InferenceRequested) == record


async def test_kafka_away_at_the_start_is_a_refusal_and_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, record = Opening(), requested()
    opening.away = True
    async with running(opening, monkeypatch) as log:
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match=str(record.request_id)):
            await log.publish(record, pool="default", spread=1)
        opening.away = False
        await eventually(lambda: log.trouble() is None)
        await log.publish(record, pool="default", spread=1)


async def test_an_overdue_acknowledgement_gives_the_sender_up(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, record = Opening(), requested()
    async with running(opening, monkeypatch) as log:
        opening.senders[0].fails = BusUnavailable("not acknowledged")
        with pytest.raises(AcceptanceUnknown, match=str(record.request_id)) as unknown:
            await log.publish(record, pool="default", spread=1)
        assert "may have been accepted" in unknown.value.message
        assert unknown.value.status == 503
        assert unknown.value.code == "acceptance_unknown"
        # The client must not pay twice without having been asked.
        assert unknown.value.headers == {"x-should-retry": "false"}
        await eventually(lambda: len(opening.senders) == 2 and log.trouble() is None)
        assert opening.senders[0].abandoned
        await log.publish(record, pool="default", spread=1)
        assert len(opening.senders[1].sent) == 1


async def test_a_record_that_was_never_sent_was_not_accepted_and_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening, record = Opening(), requested()
    async with running(opening, monkeypatch) as log:
        opening.senders[0].fails = NotSent("another record's acknowledgement was overdue")
        with pytest.raises(Unavailable, match="was not accepted") as refused:
            await log.publish(record, pool="default", spread=1)
        assert refused.value.code == "log_away"
        assert "Retry-After" in refused.value.headers
        await eventually(lambda: len(opening.senders) == 2 and log.trouble() is None)
        assert opening.senders[0].abandoned


async def test_a_record_too_large_is_the_callers_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = Opening()
    async with running(opening, monkeypatch) as log:
        opening.senders[0].fails = RecordTooLarge("9 MB")
        with pytest.raises(TooLarge):
            await log.publish(requested(), pool="default", spread=1)
        assert log.trouble() is None


async def test_a_missing_topic_does_not_give_up_the_sender_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = Opening()
    async with running(opening, monkeypatch) as log:
        with pytest.raises(Unavailable):
            await log.publish(requested(), pool="gpu-a", spread=1)
        assert log.trouble() is None
        assert not opening.senders[0].abandoned


async def test_a_spread_wider_than_the_topic_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    opening = Opening()
    async with running(opening, monkeypatch) as log:
        opening.senders[0].topics = {"inference.requests.small.v1": 1}
        await log.publish(requested(), pool="small", spread=8)
        assert opening.senders[0].sent[0][1] == 0
