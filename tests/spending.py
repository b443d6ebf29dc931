"""Stand-ins for what a spend cap is decided by beside the limiter: the ledger's word and the price list."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

from api.admission.caller import Caller, Cap
from api.admission.demand import Cost
from api.spend.price_book import Price, PriceBook, PricesAway
from api.spend.spend import Account, Confirmed, LedgerAway, Spend

BEGAN = datetime(2026, 3, 10, 12, tzinfo=timezone.utc)


class Time:
    """Two clocks that move together when told to: seconds since BEGAN, and the moment."""

    def __init__(self) -> None:
        self.s = 0.0

    def clock(self) -> float:
        return self.s

    def now(self) -> datetime:
        return BEGAN + timedelta(seconds=self.s)


class FakePrices:
    """Implements Prices."""

    def __init__(self, *prices: Price) -> None:
        self.entries = {p.price_id: p for p in prices}
        self.away = False
        self.asked: list[str] = []

    async def entry(self, price_id: str) -> Price | None:
        self.asked.append(price_id)
        await asyncio.sleep(0)
        if self.away:
            raise PricesAway("switched off")
        return self.entries.get(price_id)


class FakeLedger:
    """Implements Ledger: `spent` by account; `asked` keeps the accounts of every read."""

    def __init__(self, time: Time) -> None:
        self.time = time
        self.spent: Counter[Account] = Counter()
        self.settled_at: datetime | None = BEGAN
        self.said_s = 0.0
        self.unpriced: str | None = None
        self.away = False
        self.hold = asyncio.Event()
        self.hold.set()
        self.asked: list[Sequence[Account]] = []

    def says(self, settled_at: datetime) -> None:
        """A ledger looks, now."""
        self.settled_at, self.said_s = settled_at, self.time.s

    async def confirmed(self, accounts: Sequence[Account], *, within_s: float) -> Sequence[Confirmed]:
        self.asked.append(list(accounts))
        await self.hold.wait()
        if self.away:
            raise LedgerAway("switched off")
        return [
            Confirmed(
                spent_micros=self.spent[a],
                settled_at=self.settled_at,
                said_age_s=self.time.s - self.said_s,
                unpriced=self.unpriced,
            )
            for a in accounts
        ]


STANDARD = Price(price_id="standard-v1", currency="usd", amounts_micros={"requests": 0, "items": 100, "tokens": 2})


def spend(time: Time, ledger: FakeLedger, *prices: Price, view_s: float = 30.0) -> Spend:
    """What a gateway has."""
    book = PriceBook(FakePrices(*(prices or (STANDARD,))), clock=time.clock)
    return Spend(ledger, book, view_s=view_s, clock=time.clock, now=time.now)


def capped(micros: int | None, *, currency: str = "usd", customer_id: str = "cust_a") -> Caller:
    """A caller whose customer has this cap, or none."""
    cap = None if micros is None else Cap(amount_micros=micros, currency=currency)
    return Caller(customer_id=customer_id, key_id="k", limits=(), cap=cap)


def items(number: int, *, tokens: int = 0) -> Cost:
    """So much of a call."""
    return Cost(items=number, tokens=tokens)
