"""Where a Kafka consumer stands in each partition: it begins at explicit offsets, and knows what each record follows.

A position is needed because offsets cannot tell what was skipped (`stretches`); the client library keeps one, but
moves it by itself, silently, where a group has no offset or the topic has lost records. Each beginning has a number,
its epoch: records of an earlier one follow each other, but nothing that was read since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.kafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from streams.ledger.stretches import following

Followed = list[tuple[int, ConsumerRecord]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """What came of one partition, in order, each record with the position that it follows; `epoch` holds for all."""

    epoch: int | None
    records: Followed


class Footing:
    """The positions of one consumer. Its methods run where the consumer runs; `epoch` and `forget` run anywhere."""

    def __init__(self) -> None:
        self._stands: dict[TopicPartition, int] = {}
        self._epochs: dict[TopicPartition, int] = {}
        self._begun = 0

    def epoch(self, place: tuple[str, int]) -> int | None:
        """Which beginning of a partition is the present one; None while it is not read here."""
        return self._epochs.get(place)  # equal, by whatever class it is named

    async def begin(self, consumer: AIOKafkaConsumer, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Seek these partitions to the group's offset, or the log's first where the group has none; returns where to.

        Without this, a consumer that keeps a partition through a rebalance reads on from wherever it was, past what was
        dropped. Raises KafkaError.
        """
        asked = list(places)  # all at once: until it is answered nothing of them counts
        offsets = await asyncio.gather(*(consumer.committed(tp) for tp in asked))
        begins: dict[TopicPartition, Any] = dict(zip(asked, offsets, strict=True))
        never = [tp for tp, offset in begins.items() if offset is None]
        if never:
            begins |= await consumer.beginning_offsets(never)
        begun: dict[TopicPartition, int] = {}
        for tp, offset in begins.items():
            if tp not in consumer.assignment():
                continue  # taken away while we asked; the next assignment seeks again
            # No await between these two: a fetch that ended here in between would be measured from the wrong place.
            consumer.seek(tp, offset)
            self._stands[tp] = begun[tp] = offset
            self._begun += 1
            self._epochs[tp] = self._begun
        return begun

    async def follow(
        self, consumer: AIOKafkaConsumer, fetched: Mapping[TopicPartition, Sequence[ConsumerRecord]]
    ) -> dict[TopicPartition, Fetch]:
        """Each fetched record with the position that it follows; what another seek overtook meanwhile is left out.

        So is what was fetched before its partition had begun here: where that is read from is the client's own choice,
        which may lie past a marker that the ledger stands at. `begin` seeks, and it comes again.
        """
        told: dict[TopicPartition, Fetch] = {}
        # All of them before the first question is asked.
        before = {tp: (self._stands.get(tp), self._epochs.get(tp)) for tp in fetched}
        for tp, records in fetched.items():
            if not records:
                continue
            known, epoch = before[tp]
            if epoch is None:
                continue
            stood = await self._stood(consumer, tp, known, records[0].offset)
            if (self._stands.get(tp), self._epochs.get(tp)) != before[tp]:
                continue  # sent elsewhere while we asked: these come again from there
            self._stands[tp] = records[-1].offset + 1
            told[tp] = Fetch(epoch=epoch, records=following(records, stood))
        return told

    async def _stood(self, consumer: AIOKafkaConsumer, tp: TopicPartition, known: int | None, offset: int) -> int:
        """The position that `offset` follows: what lies between may be markers, or records that are gone."""
        if known is None or known >= offset:
            return offset
        first: int = (await consumer.beginning_offsets([tp]))[tp]
        return min(max(first, known), offset)

    def behind(self, consumer: AIOKafkaConsumer) -> int:
        """Offsets from here to the end of what may be read, as of each partition's last fetch; a few are markers."""
        ends = {tp: consumer.last_stable_offset(tp) for tp in self._stands if tp in consumer.assignment()}
        return sum(max(0, end - self._stands[tp]) for tp, end in ends.items() if end is not None)

    def forget(self, places: Iterable[TopicPartition]) -> None:
        """Where this consumer stood in a partition that belongs to another now means nothing any more."""
        for tp in places:
            self._stands.pop(tp, None)
            self._epochs.pop(tp, None)
