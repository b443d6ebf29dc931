"""Which answers of Kafka are about a record, which about its producer, and which pass; no broker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from aiokafka import errors

from infra.kafka import BusUnavailable, KeyedRecord
from infra.kafka_topic_ids import Position, trusted
from infra.kafka_transactions import Fenced, Publisher, Refused


class Broker:
    """A broker that has one topic, `t`, or is too old to tell ids."""

    def __init__(self, topic_id: UUID | None) -> None:
        self.topic_id = topic_id

    def get_random_node(self) -> int:
        return 0

    async def send(self, node: int, request: Any) -> Any:
        if self.topic_id is None:
            raise NotImplementedError
        return SimpleNamespace(topics=[(0, "t", self.topic_id, False), (3, "gone", UUID(int=0), False)])

    async def fetch_all_metadata(self) -> Any:
        return SimpleNamespace(topics=lambda: {"t", "other"})


class AnsweringClient:
    """As much of aiokafka's producer as one transaction takes; every record is answered with `answer`."""

    def __init__(self, answer: Exception | int, broker: Broker) -> None:
        self._answer = answer
        self.client = broker

    async def begin_transaction(self) -> None:
        pass

    async def send(self, *_: Any, **__: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if isinstance(self._answer, int):
            future.set_result(SimpleNamespace(topic="t", offset=self._answer))
        else:
            future.set_exception(self._answer)
        return future

    async def commit_transaction(self) -> None:
        if self.client.topic_id is not None:
            self.client.topic_id = uuid4()  # the topic is made anew, and the broker knows it at once


async def answered(answer: Exception) -> type[BaseException]:
    client: Any = AnsweringClient(answer, Broker(uuid4()))
    with pytest.raises((Refused, BusUnavailable)) as found:
        await Publisher(client).publish([KeyedRecord("t", b"k", b"v")], timeout_s=5)
    return found.type


INVALID_RECORD = 87  # aiokafka has no name for it


@pytest.mark.parametrize(
    "answer",
    [
        errors.for_code(INVALID_RECORD)(),
        errors.MessageSizeTooLargeError(),
        errors.RecordListTooLargeError(),
        errors.InvalidTopicError(),
        errors.InvalidTimestampError(),
        errors.PolicyViolationError(),
        errors.TopicAuthorizationFailedError("t"),
        errors.UnsupportedForMessageFormatError(),
        errors.CorruptRecordException(),
    ],
    ids=lambda answer: type(answer).__name__,
)
async def test_a_final_answer_about_a_record_is_a_refusal(answer: Exception) -> None:
    assert await answered(answer) is Refused


@pytest.mark.parametrize(
    "answer",
    [
        errors.NotLeaderForPartitionError(),
        errors.NotEnoughReplicasError(),
        errors.BrokerNotAvailableError(),
        errors.InvalidProducerEpoch(),
        errors.InvalidTxnState(),
        errors.OutOfOrderSequenceNumber(),
        errors.UnknownProducerId(),
        errors.KafkaTimeoutError(),
        errors.KafkaError("Unexpected error during batch delivery"),
        errors.ProducerClosed(),
    ],
    ids=lambda answer: type(answer).__name__,
)
async def test_what_passes_or_is_about_the_producer_blocks_no_topic(answer: Exception) -> None:
    assert await answered(answer) is BusUnavailable


async def test_a_fenced_publisher_is_told_so() -> None:
    assert await answered(errors.ProducerFenced()) is Fenced


async def test_a_position_is_of_the_topic_that_was_there_before_anything_was_published() -> None:
    before = uuid4()
    client: Any = AnsweringClient(41, Broker(before))
    reached = await Publisher(client).publish([KeyedRecord("t", b"k", b"v")], timeout_s=5)
    assert reached == {"t": Position(before, 42)}
    (now,) = (await Publisher(client).topic_ids(["t", "gone"])).values()
    assert now != before
    assert (trusted(reached["t"], before), trusted(reached["t"], now)) == (42, 0)


async def test_a_position_without_an_id_is_not_trusted() -> None:
    client: Any = AnsweringClient(41, Broker(None))
    reached = await Publisher(client).publish([KeyedRecord("t", b"k", b"v")], timeout_s=5)
    assert reached == {"t": Position(None, 42)}
    assert await Publisher(client).topic_ids(["t", "gone"]) == {"t": None}
    assert (trusted(reached["t"], None), trusted(reached["t"], uuid4())) == (0, 0)


async def test_a_topic_that_is_not_there_is_a_refusal_that_names_it() -> None:
    client: Any = AnsweringClient(41, Broker(uuid4()))
    with pytest.raises(Refused, match="there is no topic gone") as refused:
        await Publisher(client).publish([KeyedRecord("t", b"k", b"v"), KeyedRecord("gone", b"k", b"v")], timeout_s=5)
    assert refused.value.topic == "gone"
