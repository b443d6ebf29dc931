"""What the benchmark of results says is on the log, is."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import results as module
from infra.kafka import partition_of_key
from infra.settings import KafkaSettings

PARTITIONS = 8


class FakeProducer:
    """The producer and its client in one: takes batches, and keeps the keys of what was sent."""

    def __init__(self) -> None:
        self.sent: dict[bytes, int] = {}
        self._client = self

    async def partitions_for(self, topic: str) -> set[int]:
        return set(range(PARTITIONS))

    def create_batch(self) -> FakeBatch:
        return FakeBatch()

    async def send_batch(self, batch: FakeBatch, topic: str, *, partition: int) -> Any:
        assert batch.closed and batch.keys
        self.sent.update(dict.fromkeys(batch.keys, partition))
        return _done()


class FakeBatch:
    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.closed = False

    def append(self, *, timestamp: int, key: bytes, value: bytes, headers: list[Any]) -> object:
        self.keys.append(key)
        return object()

    def close(self) -> None:
        self.closed = True


async def _done() -> None:
    return None


@pytest.mark.parametrize("count", [1, 50, 1003])
async def test_every_result_that_is_asked_for_was_sent_also_those_of_the_last_batches(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = FakeProducer()

    @asynccontextmanager
    async def opened(settings: KafkaSettings) -> AsyncIterator[FakeProducer]:
        yield producer

    monkeypatch.setattr(module, "open_producer", opened)
    settings: Any = SimpleNamespace(kafka=KafkaSettings(bootstrap="", namespace=""))
    bench = module.Bench(settings, "", ["cus_acme"], [""], random.Random(1))
    known = await bench._fill(count)
    assert len(producer.sent) == count
    assert {request_id.bytes for request_id, _ in known} == set(producer.sent)
    assert all(partition_of_key(key, PARTITIONS) == partition for key, partition in producer.sent.items())
