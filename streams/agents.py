"""The agents: one per topic, each registered by a function.

Faust acknowledges a batch when its body asks for the next one or fails, unless the stream is taken with `noack_take`;
so that is the only way a stream is read here, one batch at a time, and what may be committed is said by hand, after the
ledger's COMMIT, to the consumer (`streams.consumer`), which heeds nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import faust
from mode.supervisors import CrashingSupervisor

from streams.ledger.raw import RawRecord
from streams.ledger.stretches import Stretch

Deliver = Callable[[Sequence[RawRecord]], Awaitable[list[Stretch]]]


def raw_topic(app: faust.App, name: str) -> Any:
    """A topic whose keys and values stay bytes: decoding failures are then ours to set aside, not Faust's to skip."""
    return app.topic(
        name, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw", allow_empty=True
    )


def raw_record(event: Any) -> RawRecord:
    """The record behind a Faust event, as the broker gave it."""
    m = event.message
    return RawRecord(topic=m.topic, partition=m.partition, offset=m.offset, follows=m.follows, key=m.key, value=m.value)


def register_usage_agent(
    app: faust.App, topic_name: str, deliver: Deliver, *, batch_records: int, batch_wait_s: float
) -> Any:
    """Deliver every record of the usage topic in order, in batches of at most `batch_records`.

    A batch closes `batch_wait_s` after it was looked for. When `deliver` raises, the process ends (the supervisor
    crashes it) with nothing of the batch committed: it is read again by whoever comes next.
    """

    @app.agent(raw_topic(app, topic_name), name="usage_ledger", concurrency=1, supervisor_strategy=CrashingSupervisor)
    async def usage_ledger(stream: Any) -> None:
        consumer: Any = app.consumer  # a streams.consumer.LedgerConsumer
        async for events in stream.noack_take(batch_records, within=batch_wait_s):
            records = [raw_record(event) for event in consumer.present(events)]
            if records:
                consumer.cover(await deliver(records))

    return usage_ledger
