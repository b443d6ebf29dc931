"""Reads from the log what earlier owners of partitions recorded there and did not commit.

A consumer of its own does it, without a group, so that the worker's goes on polling. It costs one reading of the
inherited requests and of the results since the oldest of them was admitted; nothing inherited, nothing read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from gpu_worker.held import Held
from gpu_worker.recovery import FirstResults, inherited
from infra.kafka import AIOKafkaConsumer, BusUnavailable, KafkaError, Producer, TopicPartition, open_consumer
from infra.kafka_spans import read_spans, spans_kept, spans_since
from infra.pause import Pause
from infra.schema_feed import learn_nothing
from infra.settings import KafkaSettings

log = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 10.0
_FETCH_WAIT_MS = 20
_FIRST_RETRY_S = 0.2
_LONGEST_RETRY_S = 5.0


class Inheritance:
    """The log as earlier owners of a pool's partitions left it; `requests` and `results` are names of topics.

    `member` is the group's consumer, asked for positions only. An owner ends no record `reach` past its position.
    `learn_schemas` returns once all schemas that were published before the call are known.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        member: AIOKafkaConsumer,
        producer: Producer,
        *,
        requests: str,
        results: str,
        reach: int,
        learn_schemas: Callable[[], Awaitable[None]] = learn_nothing,
    ) -> None:
        self._settings = settings
        self._member = member
        self._producer = producer
        self._requests = requests
        self._results = results
        self._reach = reach
        self._learn_schemas = learn_schemas

    async def settle(self, parts: Mapping[int, Held]) -> None:
        """Find out what earlier owners of these partitions ended and tell each. While Kafka is away this waits."""
        pause = Pause(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while parts := {partition: held for partition, held in parts.items() if held.recovering}:
            try:
                spans = await asyncio.wait_for(self._spans(list(parts)), _ASK_TIMEOUT_S)
                for partition in parts.keys() - spans.keys():
                    parts[partition].settle(range(0), {})
                if spans:
                    # Everything that is read is there already: no fetch needs to wait for more.
                    reader = open_consumer(self._settings, group=None, fetch_max_wait_ms=_FETCH_WAIT_MS)
                    async with reader as consumer:
                        first = await self.first_results(consumer, spans)
                        unlearnt = first.unlearnt
                        for partition in spans.keys() - unlearnt:  # here, since closing the reader may take a while
                            parts[partition].settle(spans[partition], first.found)
                    if unlearnt:
                        await self._learn(unlearnt)
                        first.look_again()
                        for partition in unlearnt:
                            parts[partition].settle(spans[partition], first.found)
            except (BusUnavailable, KafkaError, asyncio.TimeoutError) as error:
                log.warning("inherited requests wait, Kafka is away", extra={"fields": {"reason": repr(error)}})
                await pause.wait()

    async def _learn(self, partitions: frozenset[int]) -> None:
        """Learn the schemas that there are. As long as they cannot be read, these partitions wait and no others do.

        An earlier owner may have been newer than this process: if a result of its could not be read, the request would
        run again. The schemas of all results that were read are on their topic by now.
        """
        pause = Pause(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while True:
            try:
                return await self._learn_schemas()
            except (BusUnavailable, asyncio.TimeoutError) as error:
                log.warning(
                    "inherited requests wait, since results of theirs have schemas that are unknown here",
                    extra={"fields": {"partitions": sorted(partitions), "reason": repr(error)}},
                )
                await pause.wait()

    async def first_results(self, consumer: AIOKafkaConsumer, spans: Mapping[int, range]) -> FirstResults:
        """Look for the first result of each request in these spans of the pool's topic.

        `consumer` is one without a group. Raises BusUnavailable, KafkaError.
        """
        started_s = time.monotonic()
        first, results_read = FirstResults(), 0
        requests = {TopicPartition(self._requests, partition): span for partition, span in spans.items()}
        async for records in read_spans(consumer, requests):
            for record in records:
                first.look_for(record.key, record.timestamp, partition=record.partition)
        if first.since_ms is not None:
            count = await self._producer.partitions(self._results, timeout_s=_ASK_TIMEOUT_S)
            places = [TopicPartition(self._results, partition) for partition in range(count)]
            kept = await spans_kept(consumer, places)
            results = await spans_since(consumer, kept, since_ms=first.since_ms)
            async for records in read_spans(consumer, results):
                results_read += len(records)
                for record in records:
                    first.offer(record.key, record.value)
        fields = {
            "requests": sum(len(span) for span in spans.values()),
            "results_read": results_read,
            "ended": len(first.found),
            "took_s": round(time.monotonic() - started_s, 3),
        }
        log.info("inherited requests looked up", extra={"fields": fields})
        return first

    async def _spans(self, partitions: list[int]) -> dict[int, range]:
        """What earlier owners may have ended, of the partitions where there is any."""
        places = [TopicPartition(self._requests, partition) for partition in partitions]
        committed = await asyncio.gather(*(self._member.committed(place) for place in places))
        begins = await self._member.beginning_offsets(places)
        ends = await self._member.end_offsets(places)
        spans = {
            place.partition: inherited(at, begin=begins[place], end=ends[place], reach=self._reach)
            for place, at in zip(places, committed, strict=True)
        }
        return {partition: span for partition, span in spans.items() if span}
