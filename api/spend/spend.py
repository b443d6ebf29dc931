"""A customer's spend cap: what the ledger has confirmed of the month, how old that word is, and what a call may cost.

The limiter's own call keeps what is reserved and not yet confirmed; here is the rest of the decision. Whatever is not
known is refused, and only for customers with a cap. Amounts are whole millionths of a currency's main unit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import Final, Protocol

from api.admission.caller import Caller, Cap
from api.admission.demand import Cost, Spending
from api.errors import PaymentRequired, Unavailable, retry_after
from api.spend.price_book import Price, PriceBook, PricesAway

logger = logging.getLogger(__name__)

#: How often the ledger is read for customers that call; less often where reading takes long.
READ_EVERY_S: Final = 0.7
#: At most this share of the time is spent reading.
_READING_SHARE: Final = 0.2
#: Customers that did not call for so long are not read for.
_IDLE_S: Final = 60.0
_MOST_ACCOUNTS: Final = 10_000
_BATCH: Final = 20
#: A call that waits for the first reading waits no longer, and after a failed one the next calls do not wait at all.
_FIRST_WITHIN_S: Final = 0.5
_AWAY_PAUSE_S: Final = 1.0
#: How far back the ledger may have settled. The limiter keeps reservations for longer, so that none of them is missed;
#: a request that old has ended, whether or not any worker is at work (12 minutes, streams/usage/progress.py).
SETTLED_WITHIN: Final = timedelta(minutes=15)
#: The largest amount that the limiter's script counts exactly.
_MOST_MICROS: Final = 2**53 - 1
_UNKNOWN_RETRY_S: Final = 2.0
#: The ledger confirms calls some seconds after them, and then what was reserved too much is free again.
_RESERVED_RETRY_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A customer's calendar month (UTC) in one currency; `since` is the month's begin."""

    customer_id: str
    currency: str
    since: datetime

    @property
    def until(self) -> datetime:
        """Where the month ends and the next one begins."""
        return month_of(self.since + timedelta(days=32))


def month_of(moment: datetime) -> datetime:
    """The begin of the moment's calendar month (UTC)."""
    return moment.astimezone(timezone.utc).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """What the ledger says of an account, all from one snapshot.

    `spent_micros` has everything that was admitted before `settled_at` (None: no ledger has said so yet), and some of
    what came after. `said_age_s` is how long ago a ledger last said anything, by the clock of the database. `unpriced`
    is a price id of the usage that no price list has. `read_s` is this process' clock before it was read.
    """

    spent_micros: int
    settled_at: datetime | None
    said_age_s: float
    unpriced: str | None = None
    read_s: float = 0.0


class SpendUnknown(Unavailable):
    """The refusal of a call under a spend cap when it is not known what was spent. Whoever raises it counts it."""

    code = "spend_unknown"

    def __init__(self, why: str) -> None:
        words = f"this customer has a spend cap, and what was spent this month is not known now: {why}"
        super().__init__(words, retry_after_s=_UNKNOWN_RETRY_S)


class LedgerAway(RuntimeError):
    """The ledger's tables cannot be read now."""


class Ledger(Protocol):
    """Where usage is counted."""

    async def confirmed(self, accounts: Sequence[Account], *, within_s: float) -> Sequence[Confirmed]:
        """One answer per account, in order. Raises LedgerAway."""


@dataclass(slots=True)
class _Entry:
    asked_s: float
    found: Confirmed | None = None
    lookup: asyncio.Task[None] | None = field(default=None)


class Spend:
    """Implements the gate's port Money. `view_s`: how old the ledger's word may be; `counts`: refusals by kind."""

    def __init__(
        self,
        ledger: Ledger,
        prices: PriceBook,
        *,
        view_s: float,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._ledger = ledger
        self._prices = prices
        self._view_s = view_s
        self._clock = clock
        self._now = now
        self._sleep = sleep
        self._entries: dict[Account, _Entry] = {}
        self._away_until_s = float("-inf")
        self._why: str | None = None
        self.counts: Counter[str] = Counter()

    async def spending(self, caller: Caller, price_id: str, cost: Cost, admitted_at: datetime) -> Spending | None:
        """See Money. Raises Unavailable when it is not known what was spent, PaymentRequired when nothing is left."""
        cap = caller.cap
        if cap is None:
            return None
        price = await self._price(price_id, cap)
        account = Account(customer_id=caller.customer_id, currency=cap.currency, since=month_of(admitted_at))
        view, settled_at = self._settled(await self._view(account))
        spending = Spending(
            left_micros=min(cap.amount_micros - view.spent_micros, _MOST_MICROS),
            settled_at=settled_at,
            cost_micros=price.of(cost),
            resets_at=account.until,
        )
        if spending.cost_micros > spending.left_micros:  # whatever is reserved: it need not be asked for
            raise cap_reached(cap, spending)
        return spending

    async def _price(self, price_id: str, cap: Cap) -> Price:
        try:
            price = await self._prices.find(price_id)
        except PricesAway as error:
            raise self._unknown(f"the price list cannot be read: {error}") from error
        if price is None:
            raise self._unknown(f"nothing is published as price '{price_id}'; see  inferlog prices list")
        if price.currency != cap.currency:
            raise PaymentRequired(
                f"this customer's spend cap is in {cap.currency.upper()} and the model is priced in "
                f"{price.currency.upper()} ('{price_id}'): amounts of two currencies are not added up; ask for a cap "
                f"in {price.currency.upper()}",
                code="spend_currency_differs",
            )
        return price

    def _settled(self, view: Confirmed) -> tuple[Confirmed, datetime]:
        """The view and up to when it is whole. Raises Unavailable when it says too little, or is too old."""
        if view.unpriced is not None:
            raise self._unknown(
                f"there is usage by price '{view.unpriced}', which is not published; see  inferlog prices publish"
            )
        if view.settled_at is None:
            raise self._unknown("no ledger has told yet up to when usage is complete")
        age_s = view.said_age_s + self._clock() - view.read_s
        if age_s > self._view_s:
            raise self._unknown(f"the ledger was last heard of {age_s:.0f} s ago, and {self._view_s:g} s is the most")
        behind = self._now() - view.settled_at
        if behind > SETTLED_WITHIN:
            at_most = f"{SETTLED_WITHIN.seconds} s is the most"
            raise self._unknown(f"the ledger is behind by {behind.total_seconds():.0f} s, and {at_most}")
        return view, view.settled_at

    async def _view(self, account: Account) -> Confirmed:
        """What is known of the account, read first if that is nothing or too old. Raises Unavailable."""
        now_s = self._clock()
        entry = self._entries.pop(account, None) or _Entry(now_s)
        if len(self._entries) >= _MOST_ACCOUNTS:
            del self._entries[next(iter(self._entries))]  # the one asked for longest ago
        self._entries[account] = entry
        entry.asked_s = now_s
        if entry.found is not None and now_s - entry.found.read_s <= self._view_s:
            return entry.found
        if now_s >= self._away_until_s or entry.lookup is not None:
            if entry.lookup is None:
                entry.lookup = asyncio.ensure_future(self._read([account], within_s=_FIRST_WITHIN_S))
                entry.lookup.add_done_callback(lambda task: _looked(entry, task))
            try:
                await asyncio.shield(entry.lookup)
            except LedgerAway:
                self._away_until_s = self._clock() + _AWAY_PAUSE_S
        if entry.found is None or self._clock() - entry.found.read_s > self._view_s:
            raise self._unknown(f"the ledger cannot be read: {self._why or 'it was not read in time'}")
        return entry.found

    async def _read(self, accounts: Sequence[Account], *, within_s: float) -> None:
        """Read what the ledger has of these. Raises LedgerAway."""
        read_s = self._clock()
        try:
            found = await self._ledger.confirmed(accounts, within_s=within_s)
        except LedgerAway as error:
            if self._why is None:
                logger.warning("the ledger cannot be read: spend caps", extra={"fields": {"why": error}})
            self._why = str(error)
            raise
        if self._why is not None:
            logger.info("the ledger can be read again")
        self._why = None
        for account, view in zip(accounts, found, strict=True):
            entry = self._entries.get(account)
            if entry is not None and (entry.found is None or entry.found.read_s <= read_s):
                entry.found = replace(view, read_s=read_s)

    async def run(self) -> None:
        """Read for all that called lately, again and again; an outage is said once, and lasts as long as it lasts."""
        while True:
            began_s = self._clock()
            for account in [a for a, entry in self._entries.items() if began_s - entry.asked_s > _IDLE_S]:
                del self._entries[account]
            accounts = list(self._entries)
            try:
                for at in range(0, len(accounts), _BATCH):
                    await self._read(accounts[at : at + _BATCH], within_s=2.0)
            except LedgerAway:
                self._away_until_s = self._clock() + _AWAY_PAUSE_S
            took_s = self._clock() - began_s
            await self._sleep(max(READ_EVERY_S, took_s / _READING_SHARE - took_s))

    def _unknown(self, why: str) -> Unavailable:
        self.counts[SpendUnknown.code] += 1
        return SpendUnknown(why)


def _looked(entry: _Entry, task: asyncio.Task[None]) -> None:
    entry.lookup = None
    if not task.cancelled():
        task.exception()  # seen here even when every caller has left


def cap_reached(cap: Cap, spending: Spending, *, reserved_micros: int = 0) -> PaymentRequired:
    """The refusal of a call that the cap has no room for; `reserved_micros`: what other calls may still come to.

    When only that is in the way, calling again some seconds later may help, and `Retry-After` says so.
    """
    month = month_of(spending.resets_at - timedelta(days=1))
    amount, has = shown(cap.amount_micros), shown(cap.amount_micros - spending.left_micros)
    waiting = f", requests of the last seconds may come to {shown(reserved_micros)}" if reserved_micros else ""
    passes = spending.cost_micros <= spending.left_micros
    again = "in some seconds, when it is known what those came to" if passes else "next month"
    return PaymentRequired(
        f"the spend cap of {amount} {cap.currency.upper()} for {month:%Y-%m} is reached: {has} is spent{waiting}, and "
        f"this request may cost {shown(spending.cost_micros)}; ask for a higher cap, or call again {again}"
        + ("" if passes else f" (from {spending.resets_at:%Y-%m-%dT%H:%MZ})"),
        code="spend_cap_reached",
        headers=retry_after(_RESERVED_RETRY_S) if passes else None,
    )


def shown(micros: int) -> str:
    """An amount in main units, all its digits: 12.50, 0.000512."""
    sign, micros = ("-", -micros) if micros < 0 else ("", micros)
    whole, part = divmod(micros, 1_000_000)
    digits = f"{part:06}".rstrip("0").ljust(2, "0")
    return f"{sign}{whole}.{digits}"
