"""What the log says in the end about a request that may never have been accepted.

Read once no success of the request can come any more: its partition of the results topic, for the time in which one
could have been recorded. That may be much, so customers take turns here too, and with their status reads.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from datetime import datetime
from uuid import UUID

from api.errors import AnswerLost, RateLimited
from api.results.log import size_bytes
from api.results.readers import Readers
from infra.kafka import BusUnavailable, partition_of_key
from schemas.first_results import SLACK_MS, FirstResults
from schemas.records import InferenceFinished

#: The wait for a reader is part of it: the call has waited long already.
_WITHIN_S = 5.0
#: Of one partition and about a minute.
_MOST_BYTES = 256 * 1024 * 1024


class LogsLastWord:
    """Implements the port LastWord on the results topic."""

    def __init__(self, readers: Readers, *, topic: str) -> None:
        self._readers = readers
        self._topic = topic

    async def of(
        self, request_id: UUID, customer_id: str, *, since: datetime, until: datetime
    ) -> InferenceFinished | None:
        """See LastWord."""
        try:
            since_ms, until_ms = (round(at.timestamp() * 1000) for at in (since, until))
            looking = self._look(request_id.bytes, customer_id, since_ms, until_ms)
            finished = await asyncio.wait_for(looking, _WITHIN_S)
        except (BusUnavailable, RateLimited, asyncio.TimeoutError) as error:
            words = f"whether request {request_id} was run cannot be read from the log now; send the call again later"
            raise AnswerLost(f"{words}: {type(error).__name__}: {error}", code="log_away") from error
        return finished if finished is None or finished.customer_id == customer_id else None

    async def _look(self, key: bytes, customer_id: str, since_ms: int, until_ms: int) -> InferenceFinished | None:
        """The first result in this time. Raises BusUnavailable, also when it cannot be told; RateLimited for too many
        of this customer at once."""
        first, read_bytes = FirstResults(), 0
        first.look_for(key, since_ms, partition=0)
        async with self._readers.one(customer_id) as log:
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
