"""What delivering a batch needs of the ledger, whatever keeps it: Postgres (`transaction`), or a test's memory.

No code: the calls of one transaction, in the order in which they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from schemas.records import DeadLetter
from streams.ledger.dedup import Opening, Place
from streams.ledger.projections import Counted, LocatedUsage
from streams.ledger.stretches import Stretch


class Transaction(Protocol):
    """What a batch needs of an open ledger transaction (streams.ledger.transaction.LedgerTransaction fits)."""

    async def opening(self, stretches: Sequence[Stretch]) -> Opening:
        """What the ledger knows as the transaction begins; comes first."""

    async def letters_at(self, places: Sequence[Place]) -> set[Place]:
        """Those of these places that have a dead letter."""

    async def count(self, usages: Sequence[LocatedUsage]) -> Counted:
        """Bill what was never billed; tell what contradicts what was, and what was refused and left nothing behind."""

    async def set_aside(self, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
        """Keep dead letters; returns those that were not kept before."""

    async def advance(self, stretches: Sequence[Stretch]) -> None:
        """Move the position forward. Raises Skipped when a stretch does not follow it, Overtaken when it has moved."""

    async def tell(self, letters: Sequence[DeadLetter]) -> None:
        """Have letters put on the dead-letter topic once this is committed."""


class TransactionSource(Protocol):
    """What opens ledger transactions (streams.ledger.tables.Ledger fits)."""

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """A transaction that commits when its block ends."""
