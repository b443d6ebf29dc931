"""The price list: what one unit of each meter costs under a price id.

An entry never changes, a new price is a new entry; it and the fact of it are written in one transaction.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from infra.actor import COMMAND_STAMP, Author
from infra.outbox import add_facts
from infra.postgres import Connection, queries
from schemas.facts import PriceBookPublished
from schemas.ids import new_event_id
from schemas.ranges import LONG_MAX
from schemas.topics import PRICES

_PRICE_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
#: What is counted of a request; a price of anything else would never be used.
_METERS: Final = ("requests", "items", "tokens")
_CURRENCY: Final = re.compile(r"[a-z]{3}")


class PriceConflict(ValueError):
    """An entry of this id says something else; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """An entry: millionths of the currency's main unit for one unit of each meter. `created_at` is None until it is
    published, and is no part of what an entry says."""

    price_id: str
    currency: str
    amounts_micros: Mapping[str, int]
    created_at: datetime | None = field(default=None, compare=False)


def price(price_id: str, meters: Sequence[str], currency: str) -> Price:
    """An entry from words like `items=100`. Raises ValueError naming what is at fault and what was expected."""
    if not _PRICE_ID.fullmatch(price_id):
        raise ValueError("PRICE_ID: expected 1 to 100 letters, digits, '.', '_' and '-'")
    if not _CURRENCY.fullmatch(currency):
        raise ValueError(f"--currency: expected three small letters like 'usd', found '{currency}'")
    amounts: dict[str, int] = {}
    for text in meters:
        meter, separator, amount = text.partition("=")
        if not separator or not re.fullmatch(r"\d{1,19}", amount, re.ASCII):
            raise ValueError(
                f"--meter: expected a meter's name and millionths of the currency's main unit, like items=100, "
                f"found '{text}'"
            )
        if meter not in _METERS:
            raise ValueError(f"--meter: nothing is counted as '{meter}'; the meters are {', '.join(_METERS)}")
        if meter in amounts:
            raise ValueError(f"--meter: '{meter}' is priced twice")
        if int(amount) > LONG_MAX:
            raise ValueError(f"--meter: expected at most {LONG_MAX} millionths, found {amount}")
        amounts[meter] = int(amount)
    if not amounts:
        raise ValueError("--meter: expected at least one, like --meter items=100")
    return Price(price_id=price_id, currency=currency, amounts_micros=amounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What publishing did. `created` is False when the entry was there already and said the same, `new_currency` True
    when there are other entries and none of them has this currency."""

    created: bool
    new_currency: bool


async def publish_price(connection: Connection, wanted: Price, *, by: Author) -> Added:
    """Add an entry. Raises PriceConflict."""
    sql = queries("streams.billing")
    async with connection.transaction():
        # An entry is several rows, so no key of the table keeps two publishers of one id apart.
        await connection.execute(sql["lock_prices"])
        there = by_id(await connection.fetch(sql["price"], wanted.price_id))
        known = [p.currency for p in await prices(connection) if p.price_id != wanted.price_id]
        new_currency = bool(known) and wanted.currency not in known
        if there == [wanted]:
            return Added(created=False, new_currency=new_currency)
        if there:
            raise PriceConflict(
                f"price '{wanted.price_id}' is published as {shown(there[0])}; an entry never changes, because what "
                "was billed by it must stay explainable: publish the new price under another id"
            )
        created_at = await connection.fetchval(
            sql["insert_price"],
            wanted.price_id,
            list(wanted.amounts_micros),
            list(wanted.amounts_micros.values()),
            wanted.currency,
        )
        fact = PriceBookPublished(
            event_id=new_event_id(),
            occurred_at=created_at,
            price_id=wanted.price_id,
            currency=wanted.currency,
            amounts_micros=wanted.amounts_micros,
            actor=by.actor,
            reason=by.reason,
        )
        await add_facts(connection, PRICES, [(wanted.price_id, fact)], stamp=COMMAND_STAMP)
    return Added(created=True, new_currency=new_currency)


async def prices(connection: Connection) -> list[Price]:
    """Every entry, oldest first."""
    return by_id(await connection.fetch(queries("streams.billing")["prices"]))


def by_id(rows: Sequence[Mapping[str, Any]]) -> list[Price]:
    """Entries of the table's rows, in their order: a row prices one meter. Raises ValueError for two currencies."""
    found: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["price_id"]].append(row)
    entries = []
    for price_id, its in found.items():
        currencies = {row["currency"] for row in its}
        if len(currencies) > 1:
            raise ValueError(f"price '{price_id}' has meters in {' and '.join(sorted(currencies))}")
        entries.append(
            Price(
                price_id=price_id,
                currency=its[0]["currency"],
                amounts_micros={row["meter"]: row["amount_micros"] for row in its},
                created_at=its[0]["created_at"],
            )
        )
    return entries


def shown(entry: Price) -> str:
    """The entry in words."""
    amounts = ", ".join(f"{meter}={amount}" for meter, amount in sorted(entry.amounts_micros.items()))
    return f"{amounts} (millionths of {entry.currency.upper()})"
