"""Where an operator works on letters: the table, brought up to date, and the log beside it while Kafka answers.

Long work goes in slices, each a transaction: ended in between, what was settled stays so, and doing it again goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Final

from infra.actor import Author
from infra.kafka import BusUnavailable
from infra.kafka_admin import open_admin
from infra.postgres import Connection, open_connection
from infra.settings import ReplaySettings
from schemas.keys import ledger_group
from schemas.topics import USAGE
from streams.ledger.dead_letters import SLICE_BYTES, Kind
from streams.ledger.raw import RawRecord
from streams.log import LogReader, LogRecord, open_log
from streams.quarantine import shelf
from streams.quarantine.collect import collect, name_kinds
from streams.quarantine.letters import Evidence, Place, Selection, State
from streams.quarantine.settling import Outcome, Settled, discard, redrive

SLICE_LETTERS: Final = 500
NO_USAGE: Final = (
    "only usage is redriven: the deadline of a request is over, so the most that could come of it is EXPIRED; have its "
    "caller send it again, and discard the letter"
)


class NotKept(RuntimeError):
    """The bytes of a record cannot be had; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is to be done with letters: redriven, or discarded. `accept` are objections that do not matter."""

    by: Author
    accept: Collection[Kind] = ()
    discarding: bool = False
    dry: bool = False


class Desk:
    """One connection to the table. `away` says why the log cannot be read; None while it can."""

    def __init__(
        self, settings: ReplaySettings, connection: Connection, reader: LogReader | None, away: str | None
    ) -> None:
        self.connection = connection
        self.namespace = settings.kafka.namespace
        self.away = away
        self._settings = settings
        self._reader = reader
        self._partitions: Mapping[str, int] | None = None

    async def read(self, place: Place) -> LogRecord | None:
        """The record that the log has at a place; None when it has none. Raises BusUnavailable."""
        if self._reader is None or self.away is not None:
            raise BusUnavailable(self.away or "the log was not opened")
        try:
            return await self._read(self._reader, place)
        except BusUnavailable as error:
            self.away = str(error)  # else each of many letters would wait for it
            raise

    async def _read(self, reader: LogReader, place: Place) -> LogRecord | None:
        if self._partitions is None:
            async with open_admin(self._settings.kafka) as admin:
                self._partitions = await admin.partition_counts()
        partitions = self._partitions.get(place.topic, 0)
        if place.partition >= partitions:
            return None
        span = (await reader.freeze(place.topic, partitions))[place.partition]
        if not span.first <= place.offset < span.end:
            return None
        return await reader.first(place.topic, place.partition, begin=place.offset, end=place.offset + 1)

    async def record(self, evidence: Evidence) -> RawRecord:
        """The record as it was set aside; bytes that were left on the log must have the digest of the letter.

        Raises NotKept, BusUnavailable.
        """
        if evidence.value_sha256 is None:
            return evidence.record(evidence.value)
        found = await self.read(evidence.letter.place)
        if found is None or found.value is None:
            raise NotKept("its value was too large for the letter, and the log has it no longer")
        if hashlib.sha256(found.value).hexdigest() != evidence.value_sha256:
            raise NotKept("its value was too large for the letter, and what the log has in its place is another one")
        return evidence.record(found.value)

    async def settle_one(self, evidence: Evidence, work: Work) -> list[Settled]:
        """Redrive or discard one letter; also one that was discarded is redriven."""
        return await self._settle([evidence], work, (State.OPEN, State.DISCARDED))

    async def settle_all(self, selection: Selection, work: Work) -> AsyncIterator[list[Settled]]:
        """Redrive or discard the open letters of a selection that are there now, slice by slice."""
        now = datetime.now(timezone.utc)
        until = now if selection.until is None else min(selection.until, now)
        chosen = replace(selection, state=State.OPEN, until=until)
        after: Place | None = None
        while True:
            found = await self._slice(chosen, after, with_bytes=not work.discarding)
            if not found:
                return
            yield await self._settle(found, work, (State.OPEN,))
            after = found[-1].letter.place

    async def _slice(self, chosen: Selection, after: Place | None, *, with_bytes: bool) -> list[Evidence]:
        if with_bytes:
            return await shelf.evidence(
                self.connection, chosen, after=after, rows=SLICE_LETTERS, size_bytes=SLICE_BYTES
            )
        letters = await shelf.page(self.connection, chosen, after=after, limit=SLICE_LETTERS)
        return [Evidence(letter=x, key=None, value=None, value_sha256=None) for x in letters]

    async def _settle(self, letters: Sequence[Evidence], work: Work, wanted: Collection[State]) -> list[Settled]:
        if work.discarding:
            return await discard(self.connection, [e.letter.place for e in letters], by=work.by, dry=work.dry)
        # The log is read before the transaction begins: a slow broker must not hold the hours of the ledger.
        usage = USAGE.in_namespace(self.namespace).name
        records: list[RawRecord] = []
        refused: list[Settled] = []
        for evidence in letters:
            place = evidence.letter.place
            if place.topic != usage:
                refused.append(Settled(place=place, outcome=Outcome.REFUSED, why=NO_USAGE))
                continue
            try:
                records.append(await self.record(evidence))
            except (NotKept, BusUnavailable) as error:
                refused.append(Settled(place=place, outcome=Outcome.REFUSED, why=str(error)))
        done = await redrive(
            self.connection,
            records,
            group=ledger_group(self.namespace),
            by=work.by,
            wanted=wanted,
            accept=work.accept,
            ahead=timedelta(seconds=self._settings.future_s),
            dry=work.dry,
        )
        return [*done, *refused]


@asynccontextmanager
async def open_desk(settings: ReplaySettings) -> AsyncIterator[Desk]:
    """The desk, its table holding every letter that was on the topic by now, or saying why it may not.

    Raises what infra.postgres raises.
    """
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(open_connection(settings.postgres))
        reader: LogReader | None = None
        away: str | None = None
        try:
            reader = await stack.enter_async_context(open_log(settings.kafka))
            await collect(connection, reader, namespace=settings.kafka.namespace)
        except BusUnavailable as error:
            away = str(error)
            await name_kinds(connection)
        yield Desk(settings, connection, reader, away)
