"""Prices and confirmed spending in Postgres, as admission reads them, each within its deadline."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Final

from api.spend.price_book import Price, PricesAway
from api.spend.spend import Account, Confirmed, LedgerAway
from infra.kafka import partition_of_key
from infra.postgres import DatabaseUnavailable, Pool, Record, fetch_within, queries
from schemas.keys import ledger_group
from schemas.topics import USAGE

_PRICE_WITHIN_S: Final = 0.5
#: Hours that ended so long ago are closed once the ledger is half of that past their end: no request lives so long.
_CLOSES: Final = timedelta(minutes=60)
#: How long sums of closed hours are gone by at most; some are read again sooner, so that not all are at once.
_CLOSED_S: Final = 300.0
_MOST_CLOSED: Final = 20_000


class PostgresPrices:
    """Implements the port Prices."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def entry(self, price_id: str) -> Price | None:
        """See Prices."""
        try:
            rows = await fetch_within(self._pool, _PRICE_WITHIN_S, queries("api.spend")["spend_price"], price_id)
        except DatabaseUnavailable as error:
            raise PricesAway(str(error)) from error
        currencies = sorted({row["currency"] for row in rows})
        if len(currencies) > 1:
            raise PricesAway(f"price '{price_id}' has meters in {' and '.join(currencies)}")
        if not rows:
            return None
        amounts = {row["meter"]: row["amount_micros"] for row in rows}
        return Price(price_id=price_id, currency=currencies[0], amounts_micros=amounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Closed:
    """What the hours of an account before `cut` came to when they were read last, at `read_s`."""

    cut: datetime
    micros: int
    read_s: float


class PostgresLedger:
    """Implements the port Ledger: sums and the ledger's word in one statement, so that they are of one moment.

    Hours that the ledger was past long before are not summed every time. What is still added to one of them, because
    somebody had it handled again, counts `_CLOSED_S` later at most.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        namespace: str,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._now = now
        self._group = ledger_group(namespace)
        topic = USAGE.in_namespace(namespace)
        self._topic, self._partitions = topic.name, topic.partitions
        self._closed: dict[Account, _Closed] = {}

    async def confirmed(self, accounts: Sequence[Account], *, within_s: float) -> Sequence[Confirmed]:
        """See Ledger."""
        read_s, newest = self._clock(), (self._now() - _CLOSES).replace(minute=0, second=0, microsecond=0)
        known = [self._known(account, read_s) for account in accounts]
        cuts = [max(a.since, newest) if k is None else k.cut for a, k in zip(accounts, known, strict=True)]
        try:
            rows = await fetch_within(
                self._pool,
                within_s,
                queries("api.spend")["spend"],
                self._group,
                self._topic,
                [a.customer_id for a in accounts],
                [partition_of_key(a.customer_id.encode(), self._partitions) for a in accounts],
                [a.currency for a in accounts],
                [a.since if k is None else k.cut for a, k in zip(accounts, known, strict=True)],
                cuts,
                [a.until for a in accounts],
            )
        except DatabaseUnavailable as error:
            raise LedgerAway(str(error)) from error
        found = []
        for account, closed, cut, row in zip(accounts, known, cuts, rows, strict=True):
            if closed is None:
                closed = _Closed(cut=cut, micros=int(row["closed_micros"]), read_s=read_s)
                until = row["complete_until"]
                if row["unpriced"] is None and until is not None and until >= cut + _CLOSES / 2:
                    self._keep(account, closed)
            found.append(_confirmed(row, closed.micros))
        return found

    def _known(self, account: Account, now_s: float) -> _Closed | None:
        known = self._closed.get(account)
        share = 0.5 + zlib.crc32(account.customer_id.encode()) / 2**33
        return known if known is not None and now_s - known.read_s < _CLOSED_S * share else None

    def _keep(self, account: Account, closed: _Closed) -> None:
        self._closed.pop(account, None)
        if len(self._closed) >= _MOST_CLOSED:
            del self._closed[next(iter(self._closed))]
        self._closed[account] = closed


def _confirmed(row: Record, closed_micros: int) -> Confirmed:
    return Confirmed(
        spent_micros=closed_micros + int(row["open_micros"]),
        settled_at=row["complete_until"],
        said_age_s=float("inf") if row["said_age_s"] is None else row["said_age_s"],
        unpriced=row["unpriced"],
    )
