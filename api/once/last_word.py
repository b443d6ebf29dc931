"""What the log says in the end about a request that may never have been accepted.

Read once no success of the request can come any more: its partition of the results topic, for the time in which one
could have been recorded.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from datetime import datetime
from uuid import UUID

from api.errors import AnswerLost
from api.results.log import Log, size_bytes
from infra.kafka import BusUnavailable, partition_of_key
from infra.kafka_lookups import Lookups
from schemas.first_results import SLACK_MS, FirstResults
from schemas.records import InferenceFinished

_WITHIN_S = 5.0
#: Of one partition and about a minute.
_MOST_BYTES = 256 * 1024 * 1024


class LogsLastWord:
    """Implements the port LastWord on the results topic."""

    def __init__(self, lookups: Lookups[Log], *, topic: str) -> None:
        self._lookups = lookups
        self._topic = topic

    async def of(
        self, request_id: UUID, customer_id: str, *, since: datetime, until: datetime
    ) -> InferenceFinished | None:
        """See LastWord."""
        try:
            looking = self._look(request_id.bytes, round(since.timestamp() * 1000), round(until.timestamp() * 1000))
            finished = await asyncio.wait_for(looking, _WITHIN_S)
        except (BusUnavailable, asyncio.TimeoutError) as error:
            words = f"whether request {request_id} was run cannot be read from the log now; send the call again later"
            raise AnswerLost(f"{words}: {type(error).__name__}: {error}", code="log_away") from error
        return finished if finished is None or finished.customer_id == customer_id else None

    async def _look(self, key: bytes, since_ms: int, until_ms: int) -> InferenceFinished | None:
        """The first result in this time. Raises BusUnavailable, also when it cannot be told."""
        first, read_bytes = FirstResults(), 0
        first.look_for(key, since_ms, partition=0)
        async with self._lookups.one() as log:
            partitions = await log.partitions(self._topic)
            if not partitions:
                raise BusUnavailable(f"topic {self._topic} is missing; run 'inferlog provision'")
            partition = partition_of_key(key, partitions)
            spans = await log.between(self._topic, [partition], since_ms=since_ms - SLACK_MS, until_ms=until_ms)
            async with aclosing(log.read(self._topic, spans)) as batches:
                async for records in batches:
                    read_bytes += size_bytes(records)
                    for record in records:
                        first.offer(record.key, record.value)
                    if first.found:
                        return first.found[key].finished
                    if first.unlearnt or read_bytes > _MOST_BYTES:
                        why = "it has another schema" if first.unlearnt else f"it may lie past {read_bytes} bytes"
                        raise BusUnavailable(f"{self._topic}: {why}")
        return None
