"""Where ends of requests go, in an order whose every step may be the last.

1 log     InferenceFinished and UsageRecorded, all acknowledged   die before: the batch runs again
2 cache   Redis SET NX, one hint per API instance                 die before: the batch runs again, ids collapse
3 offsets by the caller, once `record` returns                    die before: it runs again, the first result stays
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpu_worker.endings import Ended
from infra.kafka import BusUnavailable, KeyedRecord, Producer
from infra.redis import Redis, RedisError
from schemas.codec import encode
from schemas.ids import usage_id
from schemas.keys import RedisKeys
from schemas.records import InferenceFinished, Outcome, UsageRecorded
from schemas.topics import RESULTS, USAGE

log = logging.getLogger(__name__)

_ENQUEUE_TIMEOUT_S = 10.0
_ACK_LOOK_S = 10.0
_LONGEST_RETRY_S = 5.0
_CACHE_RETRIES_S = (0.05, 0.25, 1.0)
#: Room for keys, headers and the envelope of a batch inside the broker's bound on a message.
_ENVELOPE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    ended: Ended
    result: bytes


class KafkaRedisOutcomes:
    """The worker's Outcomes. `counts` holds what went wrong and was survived, by name."""

    def __init__(self, producer: Producer, redis: Redis, *, namespace: str, result_ttl_s: int) -> None:
        self._producer = producer
        self._redis = redis
        self._keys = RedisKeys(namespace=namespace)
        self._results = RESULTS.in_namespace(namespace)
        self._usage = USAGE.in_namespace(namespace)
        self._ttl_s = result_ttl_s
        self.counts: Counter[str] = Counter()

    async def record(self, ended: Sequence[Ended]) -> None:
        """Steps 1 and 2. While Kafka is away this waits; nothing is committed and nothing is forgotten meanwhile."""
        largest = self._results.max_message_bytes - _ENVELOPE_BYTES
        encoded = [_encoded(e, largest_bytes=largest) for e in ended]
        # 1 log. Die before every record is acknowledged: the batch runs again, ids collapse.
        await self._log([r for e in encoded for r in self._log_records(e)])
        # 2 cache. Die before: the batch runs again. Redis away: the log has the results, so go on without it.
        await self._cache(encoded)

    def _log_records(self, encoded: _Encoded) -> list[KeyedRecord]:
        finished = encoded.ended.finished
        records = [(self._results.name, finished.request_id.bytes, encoded.result)]
        if finished.outcome is Outcome.SUCCEEDED:
            records.append((self._usage.name, finished.customer_id.encode(), encode(usage(finished))))
        return records

    async def _log(self, records: Sequence[KeyedRecord]) -> None:
        """Until every record is acknowledged. A record is handed over again only after it failed for certain."""
        left = list(records)
        wait_s = 0.1
        while left:
            try:
                sent = await self._producer.enqueue_all(left, timeout_s=_ENQUEUE_TIMEOUT_S)
                left = await self._unacknowledged(sent)
            except BusUnavailable as error:
                log.warning("results held, Kafka is away", extra={"fields": {"records": len(left), "reason": error}})
            if left:
                self.counts["log_retries"] += 1
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_RETRY_S)

    async def _unacknowledged(
        self, sent: Sequence[tuple[asyncio.Future[Any], Sequence[KeyedRecord]]]
    ) -> list[KeyedRecord]:
        """Wait for the end of every future, however long the broker is away; the records that failed."""
        pending = {future for future, _ in sent}
        while pending:
            _, pending = await asyncio.wait(pending, timeout=_ACK_LOOK_S)
            if pending:
                fields = {"records": len(pending), "reason": "no acknowledgement yet"}
                log.warning("results held, Kafka is away", extra={"fields": fields})
        failed: list[KeyedRecord] = []
        for future, records in sent:
            if (error := future.exception()) is not None:
                log.warning("records refused", extra={"fields": {"records": len(records), "reason": repr(error)}})
                failed += records
        return failed

    async def _cache(self, encoded: Sequence[_Encoded]) -> None:
        """One round trip: every result unless one is there, then one hint per API instance with all its ids."""
        for wait_s in (*_CACHE_RETRIES_S, None):
            try:
                await self._write(encoded)
                return
            except RedisError as error:
                self.counts["cache_failures"] += 1
                if wait_s is None:
                    # Waiters find these on the log; a worker that stopped here would keep everybody else waiting.
                    self.counts["results_not_cached"] += len(encoded)
                    fields = {"results": len(encoded), "reason": repr(error)}
                    log.error("results not cached, the log has them", extra={"fields": fields})
                    return
                await asyncio.sleep(wait_s)

    async def _write(self, encoded: Sequence[_Encoded]) -> None:
        hints: defaultdict[str, list[bytes]] = defaultdict(list)
        pipeline = self._redis.pipeline(transaction=False)
        for one in encoded:
            request_id = one.ended.finished.request_id
            pipeline.execute_command("SET", self._keys.result(request_id), one.result, "NX", "EX", self._ttl_s)
            hints[one.ended.reply_to].append(request_id.bytes)
        for instance, ids in hints.items():
            pipeline.execute_command("PUBLISH", self._keys.results_channel(instance), b"".join(ids))
        await pipeline.execute()


def usage(finished: InferenceFinished) -> UsageRecorded:
    """What a succeeded request is billed for: the same on every repetition, because nothing of the run is in it."""
    return UsageRecorded(
        event_id=usage_id(finished.request_id),
        occurred_at=finished.admitted_at,
        request_id=finished.request_id,
        customer_id=finished.customer_id,
        model=finished.model,
        version=finished.version,
        price_id=finished.price_id,
        quantities=finished.quantities,
    )


def _encoded(ended: Ended, *, largest_bytes: int) -> _Encoded:
    """The result's bytes; one that no topic takes becomes a failure, which is neither cached whole nor billed."""
    result = encode(ended.finished)
    if len(result) <= largest_bytes:
        return _Encoded(ended=ended, result=result)
    failed = replace(
        ended.finished,
        outcome=Outcome.FAILED,
        error_code="result_too_large",
        error_message=f"the result takes {len(result)} bytes, the most is {largest_bytes}; send fewer items",
        outputs=(),
        quantities={},
    )
    return _Encoded(ended=replace(ended, finished=failed), result=encode(failed))
