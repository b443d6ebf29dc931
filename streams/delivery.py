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
from typing import Protocol

from infra.postgres import is_data_error, is_outage
from schemas.codec import DecodeError, decode_at
from schemas.records import UsageRecorded
from streams.dead_letters import DeadLetterRow, RawRecord, refuse_if_systemic, set_aside
from streams.projections import (
    Counted,
    LocatedUsage,
    NextOffset,
    Turns,
    UnfitRecord,
    check_fit,
    content_digest,
    in_turns,
    next_offsets,
)

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
#: One attempt at a transaction; a server that is stopped, not gone, may otherwise hold even the driver's clean-up.
ATTEMPT_S = 30.0


class LedgerUnavailable(RuntimeError):
    """Postgres was away longer than a batch may be held. The batch is unacknowledged and will be read again."""


class Transaction(Protocol):
    """What a batch needs of an open ledger transaction (streams.ledger.LedgerTransaction fits)."""

    async def count(self, usages: Sequence[LocatedUsage]) -> Counted:
        """Bill what was never billed, inside a savepoint, and tell what contradicts what was."""

    async def set_aside(self, letters: Sequence[DeadLetterRow]) -> None:
        """Keep dead letters."""

    async def advance(self, offsets: Sequence[NextOffset]) -> None:
        """Move the position forward."""


class TransactionSource(Protocol):
    """What opens ledger transactions (streams.ledger.Ledger fits)."""

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """A transaction that commits when its block ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedBatch:
    """A batch after decoding: what may be counted, what is set aside, and how far it reaches."""

    usages: Turns
    dead: list[DeadLetterRow]
    offsets: list[NextOffset]


def sort_out(records: Sequence[RawRecord]) -> SortedBatch:
    """Decode each record; undecodable and unfit ones become dead letters."""
    usages: list[LocatedUsage] = []
    dead: list[DeadLetterRow] = []
    for source in records:
        try:
            record = decode_at(source, UsageRecorded)
            check_fit(record)
        except (DecodeError, UnfitRecord) as error:
            dead.append(set_aside(source, f"{type(error).__name__}: {error}"))
        else:
            usages.append(LocatedUsage(record=record, source=source, digest=content_digest(record)))
    return SortedBatch(usages=in_turns(usages), dead=dead, offsets=next_offsets(records))


class Delivery:
    """Writes batches to the ledger, each until it is in or `give_up_s` seconds have passed.

    `holding` says why a batch is being held right now, and is None while nothing is.
    """

    def __init__(
        self,
        ledger: TransactionSource,
        *,
        give_up_s: float,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._ledger = ledger
        self._give_up_s = give_up_s
        self._sleep = sleep
        self._clock = clock
        self._jitter = jitter
        self.holding: str | None = None
        self.records = 0
        self.counted = 0
        self.dead = 0

    async def deliver(self, records: Sequence[RawRecord]) -> None:
        """Return when every record of the batch is counted, known already, or a dead letter.

        Raises LedgerUnavailable after `give_up_s` without Postgres, AllRecordsBad, and whatever else Postgres
        refuses for a reason that is neither its absence nor one record's data: then the caller must not acknowledge.
        """
        batch = sort_out(records)
        refuse_if_systemic(batch.dead, total=len(records))
        began = self._clock()
        pause = FIRST_PAUSE_S
        try:
            while True:
                try:
                    await asyncio.wait_for(self._write(batch, total=len(records)), ATTEMPT_S)
                    break
                except Exception as error:
                    if not is_outage(error):
                        raise
                    waited = self._clock() - began
                    if waited >= self._give_up_s:
                        raise LedgerUnavailable(
                            f"Postgres was away for {waited:.0f} s; last: {type(error).__name__}: {error}"
                        ) from error
                    if self.holding is None:
                        log.warning("holding a batch of %d records: %s: %s", len(records), type(error).__name__, error)
                    self.holding = f"{type(error).__name__}: {error}"
                # Half fixed, half random: workers that lost the same server do not return to it in step.
                await self._sleep(min(pause * (0.5 + self._jitter() / 2), max(self._give_up_s - waited, 0)))
                pause = min(pause * 2, LONGEST_PAUSE_S)
            if self.holding is not None:
                log.info("Postgres is back after %.1f s; the held batch is in", self._clock() - began)
        finally:
            self.holding = None

    async def _write(self, batch: SortedBatch, *, total: int) -> None:
        # All of it is one Postgres transaction, so dying anywhere before COMMIT costs nothing: the batch is read again.
        # 1  count what was never counted    2  set the bad records aside    3  move the position
        # 4  COMMIT    dying after it, or not learning its outcome: the batch is read again and counts nothing twice
        # 5  (the caller) acknowledge to Kafka
        counted = 0
        dead = list(batch.dead)
        async with self._ledger.transaction() as transaction:
            for usages in batch.usages.turns:
                new, refused = await self._settle(transaction, usages)
                counted += new
                dead += [letter for u, reason in refused for letter in _set_aside_all(u, batch.usages, reason)]
            refuse_if_systemic(dead, total=total)
            await transaction.set_aside(dead)
            await transaction.advance(batch.offsets)
        self.records += total
        self.counted += counted
        self.dead += len(dead)
        for letter in dead:
            s = letter.source
            log.error("set aside: %s partition %d offset %d: %s", s.topic, s.partition, s.offset, letter.reason)

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


def _set_aside_all(usage: LocatedUsage, batch: Turns, reason: str) -> list[DeadLetterRow]:
    """Dead letters for a record and its equal copies in the batch."""
    copies = batch.copies.get((usage.record.request_id, usage.digest), [])
    return [set_aside(source, reason) for source in (usage.source, *copies)]
