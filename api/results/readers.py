"""Readers of the log, with which customers take turns: one customer's look-ups come one after the other.

However much one of them asks, another waits for what is being read now, not for all that the first has asked before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from api.errors import RateLimited, retry_after
from api.results.log import Log
from infra.kafka import BusUnavailable
from infra.kafka_lookups import Lookups

#: Look-ups that one customer may have at once, in one gateway: one has a reader, the others wait.
AT_ONCE = 4
#: How long one waits: behind the same customer's, then behind one of each other customer.
TURN_WITHIN_S = 10.0


@dataclass(slots=True, eq=False)
class _Customer:
    """One who has look-ups now."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    looks: int = 0


class Readers:
    """Turns with the readers that there are."""

    def __init__(self, lookups: Lookups[Log]) -> None:
        self._lookups = lookups
        self._customers: dict[str, _Customer] = {}

    @asynccontextmanager
    async def one(self, customer_id: str) -> AsyncIterator[Log]:
        """A reader for the length of the block; thrown away when the block raises.

        Raises RateLimited for too many at once, BusUnavailable when none is free in time or none can be opened.
        """
        customer = self._customers.setdefault(customer_id, _Customer())
        if customer.looks >= AT_ONCE:
            words = f"more than {AT_ONCE} look-ups of yours at once"
            words += ", of requests that the cache did not answer in time or no longer has"
            raise RateLimited(words, code="too_many_lookups", headers=retry_after(1.0))
        customer.looks += 1
        try:
            async with AsyncExitStack() as held:
                try:
                    log = await asyncio.wait_for(self._reader(customer, held), TURN_WITHIN_S)
                except asyncio.TimeoutError as error:
                    raise BusUnavailable(f"other look-ups came first for {TURN_WITHIN_S:g} s") from error
                yield log
        finally:
            customer.looks -= 1
            if not customer.looks:
                del self._customers[customer_id]

    async def _reader(self, customer: _Customer, held: AsyncExitStack) -> Log:
        # Of each customer only one waits for a reader, so that first come, first served is a turn for everybody.
        await held.enter_async_context(customer.turn)
        return await held.enter_async_context(self._lookups.one())
