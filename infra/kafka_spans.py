"""Parts of topics, given by offsets and read from end to end by a consumer without a group.

A span is a `range` of offsets of one partition. Every wait has a deadline: a broker that stops answering raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

from infra.kafka import AIOKafkaConsumer, BusUnavailable, ConsumerRecord, KafkaError, TopicPartition

#: A reader that got nothing for this long, with records still ahead of it, gives up.
_SILENCE_S = 30.0
_POLL_MS = 500


async def spans_kept(consumer: AIOKafkaConsumer, places: Sequence[TopicPartition]) -> dict[TopicPartition, range]:
    """Per partition the offsets from the oldest that is still kept up to the end as of now.

    A consumer of committed records takes the first record of the oldest open transaction for the end. Raises
    BusUnavailable.
    """
    try:
        firsts = await consumer.beginning_offsets(places)
        ends = await consumer.end_offsets(places)
    except KafkaError as error:
        raise BusUnavailable(f"{type(error).__name__}: {error}") from error
    return {place: range(firsts[place], max(firsts[place], ends[place])) for place in places}


async def spans_since(
    consumer: AIOKafkaConsumer, kept: Mapping[TopicPartition, range], *, since_ms: int
) -> dict[TopicPartition, range]:
    """Of what is kept per partition the offsets from the first record stamped `since_ms` (Unix) or later.

    Raises BusUnavailable.
    """
    try:
        found = await consumer.offsets_for_times(dict.fromkeys(kept, since_ms))
    except KafkaError as error:
        raise BusUnavailable(f"{type(error).__name__}: {error}") from error
    return {place: span_since(None if (at := found.get(place)) is None else at.offset, s) for place, s in kept.items()}


def span_since(found: int | None, kept: range) -> range:
    """What is kept from a record on that was looked for later than the end; None when there is no such record."""
    return range(kept.stop if found is None else min(max(found, kept.start), kept.stop), kept.stop)


def span_from(known: int, *, first: int, end: int) -> range:
    """What is new since a known offset in a partition that holds [first, end)."""
    return range(first if known > end else max(known, first), end)


async def read_spans(
    consumer: AIOKafkaConsumer, spans: Mapping[TopicPartition, range]
) -> AsyncGenerator[list[ConsumerRecord], None]:
    """Every committed record with an offset in these spans, some at a time, in order within each partition.

    For consumers without a group; leaves the consumer assigned to what it read. Raises BusUnavailable after 30 s in
    which nothing came.
    """
    ahead = {place: span for place, span in spans.items() if span}
    if not ahead:
        return
    consumer.assign(list(ahead))
    for place, span in ahead.items():
        consumer.seek(place, span.start)
    loop = asyncio.get_running_loop()
    heard_s = loop.time()
    positions: dict[TopicPartition, int] = {}
    while ahead:
        try:
            fetched = await consumer.getmany(*ahead, timeout_ms=_POLL_MS)
            before = positions
            # The position, not the last record, tells the end: a span may end in transaction markers.
            positions = {place: await asyncio.wait_for(consumer.position(place), _SILENCE_S) for place in ahead}
        except (KafkaError, asyncio.TimeoutError) as error:
            raise BusUnavailable(f"{type(error).__name__}: {error}") from error
        if fetched or positions != before:
            heard_s = loop.time()
        elif loop.time() - heard_s > _SILENCE_S:
            raise BusUnavailable(f"nothing came for {_SILENCE_S:g} s with records still ahead of {positions}")
        for place, records in fetched.items():
            yield [record for record in records if record.offset in ahead[place]]
        read = [place for place, position in positions.items() if position >= ahead[place].stop]
        for place in read:
            del ahead[place]
        if read and ahead:
            consumer.pause(*read)
        await asyncio.sleep(0)  # what is buffered comes without a wait, and others want their turn
