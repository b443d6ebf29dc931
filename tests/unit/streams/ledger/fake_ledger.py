"""The ledger's tables in memory, with the same rules, and faults on demand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from datetime import datetime, timedelta
from uuid import UUID

from schemas.records import DeadLetter
from streams.ledger.dedup import Bounds, Opening, Overtaken, Place
from streams.ledger.projections import Counted, LocatedUsage, hourly_rows
from streams.ledger.stretches import Skipped, Stretch
from tests.unit.streams.usage_samples import NOON

BIGINT_MAX = 2**63 - 1


class FakeTransaction:
    def __init__(self, ledger: FakeLedger) -> None:
        self._ledger = ledger
        self._stood: dict[tuple[str, int], int] = {}

    async def opening(self, stretches: Sequence[Stretch]) -> Opening:
        known = self._ledger.positions
        self._stood = {(s.topic, s.partition): known[s.partition] for s in stretches if s.partition in known}
        found = Opening(bounds=self._ledger.bounds, next_offsets=self._stood)
        self._ledger.after_opening()
        return found

    async def letters_at(self, places: Sequence[Place]) -> set[Place]:
        return {place for place in places if place[1:] in self._ledger.dead}

    async def count(self, usages: Sequence[LocatedUsage]) -> Counted:
        self._ledger.counts += 1
        known = self._ledger.processed
        assert len({u.record.request_id for u in usages}) == len(usages)
        fresh = [u for u in usages if u.record.request_id not in known]
        other = [u for u in usages if known.get(u.record.request_id) not in (None, u.digest)]
        refused = [u for u in fresh if not self._add(u)]
        good = [u for u in fresh if u not in refused]
        known.update({u.record.request_id: u.digest for u in good})
        return Counted(fresh=good, contradicting=other, refused=[(u, "bigint out of range") for u in refused])

    def _add(self, usage: LocatedUsage) -> bool:
        sums = dict(self._ledger.sums)
        for row in hourly_rows([usage]):
            key = row.values()[:6]
            sums[key] = sums.get(key, 0) + row.quantity
            if sums[key] > BIGINT_MAX:
                return False
        self._ledger.sums = sums
        return True

    async def set_aside(self, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
        new = [x for x in letters if (x.partition, x.offset) not in self._ledger.dead]
        self._ledger.dead |= {(x.partition, x.offset): x.reason for x in new}
        return new

    async def advance(self, stretches: Sequence[Stretch]) -> None:
        for s in stretches:
            known = self._ledger.positions.get(s.partition, 0)
            if known != self._stood.get((s.topic, s.partition), 0):
                raise Overtaken(f"partition {s.partition}")
            if s.begin > known:
                raise Skipped(f"partition {s.partition}: begins at {s.begin}, past {known}")
            self._ledger.positions[s.partition] = max(known, s.end)

    async def tell(self, letters: Sequence[DeadLetter]) -> None:
        self._ledger.told += letters


class FakeLedger:
    """The hooks are called around each transaction and after its opening, and may raise what a driver would."""

    def __init__(self) -> None:
        self.processed: dict[UUID, bytes | None] = {}  # None: counted before digests were kept
        self.sums: dict[tuple[object, ...], int] = {}
        self.dead: dict[tuple[int, int], str] = {}
        self.told: list[DeadLetter] = []
        self.positions: dict[int, int] = {}
        self.bounds = Bounds(counts_from=None, first_id=None, now=NOON + timedelta(days=1))
        self.counts = 0
        self.transactions = 0
        self.after_opening: Callable[[], None] = lambda: None
        self.before: Callable[[], None] = lambda: None
        self.after_commit: Callable[[], None] = lambda: None
        self.after_rollback: Callable[[], None] = lambda: None

    def move_horizon(self, counts_from: datetime) -> None:
        """What the pruner does first."""
        if self.bounds.counts_from is None or counts_from > self.bounds.counts_from:
            first_id = UUID(int=int(counts_from.timestamp() * 1000) << 80)
            self.bounds = Bounds(counts_from=counts_from, first_id=first_id, now=self.bounds.now)

    def prune(self) -> None:
        """And then: all that may be let go of is."""
        for request_id in [i for i in self.processed if self.bounds.may_be_gone(i)]:
            del self.processed[request_id]

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[FakeTransaction]:
        self.transactions += 1
        self.before()
        kept = deepcopy((self.processed, self.sums, self.dead, self.told, self.positions))
        try:
            yield FakeTransaction(self)
        except BaseException:
            self.processed, self.sums, self.dead, self.told, self.positions = kept
            self.after_rollback()
            raise
        self.after_commit()
