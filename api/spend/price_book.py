"""What one unit of each meter costs under a price id: the price list, from memory.

An entry never changes once it is published, so what was read once holds; only what is not known yet is asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from api.admission.demand import Cost

#: How long an id that is in no price list is not asked for again.
_ABSENT_S: Final = 1.0
_MOST_ABSENT: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """An entry: millionths of the currency's main unit for one unit of each meter. A meter it does not name is free."""

    price_id: str
    currency: str
    amounts_micros: Mapping[str, int]

    def of(self, cost: Cost) -> int:
        """Millionths that so many units cost."""
        return sum(amount * cost.of(meter) for meter, amount in self.amounts_micros.items())


class PricesAway(RuntimeError):
    """The price list cannot be read now, or says what it must not; the message says which."""


class Prices(Protocol):
    """Where the price list is stored."""

    async def entry(self, price_id: str) -> Price | None:
        """The entry, None when there is none, within a deadline. Raises PricesAway."""


class PriceBook:
    """The entries known to this process."""

    def __init__(self, prices: Prices, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._prices = prices
        self._clock = clock
        self._known: dict[str, Price] = {}
        self._absent: dict[str, float] = {}
        self._lookups: dict[str, asyncio.Task[Price | None]] = {}

    async def find(self, price_id: str) -> Price | None:
        """The entry, None when nothing is published under this id. Raises PricesAway."""
        known = self._known.get(price_id)
        if known is not None or self._clock() - self._absent.get(price_id, float("-inf")) < _ABSENT_S:
            return known
        task = self._lookups.get(price_id)
        if task is None:
            # One look-up however many calls wait for it; a caller that leaves does not end it.
            task = self._lookups[price_id] = asyncio.ensure_future(self._look_up(price_id))
            task.add_done_callback(lambda t: self._looked(price_id, t))
        return await asyncio.shield(task)

    async def _look_up(self, price_id: str) -> Price | None:
        entry = await self._prices.entry(price_id)
        if entry is not None:
            self._known[price_id] = entry
            self._absent.pop(price_id, None)
        else:
            if len(self._absent) >= _MOST_ABSENT:
                self._absent.clear()
            self._absent[price_id] = self._clock()
        return entry

    def _looked(self, price_id: str, task: asyncio.Task[Price | None]) -> None:
        del self._lookups[price_id]
        if not task.cancelled():
            task.exception()  # seen here even when every caller has left
