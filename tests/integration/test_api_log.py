"""What a caller is told of a request whose acknowledgement is overdue, against what is on the log afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from infra.kafka import BusUnavailable, TopicPartition, open_consumer
from infra.kafka_sender import NotSent, open_sender
from infra.local.stack import Stack
from infra.settings import KafkaSettings, operator_settings
from schemas.topics import requests_topic
from tests.conditions import eventually
from tests.integration.test_api_faults import away

PARTITIONS = requests_topic().partitions


async def everything(settings: KafkaSettings, topic: str) -> Counter[bytes]:
    """How often each value is there once a record that was sent after it is."""
    async with open_sender(settings, request_timeout_ms=5000) as sender:
        for partition in range(PARTITIONS):
            await sender.send(topic, b"last", partition=partition, timeout_s=20)
    found: Counter[bytes] = Counter()
    async with open_consumer(settings, group=None) as consumer:
        places = [TopicPartition(topic, p) for p in range(PARTITIONS)]
        consumer.assign(places)
        await consumer.seek_to_beginning(*places)
        while found[b"last"] < PARTITIONS:
            for records in (await consumer.getmany(timeout_ms=1000)).values():
                found.update(record.value for record in records)
    return found


@pytest.mark.parametrize("how", ["frozen", "stopped"])
async def test_records_told_to_be_unsent_are_never_on_the_log_and_the_others_at_most_once(
    env: dict[str, str], stack: Stack, how: str
) -> None:
    settings = operator_settings(env).kafka
    topic = requests_topic().in_namespace(settings.namespace).name
    told: dict[bytes, str] = {}

    async with open_sender(settings, request_timeout_ms=1500) as sender:
        await sender.send(topic, b"before", partition=0, timeout_s=10)

        async def one(n: int) -> None:
            value = b"%d" % n
            try:
                await sender.send(topic, value, partition=n % PARTITIONS, timeout_s=1.5)
                told[value] = "sent"
            except NotSent:
                told[value] = "unsent"
            except BusUnavailable:
                told[value] = "unknown"

        async with away(stack, "kafka", how):
            # In waves: the first is put on the network where there is one, the others queue behind it.
            waves = []
            for wave in range(4):
                waves += [asyncio.ensure_future(one(16 * wave + n)) for n in range(16)]
                await eventually(lambda: sender._queue._pending_batches, what="the first wave to be tried")
            await asyncio.wait(waves)
            with pytest.raises(NotSent):  # and from now on at once
                await sender.send(topic, b"after", partition=0, timeout_s=1.5)
            await sender.abandon()
    found = await everything(settings, topic)
    counts = Counter(told.values())
    assert counts["unsent"] >= 32, counts
    assert "sent" not in counts
    if how == "frozen":
        assert counts["unknown"] > 0, "nothing was on its way, so nothing was told apart"
    else:
        assert counts["unknown"] <= 16, "without a connection nothing of the later waves can be on the log"
    assert [v for v, state in told.items() if state == "unsent" and found[v]] == []
    assert [v for v in told if found[v] > 1] == []
    assert (found[b"before"], found[b"after"]) == (1, 0)


async def test_a_sender_goes_on_while_acknowledgements_come(env: dict[str, str]) -> None:
    settings = operator_settings(env).kafka
    topic = requests_topic().in_namespace(settings.namespace).name
    async with open_sender(settings, request_timeout_ms=1500) as sender:
        assert await sender.partitions(topic, timeout_s=5) == PARTITIONS
        sends: Any = [sender.send(topic, b"%d" % n, partition=n % PARTITIONS, timeout_s=20) for n in range(500)]
        await asyncio.gather(*sends)
    found = await everything(settings, topic)
    assert all(found[b"%d" % n] == 1 for n in range(500))
