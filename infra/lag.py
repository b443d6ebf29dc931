"""How long queues are: records on a topic that a consumer group has not committed yet.

Keeps one admin and one consumer connection; whoever holds it opens another one after an error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from infra.kafka import AIOKafkaConsumer, BusUnavailable, KafkaError, TopicPartition, open_consumer
from infra.kafka_admin import Admin, open_admin
from infra.settings import KafkaSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """One topic as one group sees it: records waiting, and records done since the topic began."""

    partitions: int
    waiting: int
    done: int


class LagReader:
    """Reads queue lengths."""

    def __init__(self, admin: Admin, consumer: AIOKafkaConsumer) -> None:
        self._admin = admin
        self._consumer = consumer

    async def read(self, groups: Mapping[str, str]) -> dict[str, Queue]:
        """The queue of each topic -> group; topics that do not exist are left out. Raises BusUnavailable."""
        try:
            partitions = await self._admin.partitions(list(groups))
            places = [TopicPartition(topic, p) for topic, count in partitions.items() for p in range(count)]
            ends: dict[TopicPartition, int] = await self._consumer.end_offsets(places) if places else {}
            done: dict[TopicPartition, int] = {}
            for topic in partitions:
                committed = await self._admin.committed(groups[topic])
                done |= {tp: offset for tp, offset in committed.items() if tp.topic == topic}
            fresh = [tp for tp in places if tp not in done]
            if fresh:  # a group that has committed nothing starts at the earliest record kept
                done |= await self._consumer.beginning_offsets(fresh)
        except KafkaError as error:
            raise BusUnavailable(f"{type(error).__name__}: {error}") from error
        return {
            topic: Queue(
                partitions=count,
                waiting=sum(max(0, ends[tp] - done[tp]) for tp in places if tp.topic == topic),
                done=sum(done[tp] for tp in places if tp.topic == topic),
            )
            for topic, count in partitions.items()
        }


@asynccontextmanager
async def open_lag_reader(settings: KafkaSettings, *, request_timeout_ms: int = 2000) -> AsyncIterator[LagReader]:
    """A started reader. Raises BusUnavailable."""
    async with (
        open_admin(settings, request_timeout_ms=request_timeout_ms) as admin,
        open_consumer(settings, group=None, request_timeout_ms=request_timeout_ms) as consumer,
    ):
        yield LagReader(admin, consumer)
