"""What was used, read from the ledger a piece at a time, with what the ledger says of how complete that is.

Everything is of one moment; of any number of lines only a piece is in memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from zoneinfo import ZoneInfo

from infra.kafka import BusUnavailable, partition_of_key
from infra.periods import FIRST, LAST, cut_days, end_of, shown
from infra.postgres import Connection, open_connection, queries
from infra.settings import PostgresSettings, ReplaySettings
from schemas.keys import ledger_group
from schemas.topics import USAGE
from streams.log import open_log

#: What lines may be told apart by besides the meter, which is another unit and never added up with others.
GROUPS: Final = ("customer", "model", "version", "price_id")
COLUMNS: Final = ("start", "end", "customer_id", "customer", "model", "version", "price_id", "meter", "quantity")
#: How long the server may work on an answer.
PATIENCE_S: Final = 300
_PIECE: Final = 1000


class NobodyOfThatName(ValueError):
    """Nothing was found because of a name that nobody has; the message says where names are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """UTC hours that begin in [since, until), None: no bound; summed by interval and `by`; None in a filter: all."""

    since: datetime | None
    until: datetime | None
    interval: str
    zone: ZoneInfo
    by: Sequence[str]
    customer: str | None = None
    model: str | None = None
    version: str | None = None
    price_id: str | None = None
    meter: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLine:
    """A sum in the meter's smallest unit. Columns that were not asked for are empty; `customer` is the name.

    `start` and `end` are where the first hour of the period begins and the last one ends. What the ledger may hold out
    of all range is before `FIRST`, without a start, or from `LAST` on, without an end.
    """

    start: datetime | None
    end: datetime | None
    customer_id: str
    customer: str
    model: str
    version: str
    price_id: str
    meter: str
    quantity: int

    def plain(self, zone: ZoneInfo) -> dict[str, str | int | None]:
        """All columns, times as the zone's clocks show them."""
        values: dict[str, str | int | None] = {name: getattr(self, name) for name in COLUMNS}
        for name in ("start", "end"):
            at = getattr(self, name)
            values[name] = None if at is None else shown(at, zone)
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Completeness:
    """Sums of hours that end by `until` are whole; `seen_at`: when a ledger last said so; `as_of`: now. None: never."""

    until: datetime | None
    seen_at: datetime | None
    as_of: datetime
    positions: Mapping[int, int]


class Reading:
    """One answer, all of it as of one moment."""

    def __init__(self, connection: Connection, settings: ReplaySettings, wanted: Wanted) -> None:
        self._connection = connection
        self._wanted = wanted
        self._topic = USAGE.in_namespace(settings.kafka.namespace)
        self._group = ledger_group(settings.kafka.namespace)
        self.starts: list[datetime] = []
        self._last_end: datetime | None = None
        self._customers: list[str] | None = None

    async def prepare(self) -> None:
        """Find out which periods hold anything, and whom the customer's name means."""
        w, sql = self._wanted, queries("streams.usage")
        if w.customer is not None:
            found = await self._connection.fetch(sql["usage_customers"], w.customer)
            self._customers = sorted(r["customer_id"] for r in found)
        days = [r["day"] for r in await self._connection.fetch(sql["usage_days"], w.since, w.until, FIRST, LAST)]
        if w.interval == "total":
            hours = cut_days(days, "hour", w.zone, since=w.since, until=w.until)
            self.starts = hours[:1]
            self._last_end = end_of(hours[-1], "hour", w.zone) if hours else None
        else:
            self.starts = cut_days(days, w.interval, w.zone, since=w.since, until=w.until)

    def end_of(self, start: datetime) -> datetime:
        """Where the period that begins there ends."""
        if self._last_end is not None:
            return self._wanted.until or self._last_end
        end = end_of(start, self._wanted.interval, self._wanted.zone)
        return end if self._wanted.until is None else min(end, self._wanted.until)

    async def lines(self) -> AsyncIterator[list[UsageLine]]:
        """The lines in order of period, customer's name and id, model, version, price and meter; some at a time."""
        w, empty, piece = self._wanted, True, []
        # Where the range is open, what lies beyond all times is a period of its own.
        edges = self.starts if w.until is not None else [*self.starts, LAST]
        arguments = (edges, w.since, w.until, w.by, self._customers)
        filters = (w.model, w.version, w.price_id, w.meter)
        statement = queries("streams.usage")["usage"]
        async for row in self._connection.cursor(statement, *arguments, *filters, prefetch=_PIECE):
            piece.append(self._line(row))
            if len(piece) == _PIECE:
                yield piece
                empty, piece = False, []
        if piece:
            yield piece
        elif empty:
            await self._require_known()

    def _line(self, row: Any) -> UsageLine:
        period, start, end = row["period"], None, None
        if period == 0:
            end = FIRST
        elif period > len(self.starts):
            start = LAST
        else:
            start = self.starts[period - 1]
            end = self.end_of(start)
        values = {name: row[name] for name in COLUMNS[2:-1]}
        return UsageLine(start=start, end=end, quantity=int(row["quantity"]), **values)

    async def _require_known(self) -> None:
        """Only finding nothing needs an explanation; for a name nobody has, the look-up reads the whole table."""
        w = self._wanted
        known = await self._connection.fetchrow(queries("streams.usage")["known_names"], w.customer, w.model, w.meter)
        if w.customer is not None and not known["customer"]:
            raise NobodyOfThatName(f"there is no customer '{w.customer}'; see  inferlog customers list")
        if w.model is not None and not known["model"]:
            raise NobodyOfThatName(f"there is no model '{w.model}'; see  inferlog models list")
        if w.meter is not None and not known["meter"]:
            meters = [r["meter"] for r in await self._connection.fetch(queries("streams.usage")["meters"])]
            if meters:
                raise NobodyOfThatName(f"nothing was counted by the meter '{w.meter}'; there are {', '.join(meters)}")

    async def completeness(self) -> Completeness:
        """As of the same moment as the lines, of those partitions that their customers' usage may be on."""
        sql = queries("streams.usage")
        rows = await self._connection.fetch(sql["watermarks"], self._group, self._topic.name)
        positions = queries("streams.ledger")["positions"]
        found = await self._connection.fetch(positions, self._group, self._topic.name)
        now: datetime = await self._connection.fetchval(sql["usage_now"])
        partitions = set(range(self._topic.partitions))
        if self._customers is not None:
            partitions = {partition_of_key(c.encode(), self._topic.partitions) for c in self._customers}
        marks = {r["partition"]: r for r in rows if r["partition"] in partitions and r["complete_until"] is not None}
        whole = len(marks) == len(partitions)
        return Completeness(
            until=min(m["complete_until"] for m in marks.values()) if whole else None,
            seen_at=min((m["seen_at"] for m in marks.values()), default=None),
            as_of=now,
            positions={r["partition"]: r["next_offset"] for r in found},
        )


@asynccontextmanager
async def open_reading(settings: ReplaySettings, wanted: Wanted) -> AsyncIterator[Reading]:
    """A reading in one snapshot of the tables. Raises what Postgres raises, also when it takes over PATIENCE_S."""
    postgres: PostgresSettings = settings.postgres
    async with (
        open_connection(postgres, command_timeout_s=PATIENCE_S + 5) as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        await connection.execute(queries("streams.usage")["usage_patience"], str(PATIENCE_S * 1000))
        reading = Reading(connection, settings, wanted)
        await reading.prepare()
        yield reading


async def waiting_records(settings: ReplaySettings, positions: Mapping[int, int]) -> int | None:
    """Usage records on the log that were not counted at these positions; None when the log cannot be reached."""
    topic, waiting = USAGE.in_namespace(settings.kafka.namespace).name, 0
    try:
        async with open_log(settings.kafka) as reader:
            for partition, span in (await reader.freeze(topic, USAGE.partitions)).items():
                begin = max(positions.get(partition, 0), span.first)
                if begin < span.end:
                    first = await reader.first(topic, partition, begin=begin, end=span.end)
                    # Else only marks of transactions lie ahead.
                    waiting += span.end - first.offset if first is not None else 0
    except BusUnavailable:
        return None
    return waiting
