"""Where ends of requests go, in an order whose every step may be the last.

1 blobs     outputs too large for their record, to S3           die before: the batch runs again
2 results   InferenceFinished of the batch, all acknowledged    die before: the batch runs again; its blobs are found
                                                                there, or, of other bytes, belong to nothing and expire
3 at once   UsageRecorded, acknowledged                         die before: whoever inherits the requests finds their
            and Redis SET NX with one hint per API instance     results (gpu_worker.inheritance) and sends both again
4 offsets   by the caller, once `record` returns                die before: the same

A result on the log may be answered before it is billed: it will be, by this worker or by the next. Results without
blobs do not wait for those with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from gpu_worker.blame import Blame
from gpu_worker.claims import LargeTensors
from gpu_worker.endings import Ended, Failure, as_failed, as_of
from infra.kafka import BusUnavailable, HandedOver, KeyedRecord, Producer
from infra.pause import Pause
from infra.redis import Redis, RedisError
from schemas.codec import encode
from schemas.headers import Stamp
from schemas.ids import usage_id
from schemas.keys import RedisKeys
from schemas.records import InferenceFinished, Outcome, UsageRecorded
from schemas.topics import RESULTS, USAGE

log = logging.getLogger(__name__)

_ENQUEUE_TIMEOUT_S = 10.0
_ACK_LOOK_S = 10.0
#: Far below the time between two commits, which is all that waits for usage.
_USAGE_LINGER_S = 0.02
_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 5.0
_CACHE_RETRIES_S = (0.05, 0.25, 1.0)
#: Room for keys, headers and the envelope of a batch inside the broker's bound on a message.
_ENVELOPE_BYTES = 4096
_STAMP = Stamp("gpu_worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    ended: Ended
    result: bytes
    usage: KeyedRecord | None  # of one that is billed


class KafkaRedisOutcomes:
    """The worker's Outcomes. `counts` holds what went wrong and was survived, by name; `clock` gives Unix seconds."""

    def __init__(
        self,
        producer: Producer,
        redis: Redis,
        large: LargeTensors,
        blame: Blame,
        *,
        namespace: str,
        result_ttl_s: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._producer = producer
        self._redis = redis
        self._large = large
        self._blame = blame
        self._keys = RedisKeys(namespace=namespace)
        self._results = RESULTS.in_namespace(namespace)
        self._usage = USAGE.in_namespace(namespace)
        self._largest_bytes = self._results.max_message_bytes - _ENVELOPE_BYTES
        self._ttl_s = result_ttl_s
        self._clock = clock
        self._usage_waiting: list[KeyedRecord] = []
        self._usage_sending: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()

    async def record(self, ended: Sequence[Ended]) -> None:
        """Steps 1 to 3. While Kafka is away this waits; nothing is committed and nothing is forgotten meanwhile."""
        large = [e for e in ended if self._large.is_large(e)]
        if not large:
            await self._record(ended)
            return
        small = [e for e in ended if not self._large.is_large(e)]
        await asyncio.gather(*(self._record_large(e) for e in large), *([self._record(small)] if small else []))

    async def _record_large(self, ended: Ended) -> None:
        # 1 blobs. Die before, or between them: the batch runs again, and finds them or leaves them to expire.
        left_s = ended.deadline_at.timestamp() - self._clock()
        failures: list[Failure] = []
        with self._blame.judging("keeping its outputs", failures.append):
            ended = await self._large.hand_in(ended, left_s=left_s)
        if failures:
            ended = as_failed(ended, code=failures[0].code, message=failures[0].message)
        await self._record([ended])

    async def _record(self, ended: Sequence[Ended]) -> None:
        ends: dict[bytes, _Encoded] = {}
        for one in ended:  # of two for the same request the first counts, as it does for whoever reads the log
            if one.finished.request_id.bytes not in ends:
                ends[one.finished.request_id.bytes] = self._encoded(one)
        # 2 results. Die before every one is acknowledged: the batch runs again.
        await self._log_results(ends)
        # 3 usage and copies. Die before: whoever inherits the requests finds the results and sends both again.
        billed = [e.usage for e in ends.values() if e.usage is not None]
        usage_logged = self._log_usage(billed) if billed else None
        await self._cache(ends.values())
        if usage_logged is not None:
            await asyncio.shield(usage_logged)  # other batches wait for it too

    async def _log_results(self, ends: dict[bytes, _Encoded]) -> None:
        """Step 2, for what is not on the log already; what has become late by now is replaced in `ends`."""
        left = [key for key, one in ends.items() if one.ended.logged is None]
        failed: list[KeyedRecord] = []
        pause = Pause(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while left:
            # The last moment at which what they say can change: past it they may be on the log.
            self._expire_late(ends, left)
            sent, unsent = await self._offer([self._result(key, ends[key]) for key in left])
            left = [record.key for record in unsent]
            failed += await self._unacknowledged(sent)
            if left:
                self.counts["log_retries"] += 1
                await pause.wait()
        if failed:
            self.counts["log_retries"] += 1
            await pause.wait()
            await self._log(failed)

    def _result(self, key: bytes, one: _Encoded) -> KeyedRecord:
        headers = _STAMP.headers(InferenceFinished, one.ended.traceparent)
        return KeyedRecord(self._results.name, key, one.result, headers)

    def _expire_late(self, ends: dict[bytes, _Encoded], keys: Sequence[bytes]) -> None:
        now = datetime.fromtimestamp(self._clock(), timezone.utc)
        for key in keys:
            ended = ends[key].ended
            if (in_time := as_of(ended, now)) is not ended:
                ends[key] = self._encoded(in_time)
                self.counts["expired_after_the_run"] += 1

    def _log_usage(self, billed: Sequence[KeyedRecord]) -> asyncio.Task[None]:
        """Ends once their usage is acknowledged; the usage of several batches goes together, since nobody waits."""
        self._usage_waiting += billed
        if self._usage_sending is None:
            self._usage_sending = asyncio.create_task(self._log_usage_soon())
        return self._usage_sending

    def _usage_of(self, ended: Ended) -> KeyedRecord | None:
        """The usage of a success. Raises ValueError for one that the log does not take."""
        finished = ended.finished
        if finished.outcome is not Outcome.SUCCEEDED:
            return None
        key, value = finished.customer_id.encode(), encode(usage(finished))
        if len(key) + len(value) > self._usage.max_message_bytes - _ENVELOPE_BYTES:
            raise ValueError(f"the usage takes {len(key) + len(value)} bytes, more than the log takes")
        return KeyedRecord(self._usage.name, key, value, _STAMP.headers(UsageRecorded, ended.traceparent))

    async def _log_usage_soon(self) -> None:
        await asyncio.sleep(_USAGE_LINGER_S)
        records, self._usage_waiting, self._usage_sending = self._usage_waiting, [], None
        await self._log(records, keys_repeat=True)

    async def _log(self, records: Sequence[KeyedRecord], *, keys_repeat: bool = False) -> None:
        """Until every record is acknowledged, as it is. One whose acknowledgement failed may be written twice."""
        left = list(records)
        pause = Pause(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        while left:
            sent, unsent = await self._offer(left, keys_repeat=keys_repeat)
            left = unsent + await self._unacknowledged(sent)
            if left:
                self.counts["log_retries"] += 1
                await pause.wait()

    async def _offer(
        self, records: Sequence[KeyedRecord], *, keys_repeat: bool = False
    ) -> tuple[list[HandedOver], list[KeyedRecord]]:
        """Hand records to the sender: those it took, and those that are certainly not on their way."""
        try:
            sent, unsent = await self._producer.enqueue_all(
                records, timeout_s=_ENQUEUE_TIMEOUT_S, keys_repeat=keys_repeat
            )
        except BusUnavailable as error:
            log.warning("results held, Kafka is away", extra={"fields": {"records": len(records), "reason": error}})
            return [], list(records)
        if unsent:
            fields = {"records": len(unsent), "reason": "no room in the sender"}
            log.warning("results held, Kafka is away", extra={"fields": fields})
        return sent, unsent

    async def _unacknowledged(self, sent: Sequence[HandedOver]) -> list[KeyedRecord]:
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

    async def _cache(self, encoded: Collection[_Encoded]) -> None:
        """One round trip: every result unless one is there, then one hint per API instance with all its ids."""
        for wait_s in (*_CACHE_RETRIES_S, None):
            try:
                await self._write(encoded)
                return
            except RedisError as error:
                self.counts["cache_failures"] += 1
                if wait_s is None:
                    # Whoever waits for these is answered from the log, later. A worker that stopped here would keep
                    # everybody else waiting.
                    self.counts["results_not_cached"] += len(encoded)
                    fields = {"results": len(encoded), "reason": repr(error)}
                    log.error("results not cached, the log has them", extra={"fields": fields})
                    return
                await asyncio.sleep(wait_s)

    async def _write(self, encoded: Collection[_Encoded]) -> None:
        hints: defaultdict[str, list[bytes]] = defaultdict(list)
        pipeline = self._redis.pipeline(transaction=False)
        for one in encoded:
            request_id = one.ended.finished.request_id
            pipeline.execute_command("SET", self._keys.result(request_id), one.result, "NX", "EX", self._ttl_s)
            hints[one.ended.reply_to].append(request_id.bytes)
        for instance, ids in hints.items():
            pipeline.execute_command("PUBLISH", self._keys.results_channel(instance), b"".join(ids))
        await pipeline.execute()

    def _encoded(self, ended: Ended) -> _Encoded:
        """An end's records. One that no record holds becomes a failure, before anything of it is on the log.

        So does one whose usage none holds: what cannot be billed is no success.
        """
        failures: list[Failure] = []
        with self._blame.judging("recording its result", failures.append):
            return self._as_records(ended)
        if ended.logged is not None:  # it stands as it is, and `verify` names it too
            self.counts["usage_lost"] += 1
            return _Encoded(ended=ended, result=ended.logged, usage=None)
        return self._as_records(as_failed(ended, code=failures[0].code, message=failures[0].message))

    def _as_records(self, ended: Ended) -> _Encoded:
        if ended.logged is not None:
            return _Encoded(ended=ended, result=ended.logged, usage=self._usage_of(ended))
        result = encode(ended.finished)
        if len(result) > self._largest_bytes:  # else S3 would have its outputs
            words = f"the result takes {len(result)} bytes, more than the log takes"
            words += ", and S3 for large ones is away or too busy"
            ended = as_failed(ended, code="unavailable", message=words)
            result = encode(ended.finished)
        return _Encoded(ended=ended, result=result, usage=self._usage_of(ended))


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
