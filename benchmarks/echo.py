"""A worker without a model: every request of the default pool gets ten numbers, so that only the way is measured."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timezone
from uuid import UUID, uuid4

from infra.kafka import BusUnavailable, KafkaError, KeyedRecord, open_consumer, open_producer
from infra.redis import Redis, open_redis
from infra.settings import KafkaSettings, RedisSettings
from infra.tasks import end
from schemas.codec import decode, encode
from schemas.ids import finished_id
from schemas.keys import RedisKeys, worker_group
from schemas.records import InferenceFinished, InferenceRequested, Outcome
from schemas.tensors import Tensor
from schemas.topics import DEFAULT_POOL, RESULTS, requests_topic

_TTL_S = 60


def result(request_id: UUID, customer_id: str, *, width: int = 10) -> InferenceFinished:
    """A success with a tensor of so many numbers."""
    now = datetime.now(timezone.utc)
    return InferenceFinished(
        event_id=finished_id(request_id),
        occurred_at=now,
        request_id=request_id,
        customer_id=customer_id,
        model="digits",
        version="ab" * 32,
        outcome=Outcome.SUCCEEDED,
        outputs=(Tensor(name="logits", datatype="FP32", shape=(1, width), data=bytes(4 * width)),),
        price_id="standard-v1",
        quantities={"requests": 1, "items": 1},
        admitted_at=now,
        worker="bench",
        batch_id=uuid4(),
        batch_items=1,
        queue_us=1000,
        run_us=1000,
    )


def on_the_log(kafka: KafkaSettings, ends: Sequence[InferenceFinished]) -> list[KeyedRecord]:
    """Results as records of their topic."""
    topic = RESULTS.in_namespace(kafka.namespace).name
    return [KeyedRecord(topic, finished.request_id.bytes, encode(finished)) for finished in ends]


@asynccontextmanager
async def answering(
    kafka: KafkaSettings, redis: RedisSettings, *, copies: bool = True, after_s: float = 0.0
) -> AsyncIterator[None]:
    """Answers while the block runs: on the log, and with `copies` then in Redis, as a worker does."""

    async def work() -> None:
        while True:
            with suppress(KafkaError, BusUnavailable):  # a busy machine may cost the group its member
                await serve()

    async def serve() -> None:
        async with (
            open_consumer(kafka, group=worker_group(kafka.namespace, DEFAULT_POOL)) as consumer,
            open_producer(kafka) as producer,
            open_redis(redis) as client,
        ):
            consumer.subscribe([requests_topic().in_namespace(kafka.namespace).name])
            while True:
                fetched = await consumer.getmany(timeout_ms=20)
                requests = [decode(r.value, InferenceRequested) for records in fetched.values() for r in records]
                if requests:
                    await asyncio.sleep(after_s)
                    ends = [result(r.request_id, r.customer_id) for r in requests]
                    sent, _ = await producer.enqueue_all(on_the_log(kafka, ends), timeout_s=10)
                    await producer.acknowledged([future for future, _ in sent], timeout_s=10)
                    if copies:
                        await _copy(client, RedisKeys(namespace=redis.namespace), requests, ends)
                await consumer.commit()

    task = asyncio.ensure_future(work())
    try:
        yield
    finally:
        await end([task], within_s=5.0)


async def _copy(
    client: Redis, keys: RedisKeys, requests: Sequence[InferenceRequested], ends: Sequence[InferenceFinished]
) -> None:
    hints: defaultdict[str, list[bytes]] = defaultdict(list)
    pipeline = client.pipeline(transaction=False)
    for request, finished in zip(requests, ends, strict=True):
        pipeline.set(keys.result(request.request_id), encode(finished), nx=True, ex=_TTL_S)
        hints[request.reply_to].append(request.request_id.bytes)
    for instance, ids in hints.items():
        pipeline.publish(keys.results_channel(instance), b"".join(ids))
    await pipeline.execute()
