"""Records handed over in batches: it is always known which of them may be on their way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka.errors import KafkaTimeoutError

from infra.kafka import BusUnavailable, KeyedRecord, Producer, RecordTooLarge, partition_of_key

RECORDS: list[KeyedRecord] = [KeyedRecord("results", bytes([n]) * 16, b"value") for n in range(20)]


class Batch:
    def __init__(self) -> None:
        self.size_bytes = 0

    def append(self, *, timestamp: None, key: bytes, value: bytes, headers: object) -> object | None:
        self.size_bytes += len(value)
        return self if self.size_bytes <= 10 else None

    def close(self) -> None:
        pass


class Client:
    """Takes `room` batches; then `full` happens."""

    def __init__(self, room: int, full: Exception | None = None) -> None:
        self.room = room
        self.full = full
        self.away = False

    async def partitions_for(self, topic: str) -> set[int]:
        if self.away:
            raise KafkaTimeoutError
        return {0, 1, 2, 3}

    def create_batch(self) -> Batch:
        return Batch()

    async def send_batch(self, batch: Batch, topic: str, *, partition: int) -> asyncio.Future[Any]:
        if not self.room:
            if self.full:
                raise self.full
            await asyncio.Event().wait()
        self.room -= 1
        return asyncio.get_running_loop().create_future()


async def test_every_record_is_handed_over_once_and_with_its_partition() -> None:
    sent, unsent = await Producer(Client(room=99)).enqueue_all(RECORDS, timeout_s=5)  # type: ignore[arg-type]
    assert unsent == []
    assert sorted(r for _, records in sent for r in records) == RECORDS
    for _, records in sent:
        assert len({partition_of_key(key, 4) for _, key, _, _ in records}) == 1
        assert len(records) <= 2


@pytest.mark.parametrize("full", [KafkaTimeoutError(), None])
async def test_what_found_no_room_in_time_is_returned(full: Exception | None) -> None:
    client: Any = Client(room=3, full=full)
    sent, unsent = await Producer(client).enqueue_all(RECORDS, timeout_s=0.05)
    assert len(sent) == 3
    assert sorted([*unsent, *(r for _, records in sent for r in records)]) == RECORDS


async def test_when_nothing_was_handed_over_the_log_is_away() -> None:
    client: Any = Client(room=0, full=KafkaTimeoutError())
    with pytest.raises(BusUnavailable):
        await Producer(client).enqueue_all(RECORDS, timeout_s=0.05)
    client.away = True
    with pytest.raises(BusUnavailable):
        await Producer(client).enqueue_all(RECORDS, timeout_s=0.05)


async def test_a_record_that_fits_no_batch_is_refused() -> None:
    client: Any = Client(room=9)
    with pytest.raises(RecordTooLarge, match="a record of 11 bytes"):
        await Producer(client).enqueue_all([KeyedRecord("results", b"k", b"x" * 11)], timeout_s=5)
