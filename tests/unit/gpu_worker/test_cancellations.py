from __future__ import annotations

import random
from collections import namedtuple
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gpu_worker import cancellations as module
from gpu_worker.cancellations import LONGEST_DEADLINE_S, Cancellations
from infra.settings import api_settings
from schemas.codec import encode
from schemas.ids import cancelled_id, new_request_id
from schemas.records import InferenceRequested, RequestCancelled
from tests.factories import requested

Record = namedtuple("Record", "topic partition offset key value headers", defaults=("t", 0, 0, None, b"", ()))
NOW = datetime(2026, 5, 1, tzinfo=timezone.utc)


class Desk:
    """Cancellations as read at a time that a test moves."""

    def __init__(self, most: int = 1000) -> None:
        self.now = NOW
        self.cancellations = Cancellations(clock=lambda: self.now.timestamp(), most=most)

    def cancel(self, request: InferenceRequested, customer_id: str | None = None, *, ago_s: float = 0.0) -> None:
        record = RequestCancelled(
            event_id=cancelled_id(request.request_id),
            occurred_at=self.now - timedelta(seconds=ago_s),
            request_id=request.request_id,
            customer_id=customer_id or request.customer_id,
            reason="caller gone",
        )
        self.cancellations.take(Record(value=encode(record)))


def asked() -> InferenceRequested:
    return requested(request_id=new_request_id())


def test_a_cancelled_request_is_known_however_often_it_is_cancelled_and_no_other_is() -> None:
    desk, one, other = Desk(), asked(), asked()
    for _ in range(3):
        desk.cancel(one)
    assert desk.cancellations.includes(one)
    assert not desk.cancellations.includes(other)
    assert len(desk.cancellations) == 1


@pytest.mark.parametrize("order", [("mallory", None), (None, "mallory"), ("mallory",)])
def test_only_its_own_customer_cancels_a_request_whoever_else_tries(order: tuple[str | None, ...]) -> None:
    desk, one = Desk(), asked()
    for customer in order:
        desk.cancel(one, customer)
    assert desk.cancellations.includes(one) == (None in order)


def test_what_can_no_longer_wait_anywhere_is_forgotten() -> None:
    desk, old, new = Desk(), asked(), asked()
    desk.cancel(old)
    desk.cancel(asked(), ago_s=LONGEST_DEADLINE_S)  # as read at the start of a worker
    desk.now += timedelta(seconds=LONGEST_DEADLINE_S - 1)
    desk.cancel(new)
    assert desk.cancellations.includes(old)
    desk.now += timedelta(seconds=1)
    desk.cancel(asked())
    assert not desk.cancellations.includes(old)
    assert len(desk.cancellations) == 2


def test_memory_is_bounded_and_the_oldest_are_given_up() -> None:
    desk = Desk(most=100)
    requests = [asked() for _ in range(500)]
    for request in requests:
        desk.cancel(request, ago_s=random.random())
    assert len(desk.cancellations) == 100
    assert all(desk.cancellations.includes(r) for r in requests[-100:])


def test_a_record_from_the_future_is_not_kept_for_longer() -> None:
    desk, one = Desk(), asked()
    desk.cancel(one, ago_s=-10 * LONGEST_DEADLINE_S)
    desk.now += timedelta(seconds=LONGEST_DEADLINE_S)
    desk.cancel(asked())
    assert not desk.cancellations.includes(one)


def test_what_cannot_be_read_is_counted_and_the_rest_goes_on() -> None:
    desk, one = Desk(), asked()
    for junk in (b"", b"\x00junk", encode(one), None):
        desk.cancellations.take(Record(value=junk))
    desk.cancel(one)
    assert desk.cancellations.includes(one)
    assert desk.cancellations.counts["cancellations_unreadable"] == 4


def test_no_request_may_wait_longer_than_cancellations_are_kept() -> None:
    needed = {
        "INFERLOG_KAFKA_BOOTSTRAP": "k:1",
        "INFERLOG_POSTGRES_DSN": "postgresql://u:p@h:1/d",
        "INFERLOG_REDIS_URL": "redis://:p@h:1/0",
        "INFERLOG_S3_ENDPOINT": "http://h:1",
        "INFERLOG_S3_ACCESS_KEY": "a",
        "INFERLOG_S3_SECRET_KEY": "b",
        "INFERLOG_DEADLINE_S": f"{LONGEST_DEADLINE_S:g}",
    }
    assert api_settings(needed).deadline_s == LONGEST_DEADLINE_S
    with pytest.raises(ValueError, match="INFERLOG_DEADLINE_S"):
        api_settings({**needed, "INFERLOG_DEADLINE_S": f"{LONGEST_DEADLINE_S + 1:g}"})


class AwayConsumer:
    """A broker that has the topic or not, and answers or not."""

    topic: str | None = None

    async def topics(self) -> set[str]:
        if self.topic is None:
            raise OSError("refused")
        return {self.topic}


async def test_a_worker_that_cannot_read_them_says_why_and_cancels_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Cancellations()
    assert found.trouble() == "not read yet"
    consumer: Any = AwayConsumer()
    with pytest.raises(OSError, match="refused"):
        await found._read(consumer, "c")
    consumer.topic = "another"
    with pytest.raises(module.BusUnavailable, match="topic c is missing"):
        await found._read(consumer, "c")
    found._fault("away")
    assert found.trouble() == "away"
    assert not found.includes(asked())
