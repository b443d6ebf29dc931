"""The boundary between the log and the ledger: decode, hold while Postgres is away, bisect to the one bad record.

Returns only after COMMIT; the caller acknowledges then, and not before. Raising means that nothing was acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Protocol

from infra.kafka import BusUnavailable
from infra.postgres import is_data_error, is_outage
from schemas.codec import DecodeError, UnknownSchema, decode_at
from schemas.evidence import dead_letter
from schemas.records import DeadLetter, UsageRecorded
from streams.dead_letters import RawRecord, refuse_if_systemic
from streams.projections import (
    Counted,
    LocatedUsage,
    Turns,
    UnfitRecord,
    check_fit,
    content_digest,
    in_turns,
)
from streams.stretches import Stretch, stretches

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
#: One attempt at a transaction; a server that is stopped, not gone, may otherwise hold even the driver's clean-up.
ATTEMPT_S = 30.0


class LedgerUnavailable(RuntimeError):
    """A server was away longer than a batch may be held. The batch is unacknowledged and will be read again."""


class Transaction(Protocol):
    """What a batch needs of an open ledger transaction (streams.ledger.LedgerTransaction fits)."""

    async def count(self, usages: Sequence[LocatedUsage]) -> Counted:
        """Bill what was never billed, inside a savepoint, and tell what contradicts what was."""

    async def set_aside(self, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
        """Keep dead letters; returns those that were not kept before."""

    async def advance(self, stretches: Sequence[Stretch]) -> None:
        """Move the position forward. Raises Skipped when a stretch does not follow it."""

    async def tell(self, letters: Sequence[DeadLetter]) -> None:
        """Have letters put on the dead-letter topic once this is committed."""


class TransactionSource(Protocol):
    """What opens ledger transactions (streams.ledger.Ledger fits)."""

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """A transaction that commits when its block ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedBatch:
    """A batch after decoding: what may be counted, what is set aside, and how far it reaches.

    `unlearnt` says that some are set aside because their schema's id is unknown to this process. `total` counts all.
    """

    total: int
    usages: Turns
    dead: list[DeadLetter]
    stretches: list[Stretch]
    unlearnt: bool


def sort_out(records: Sequence[RawRecord], *, now: datetime) -> SortedBatch:
    """Decode each record; undecodable and unfit ones become dead letters of this moment. Raises Skipped."""
    usages: list[LocatedUsage] = []
    dead: list[DeadLetter] = []
    unlearnt = False
    for source in records:
        try:
            record = decode_at(source, UsageRecorded)
            check_fit(record)
        except DecodeError as error:
            unlearnt = unlearnt or isinstance(error, UnknownSchema)
            dead.append(dead_letter(source, error.reason, occurred_at=now))
        except UnfitRecord as error:
            dead.append(dead_letter(source, str(error), occurred_at=now))
        else:
            usages.append(LocatedUsage(record=record, source=source, digest=content_digest(record)))
    return SortedBatch(
        total=len(records), usages=in_turns(usages), dead=dead, stretches=stretches(records), unlearnt=unlearnt
    )


async def _learn_nothing() -> None:
    """What a process does that knows all schemas it will ever know."""


class Delivery:
    """Writes batches to the ledger, each until it is in or `give_up_s` seconds have passed.

    `learn_schemas` returns once this process knows every schema that was published before the call; it raises
    BusUnavailable when it cannot. With `set_aside_all`, a large batch without one good record is set aside like any
    other bad record instead of being refused. `holding` says why a batch is being held right now, and is None while
    nothing is.
    """

    def __init__(
        self,
        ledger: TransactionSource,
        *,
        give_up_s: float,
        learn_schemas: Callable[[], Awaitable[None]] = _learn_nothing,
        set_aside_all: bool = False,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._ledger = ledger
        self._give_up_s = give_up_s
        self._learn_schemas = learn_schemas
        self._set_aside_all = set_aside_all
        self._sleep = sleep
        self._clock = clock
        self._jitter = jitter
        self._waits: dict[str, str] = {}
        self.records = 0
        self.counted = 0
        self.dead = 0

    @property
    def holding(self) -> str | None:
        """Why a batch is being held, by server."""
        return "; ".join(self._waits.values()) or None

    async def deliver(self, records: Sequence[RawRecord]) -> list[Stretch]:
        """Return when every record of the batch is counted, known already, or a dead letter: what may be committed.

        Raises LedgerUnavailable after `give_up_s` without Postgres or the schemas' topic, AllRecordsBad, Skipped when
        the batch does not follow what the ledger holds, and whatever else Postgres refuses for a reason that is neither
        its absence nor one record's data: then the caller must not commit.
        """
        return await self.write(await self.prepare(records))

    async def prepare(self, records: Sequence[RawRecord]) -> SortedBatch:
        """The first half of `deliver`, which writes nothing: decode, and learn what newer writers wrote."""
        began = self._clock()
        batch = sort_out(records, now=datetime.now(timezone.utc))
        if batch.unlearnt:
            # Their writers may just be newer than this process. Schemas are on their topic before records that use
            # them, so that asking once, after the records were read, tells; and once per batch, however many there are.
            await self._held(self._learn_schemas, server="Kafka", began=began)
            batch = sort_out(records, now=datetime.now(timezone.utc))
        self._refuse_if_systemic(batch.dead, total=batch.total)
        return batch

    async def write(self, batch: SortedBatch) -> list[Stretch]:
        """The second half of `deliver`. Batches of a reader are written in the order in which they were read."""
        await self._held(lambda: self._write(batch), server="Postgres", began=self._clock())
        return batch.stretches

    async def _held(self, attempt: Callable[[], Awaitable[None]], *, server: str, began: float) -> None:
        """Attempt something of this server's until it is done, holding the batch while the server is away."""
        pause = FIRST_PAUSE_S
        try:
            while True:
                try:
                    await asyncio.wait_for(attempt(), ATTEMPT_S)
                    break
                except Exception as error:
                    if not (isinstance(error, BusUnavailable) or is_outage(error)):
                        raise
                    waited = self._clock() - began
                    if waited >= self._give_up_s:
                        raise LedgerUnavailable(
                            f"{server} was away for {waited:.0f} s; last: {type(error).__name__}: {error}"
                        ) from error
                    if server not in self._waits:
                        log.warning("holding a batch: %s: %s", type(error).__name__, error)
                    self._waits[server] = f"{type(error).__name__}: {error}"
                # Half fixed, half random: workers that lost the same server do not return to it in step.
                await self._sleep(min(pause * (0.5 + self._jitter() / 2), max(self._give_up_s - waited, 0)))
                pause = min(pause * 2, LONGEST_PAUSE_S)
            if server in self._waits:
                log.info("%s is back after %.1f s", server, self._clock() - began)
        finally:
            self._waits.pop(server, None)

    async def _write(self, batch: SortedBatch) -> None:
        # All of it is one Postgres transaction, so dying anywhere before COMMIT costs nothing: the batch is read again.
        # 1  count what was never counted    2  set the bad records aside    3  move the position
        # 4  put the letters that are new into the outbox: last, since other writers of facts wait from here on
        # 5  COMMIT    dying after it, or not learning its outcome: the batch is read again, counts nothing twice and
        #    tells nothing twice, because none of its letters is new
        # 6  (the caller) have the ends of the stretches committed to Kafka
        now = datetime.now(timezone.utc)
        counted = 0
        dead = list(batch.dead)
        async with self._ledger.transaction() as transaction:
            for usages in batch.usages.turns:
                new, refused = await self._settle(transaction, usages)
                counted += new
                dead += [x for u, reason in refused for x in _letters(u, batch.usages, reason, now=now)]
            self._refuse_if_systemic(dead, total=batch.total)
            new_letters = await transaction.set_aside(dead)
            await transaction.advance(batch.stretches)
            await transaction.tell(new_letters)
        self.records += batch.total
        self.counted += counted
        self.dead += len(dead)
        for x in dead:
            log.error("set aside: %s partition %d offset %d: %s", x.topic, x.partition, x.offset, x.reason)

    def _refuse_if_systemic(self, dead: list[DeadLetter], *, total: int) -> None:
        if not self._set_aside_all:
            refuse_if_systemic(dead, total=total)

    async def _settle(
        self, transaction: Transaction, usages: list[LocatedUsage]
    ) -> tuple[int, list[tuple[LocatedUsage, str]]]:
        """Count these records; when Postgres refuses the data, halve until the records to blame stand alone.

        Returns how many were new, and those that were not taken, each with the reason.
        """
        try:
            counted = await transaction.count(usages)
        except Exception as error:
            if not is_data_error(error):
                raise
            if len(usages) == 1:
                return 0, [(usages[0], f"{type(error).__name__}: {error}")]
        else:
            return counted.new, [(u, _contradiction(u)) for u in counted.contradicting]
        middle = len(usages) // 2
        left, left_refused = await self._settle(transaction, usages[:middle])
        right, right_refused = await self._settle(transaction, usages[middle:])
        return left + right, left_refused + right_refused


def _contradiction(usage: LocatedUsage) -> str:
    return f"request {usage.record.request_id}: differs from the usage record that was counted for it"


def _letters(usage: LocatedUsage, batch: Turns, reason: str, *, now: datetime) -> list[DeadLetter]:
    """Dead letters for a record and its equal copies in the batch."""
    copies = batch.copies.get((usage.record.request_id, usage.digest), [])
    return [dead_letter(source, reason, occurred_at=now) for source in (usage.source, *copies)]
