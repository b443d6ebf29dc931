"""The ledger's tables in memory, with the same rules, and faults on demand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from uuid import UUID

import asyncpg

from schemas.records import DeadLetter
from streams.projections import Counted, LocatedUsage, hourly_rows
from streams.stretches import Skipped, Stretch

BIGINT_MAX = 2**63 - 1


class FakeTransaction:
    def __init__(self, ledger: FakeLedger) -> None:
        self._ledger = ledger

    async def count(self, usages: Sequence[LocatedUsage]) -> Counted:
        self._ledger.counts += 1
        known = self._ledger.processed
        assert len({u.record.request_id for u in usages}) == len(usages)
        fresh = [u for u in usages if u.record.request_id not in known]
        other = [u for u in usages if known.get(u.record.request_id) not in (None, u.digest)]
        sums = dict(self._ledger.sums)
        for row in hourly_rows(fresh):
            key = row.values()[:6]
            sums[key] = sums.get(key, 0) + row.quantity
            if sums[key] > BIGINT_MAX:
                raise asyncpg.NumericValueOutOfRangeError("bigint out of range")
        self._ledger.sums = sums
        known.update({u.record.request_id: u.digest for u in fresh})
        return Counted(new=len(fresh), contradicting=other)

    async def set_aside(self, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
        new = [x for x in letters if (x.partition, x.offset) not in self._ledger.dead]
        self._ledger.dead |= {(x.partition, x.offset): x.reason for x in new}
        return new

    async def advance(self, stretches: Sequence[Stretch]) -> None:
        for s in stretches:
            known = self._ledger.positions.get(s.partition, 0)
            if s.begin > known:
                raise Skipped(f"partition {s.partition}: begins at {s.begin}, past {known}")
            self._ledger.positions[s.partition] = max(known, s.end)

    async def tell(self, letters: Sequence[DeadLetter]) -> None:
        self._ledger.told += letters


class FakeLedger:
    """`before` and `after_commit` are called around each transaction and may raise what a driver would."""

    def __init__(self) -> None:
        self.processed: dict[UUID, bytes | None] = {}  # None: counted before digests were kept
        self.sums: dict[tuple[object, ...], int] = {}
        self.dead: dict[tuple[int, int], str] = {}
        self.told: list[DeadLetter] = []
        self.positions: dict[int, int] = {}
        self.counts = 0
        self.transactions = 0
        self.before: Callable[[], None] = lambda: None
        self.after_commit: Callable[[], None] = lambda: None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[FakeTransaction]:
        self.transactions += 1
        self.before()
        kept = deepcopy((self.processed, self.sums, self.dead, self.told, self.positions))
        try:
            yield FakeTransaction(self)
        except BaseException:
            self.processed, self.sums, self.dead, self.told, self.positions = kept
            raise
        self.after_commit()
