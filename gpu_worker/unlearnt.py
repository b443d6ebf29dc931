"""Requests whose schema id nobody here has learnt: their writer may be newer, so the schemas are asked for once more.

Schemas are on their topic before any record that uses them, so an asking that begins after a record was read tells
whether its id means anything. Many records share an asking, and one at a time is under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from infra.kafka import BusUnavailable
from infra.pause import Pause
from infra.schema_feed import learn_nothing
from schemas.codec import Placed, decode_at
from schemas.records import InferenceRequested

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 5.0


class Unlearnt:
    """Second looks at records.

    `learn_schemas` returns once this process knows every schema that was published before the call; it raises
    BusUnavailable or a timeout when it cannot.
    """

    def __init__(self, learn_schemas: Callable[[], Awaitable[None]] = learn_nothing) -> None:
        self._learn_schemas = learn_schemas
        self._turn = asyncio.Lock()
        self._begun = 0
        self._ended = 0

    async def decode(self, record: Placed) -> InferenceRequested:
        """The request in this record, after asking; while the schemas cannot be read it waits. Raises DecodeError."""
        await self._ask()
        return decode_at(record, InferenceRequested)

    async def _ask(self) -> None:
        """Return after an asking that began later than this call."""
        wanted = self._begun + 1
        async with self._turn:
            if self._ended >= wanted:
                return
            self._begun += 1
            number, pause = self._begun, Pause(_FIRST_RETRY_S, _LONGEST_RETRY_S)
            while True:
                try:
                    await self._learn_schemas()
                    break
                except (BusUnavailable, asyncio.TimeoutError) as error:
                    fields = {"reason": repr(error)}
                    log.warning("requests wait, since their schemas are unknown here", extra={"fields": fields})
                    await pause.wait()
            self._ended = number
