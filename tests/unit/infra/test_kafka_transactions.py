"""Which answers of Kafka are about a record, which about its producer, and which pass; no broker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import errors

from infra.kafka import BusUnavailable, KeyedRecord
from infra.kafka_transactions import Fenced, Publisher, Refused


class AnsweringClient:
    """As much of aiokafka's producer as one transaction takes; every record is answered with `answer`."""

    def __init__(self, answer: Exception) -> None:
        self._answer = answer
        self.client: Any = self

    async def fetch_all_metadata(self) -> Any:
        return self

    def topics(self) -> set[str]:
        return {"t"}

    async def begin_transaction(self) -> None:
        pass

    async def send(self, *_: Any, **__: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_exception(self._answer)
        return future


async def answered(answer: Exception) -> type[BaseException]:
    client: Any = AnsweringClient(answer)
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
