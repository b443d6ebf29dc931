"""The boundary between the log and the ledger: decode, hold while Postgres is away, set aside what cannot be counted.

Returns only after COMMIT; the caller acknowledges then, and not before. Raising means that nothing was acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta, timezone

from infra.kafka import BusUnavailable
from infra.pause import Pause
from infra.postgres import is_outage
from infra.schema_feed import learn_nothing
from schemas.evidence import dead_letter
from schemas.records import DeadLetter
from streams.ledger.dead_letters import contradiction, refuse_if_systemic
from streams.ledger.dedup import AHEAD, Overtaken, sift
from streams.ledger.ports import Transaction, TransactionSource
from streams.ledger.projections import LocatedUsage, Turns, in_turns
from streams.ledger.raw import RawRecord
from streams.ledger.sorting import SortedBatch, sort_in_steps
from streams.ledger.stretches import Stretch

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
#: One attempt at a transaction; a server that is stopped, not gone, may otherwise hold even the driver's clean-up.
ATTEMPT_S = 30.0


class LedgerUnavailable(RuntimeError):
    """A server was away longer than a batch may be held. The batch is unacknowledged and will be read again."""


class Delivery:
    """Writes batches to the ledger, each until it is in or `give_up_s` seconds have passed.

    `learn_schemas` returns once this process knows every schema that was published before the call; it raises
    BusUnavailable when it cannot. With `set_aside_all`, a large batch without one good record is set aside like any
    other bad record instead of being refused. `ahead` is how far past the ledger's clock a record's time may lie.
    `holding` says why a batch is being held right now, and is None while nothing is.
    """

    def __init__(
        self,
        ledger: TransactionSource,
        *,
        give_up_s: float,
        learn_schemas: Callable[[], Awaitable[None]] = learn_nothing,
        set_aside_all: bool = False,
        ahead: timedelta = AHEAD,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._ledger = ledger
        self._give_up_s = give_up_s
        self._learn_schemas = learn_schemas
        self._set_aside_all = set_aside_all
        self._ahead = ahead
        self._sleep = sleep
        self._clock = clock
        self._jitter = jitter
        self._waits: dict[str, str] = {}
        self.records = 0
        self.counted = 0
        self.dead = 0
        self.batches = 0
        self.hour_rows = 0
        self.batch_s: float | None = None

    @property
    def holding(self) -> str | None:
        """Why a batch is being held, by server."""
        return "; ".join(self._waits.values()) or None

    def figures(self) -> dict[str, object]:
        """What became of the records since this process began; `batch_s` is how long the last batch took."""
        return {
            "records": self.records,
            "counted": self.counted,
            "duplicates": self.records - self.counted - self.dead,
            "dead_letters": self.dead,
            "batches": self.batches,
            "batch_s": None if self.batch_s is None else round(self.batch_s, 4),
            "hour_rows": self.hour_rows,
        }

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
        batch = await sort_in_steps(records, began_s=began)
        if batch.unlearnt:
            # Their writers may just be newer than this process. Schemas are on their topic before records that use
            # them, so that asking once, after the records were read, tells; and once per batch, however many there are.
            await self._held(self._learn_schemas, server="Kafka", began=began)
            batch = await sort_in_steps(records, began_s=began)
        self._refuse_if_systemic(batch.dead, total=batch.total)
        return batch

    async def write(self, batch: SortedBatch) -> list[Stretch]:
        """The second half of `deliver`. Batches of a reader are written in the order in which they were read."""
        await self._held(lambda: self._write(batch), server="Postgres", began=batch.began_s)
        self.batch_s = self._clock() - batch.began_s
        return batch.stretches

    async def _held(self, attempt: Callable[[], Awaitable[None]], *, server: str, began: float) -> None:
        """Attempt something of this server's until it is done, holding the batch while the server is away."""
        pause = Pause(FIRST_PAUSE_S, LONGEST_PAUSE_S)
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
                await self._sleep(min(pause.next_s() * (0.5 + self._jitter() / 2), max(self._give_up_s - waited, 0)))
            if server in self._waits:
                log.info("%s is back after %.1f s", server, self._clock() - began)
        finally:
            self._waits.pop(server, None)

    async def _write(self, batch: SortedBatch) -> None:
        while True:
            try:
                await self._transact(batch)
                return
            except Overtaken as error:  # each time it is, somebody else has come further
                log.warning("a batch is judged anew: %s", error)

    async def _transact(self, batch: SortedBatch) -> None:
        # All of it is one Postgres transaction, so dying anywhere before COMMIT costs nothing: the batch is read again.
        # 1  look at the horizon and the positions, and take out what is of no time to be counted
        # 2  count what was never counted    3  set the bad records aside    4  move the position
        # 5  put the letters that are new into the outbox: last, since other writers of facts wait from here on
        # 6  COMMIT    dying after it, or not learning its outcome: the batch is read again, counts nothing twice and
        #    tells nothing twice, because none of its letters is new
        # 7  (the caller) have the ends of the stretches committed to Kafka
        now = datetime.now(timezone.utc)
        counted = hour_rows = 0
        dead = list(batch.dead)
        async with self._ledger.transaction() as transaction:
            fit, objections = await self._fit(transaction, batch)
            dead += [dead_letter(u.source, reason, occurred_at=now) for u, reason in objections]
            for usages in fit.turns:
                found = await transaction.count(usages)
                counted += len(found.fresh)
                hour_rows += found.rows
                refused = [*found.refused, *((u, contradiction(u.record.request_id)) for u in found.contradicting)]
                dead += [x for u, reason in refused for x in _letters(u, fit, reason, now=now)]
            self._refuse_if_systemic(dead, total=batch.total)
            new_letters = await transaction.set_aside(dead)
            await transaction.advance(batch.stretches)
            await transaction.tell(new_letters)
        self.batches += 1
        self.hour_rows += hour_rows
        self.records += batch.total
        self.counted += counted
        self.dead += len(dead)
        for x in dead:
            log.error("set aside: %s partition %d offset %d: %s", x.topic, x.partition, x.offset, x.reason)

    async def _fit(
        self, transaction: Transaction, batch: SortedBatch
    ) -> tuple[Turns, Sequence[tuple[LocatedUsage, str]]]:
        """What of the batch the ledger can judge by its ids, and what is set aside for its time."""
        opening = await transaction.opening(batch.stretches)
        if opening.is_plain(batch.extent, batch.stretches, self._ahead):
            return batch.usages, ()
        again = [u.source for u in batch.located if opening.was_read(u.source)]
        letters = await transaction.letters_at([(s.topic, s.partition, s.offset) for s in again])
        sifted = sift(batch.located, opening, letters=letters, ahead=self._ahead)
        return in_turns(sifted.fit), sifted.objections

    def _refuse_if_systemic(self, dead: list[DeadLetter], *, total: int) -> None:
        if not self._set_aside_all:
            refuse_if_systemic(dead, total=total)


def _letters(usage: LocatedUsage, batch: Turns, reason: str, *, now: datetime) -> list[DeadLetter]:
    """Dead letters for a record and its equal copies in the batch."""
    copies = batch.copies.get((usage.record.request_id, usage.digest), [])
    return [dead_letter(source, reason, occurred_at=now) for source in (usage.source, *copies)]
