"""What the relay decides without a server: how many facts to take, what blocks, where to look; nothing ends it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from infra.kafka import BusUnavailable, TopicPartition
from infra.kafka_spans import span_from
from infra.outbox import Seen, WaitingFact
from infra.settings import KafkaSettings, PostgresSettings
from schemas.headers import EVENT_ID
from streams.outbox.backfill import Untold
from streams.outbox.commands import problem
from streams.outbox.relay import FIRST_PAUSE_S, LONGEST_PAUSE_S, Relay, facts_in
from streams.outbox.standing import LOOK_S, RETRY_S, Standing, next_stride
from tests.fakes import Clock


def fact(topic: str = "t", position: int = 1) -> WaitingFact:
    return WaitingFact(position=position, event_id=uuid4(), topic=topic, key=b"k", value=b"v", headers=[])


def test_a_refused_fact_is_found_alone_in_few_attempts_and_the_stride_recovers() -> None:
    stride, tried = 500, [500]
    while tried[-1] > 1:
        stride = next_stride(stride, tried=tried[-1], refused=True, most=500)
        tried.append(stride)
    assert tried == [500, 250, 125, 62, 31, 15, 7, 3, 1]
    assert next_stride(1, tried=1, refused=True, most=500) == 500, "its topic is left out now"
    assert next_stride(1, tried=1, refused=False, most=500) == 2
    assert next_stride(400, tried=3, refused=False, most=500) == 500


@pytest.mark.parametrize(
    ("known", "first", "end", "expected"),
    [
        (0, 0, 0, range(0)),
        (0, 0, 7, range(7)),
        (5, 0, 7, range(5, 7)),
        (7, 0, 7, range(7, 7)),
        (2, 4, 7, range(4, 7)),  # retention has removed the rest
        (9, 0, 7, range(7)),  # another topic of the same name
    ],
)
def test_the_look_reads_what_is_new_or_all_of_another_topic(known: int, first: int, end: int, expected: range) -> None:
    assert span_from(known, first=first, end=end) == expected


def test_only_records_of_the_relay_are_recognised(caplog: pytest.LogCaptureFixture) -> None:
    known, ours = uuid4(), (EVENT_ID, str(uuid4()).encode())
    no_ids: list[list[tuple[str, bytes | None]]] = [
        [],
        [(EVENT_ID, None)],
        [(EVENT_ID, b"")],
        [(EVENT_ID, b"no id")],
        [(EVENT_ID, b"\xff")],
        [(EVENT_ID, "٠".encode() * 32)],  # digits, to Python
        [(EVENT_ID, b"\x00" * 10_000_000)],
        [(EVENT_ID, f"{{{uuid4()}}}".encode())],
        [(EVENT_ID, str(uuid4()).upper().encode())],
        [(EVENT_ID, "٠".encode() * 16 + b"0000")],  # as long as an id
        [ours, ours],
        [ours, (EVENT_ID, None)],
        [("other", str(uuid4()).encode())],
        [("other", None)],
    ]
    records: list[Any] = [
        SimpleNamespace(topic="ns.t", partition=0, offset=offset, key=key, value=value, headers=headers)
        for offset, (key, value, headers) in enumerate(
            [
                *((b"k", b"v", headers) for headers in no_ids),
                (None, b"v", [ours]),
                (b"k", None, [ours]),
                (b"k", b"v", [("inferlog.schema", b"x"), (EVENT_ID, str(known).encode())]),
            ]
        )
    ]
    for one in (records, [records[-1]]):
        assert facts_in(one, {TopicPartition("ns.t", 0): "t"}) == [Seen(known, "t", b"k", b"v")]
    (said,) = caplog.messages
    assert "11 records, first ns.t partition 0 offset 1" in said
    assert len(said) < 200, "however many others write, and whatever"


def test_a_blocked_topic_is_left_out_tried_each_minute_and_said_each_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    standing = Standing(clock=clock)
    bad = fact("a", 7)
    standing.block(bad, "too large")
    assert standing.blocked_topics() == ["a"]
    assert standing.figures()["blocked"] == {"a": "position 7: too large"}
    assert not standing.retry_blocked()
    clock.now_s += RETRY_S
    assert standing.retry_blocked()
    assert standing.blocked_topics() == []
    assert standing.figures()["blocked"], "until it has been published"
    assert not standing.retry_blocked(), "tried once"
    standing.block(bad, "too large")
    assert standing.blocked_topics() == ["a"]
    assert [r.levelno for r in caplog.records] == [logging.ERROR] * 2
    assert str(bad.event_id) in caplog.text
    clock.now_s += RETRY_S
    standing.retry_blocked()
    standing.did_publish([bad])
    assert (standing.blocked_topics(), standing.figures()["blocked"], standing.published) == ([], {}, 1)


def test_a_block_ends_when_nothing_waits_for_its_topic_any_more() -> None:
    clock = Clock()
    standing = Standing(clock=clock)
    standing.block(fact("a"), "too large")
    standing.nothing_waits()
    assert standing.figures()["blocked"], "it has not been asked for"
    clock.now_s += RETRY_S
    standing.retry_blocked()
    standing.hold({"a": "unseen"})
    standing.nothing_waits()
    standing.hold({})
    assert standing.figures()["blocked"] == {"a": "position 1: too large"}, "it could not be asked for"
    standing.nothing_waits()
    assert (standing.blocked_topics(), standing.figures()["blocked"]) == ([], {})


def test_a_held_topic_is_looked_at_again_and_said_each_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    standing = Standing(clock=clock)
    assert not standing.must_look()
    for _ in range(round(RETRY_S / LOOK_S) + 1):
        standing.hold({"a": "open", "b": "open"})
        assert not standing.must_look()
        clock.now_s += LOOK_S
        assert standing.must_look()
    assert standing.figures()["blocked"] == {"a": "open", "b": "open"}
    standing.hold({})
    assert (standing.must_look(), standing.figures()["blocked"]) == (False, {})
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 4 + ["INFO"] * 2


def test_an_outage_is_said_when_it_comes_and_when_it_goes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    standing = Standing()
    standing.active()
    for _ in range(5):
        standing.away("Kafka is gone", bug=None)
    figures = standing.figures()
    assert (figures["state"], figures["why"], figures["published"], figures["blocked"]) == (
        "away",
        "Kafka is gone",
        0,
        {},
    )
    standing.active()
    standing.active()
    assert [r.getMessage() for r in caplog.records] == [
        "the relay publishes the outbox",
        "the outbox is held: Kafka is gone",
        "the relay publishes the outbox again",
    ]


def test_old_rows_are_said_while_they_are_told_and_those_without_a_fact_until_they_are_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    standing = Standing()
    for told in range(0, 30_000, 5000):
        standing.telling(told)
    assert standing.figures()["state"] == "telling" and "25000 facts" in standing.figures()["why"]
    rows = Untold(count=300, first=["api_keys k: no"])
    for _ in range(3):
        standing.passed_over(rows)
        standing.active()
    assert standing.figures()["untold"] == {"count": 300, "first": ["api_keys k: no"]}
    standing.passed_over(Untold())
    assert standing.figures()["untold"] == {"count": 0, "first": []}
    assert [r.getMessage() for r in caplog.records] == [
        "the relay tells the rows that are older than the outbox",
        "300 rows older than the outbox have no fact: api_keys k: no",
        "the relay publishes the outbox",
    ]


async def test_no_failure_ends_the_relay_and_pauses_grow_until_it_was_active(caplog: pytest.LogCaptureFixture) -> None:
    pauses: list[float] = []
    failures: list[Exception] = [BusUnavailable("away")] * 8 + [KeyError("a bug"), OSError("away")]

    class Failing(Relay):
        async def round(self) -> None:
            if len(pauses) == 7:
                self.standing.active()
            raise failures[len(pauses)]

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == len(failures):
            raise asyncio.CancelledError

    relay = Failing(KafkaSettings(bootstrap="", namespace=""), PostgresSettings(dsn=""), sleep=sleep)
    with suppress(asyncio.CancelledError):
        await relay.run()
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[6] == LONGEST_PAUSE_S
    assert pauses[7] == FIRST_PAUSE_S
    assert [r.levelname for r in caplog.records if r.exc_info] == ["ERROR"]


@pytest.mark.parametrize(
    ("there", "size", "relayed", "said"),
    [
        ("refused", 10, True, "Kafka does not answer: refused"),
        ({"t": False}, 10, True, "does not exist"),
        ({"t": True}, 9_000_000, True, "9000000 bytes"),
        ({"t": True}, 10, False, "no relay runs"),
        ({"t": True}, 10, True, None),
    ],
)
def test_what_hinders_a_topic(there: Any, size: int, relayed: bool, said: str | None) -> None:
    found = problem("t", size, relayed=relayed, there=there, max_message_bytes=8 * 1024 * 1024)
    assert (found is None) if said is None else (said in (found or ""))
