"""The book of claims in memory, by a clock that a test moves, and calls to enter in it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from api.once.claims import (
    REFUSED_S,
    BookAway,
    Claim,
    Decisions,
    Entry,
    Fit,
    Note,
    Sameness,
    Standing,
    fit,
)
from api.once.once import Once
from schemas.ids import new_request_id
from tests.fakes import Clock

#: How long a key is known here.
HORIZON_S = 3600.0


def call(*, key: str | None = None, retry: int | None = None, body: bytes = b"a", **changes: Any) -> Sameness:
    """A call by a customer's key."""
    fields = {"customer_id": "cust_a", "key_id": "key_a", "digest": body.ljust(32, b"."), **changes}
    return Sameness(key=key, retry=retry, **fields)


def decisions(*, version: str = "v" * 64, deadline_s: float = 10.0) -> Decisions:
    """What would be decided about a call now."""
    now = datetime.now(timezone.utc)
    return Decisions(
        request_id=new_request_id(),
        admitted_at=now,
        deadline_at=now + timedelta(seconds=deadline_s),
        version=version,
        price_id="standard-v1",
    )


def entry(**changes: Any) -> Entry:
    """A call as it is entered."""
    return Entry.of(call(**changes), decisions())


@dataclass
class _Row:
    entry: Entry
    entered_s: float
    seen_s: float
    retries: int
    patience_s: float
    takeovers: int = 0
    accepted: bool = False
    answered_s: float | None = None

    @property
    def withdrawn(self) -> bool:
        return self.answered_s is not None and not self.accepted


class MemoryBook:
    """Implements Book. `away` makes every call fail, `hold` keeps them waiting, and `asked` counts them; `entered` has
    sizes of batches."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.rows: list[_Row] = []
        self.away = False
        self.hold = asyncio.Event()
        self.hold.set()
        self.entered: list[int] = []
        self.asked = 0

    async def pass_s(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.now_s += seconds

    async def enter(self, entries: Sequence[Entry]) -> Sequence[Standing | None]:
        await self._ready()
        self.entered.append(len(entries))
        return [self._entered(e) for e in entries]

    def _entered(self, new: Entry) -> Standing:
        for row in self.rows:
            if row.entry.decisions.request_id == new.decisions.request_id or (
                new.is_keyed and row.entry.is_keyed and row.entry.name == new.name
            ):
                return self._standing(row)
        now_s = self.clock.now_s
        row = _Row(new, now_s, now_s, new.retries, new.patience_s)
        self.rows.append(row)
        return self._standing(row)

    async def rejoin(self, entry: Entry) -> Standing | None:
        await self._ready()
        fitting = [(how, r) for r in self.rows if (how := self._fit(r, entry)) is not None]
        if not fitting:
            return None
        order = [(-how, r.retries, r.seen_s, r.entry.decisions.request_id) for how, r in fitting]
        row = fitting[order.index(max(order))][1]
        if row.withdrawn:
            self.rows.remove(row)
            return None
        row.retries, row.patience_s, row.answered_s = entry.retries, entry.patience_s, None
        row.seen_s = self.clock.now_s if row.accepted else row.seen_s
        return self._standing(row)

    def _fit(self, row: _Row, entry: Entry) -> Fit | None:
        if (
            row.entry.is_keyed
            or (row.entry.name, row.entry.customer_id) != (entry.name, entry.customer_id)
            or row.retries >= entry.retries
        ):
            return None
        return fit(
            is_accepted=row.accepted,
            quiet_s=self.clock.now_s - row.seen_s,
            answered_s=None if row.answered_s is None else self.clock.now_s - row.answered_s,
            patience_s=row.patience_s,
        )

    async def find(self, standing: Standing) -> Standing | None:
        await self._ready()
        rows = [
            r for r in self.rows if r.entry.decisions.request_id == standing.decisions.request_id and not r.withdrawn
        ]
        return self._standing(rows[0]) if rows else None

    async def take_over(self, standing: Standing) -> bool:
        await self._ready()
        for row in self.rows:
            if row.entry.decisions.request_id == standing.decisions.request_id:
                if row.accepted or row.withdrawn or row.takeovers != standing.takeovers:
                    return False
                row.takeovers, row.seen_s = row.takeovers + 1, self.clock.now_s
                return True
        return False

    async def note(self, notes: Sequence[Note]) -> None:
        await self._ready()
        for note in notes:
            for row in [r for r in self.rows if r.entry.decisions.request_id == note.request_id]:
                if note.is_leaving:
                    if note.void:
                        self.rows.remove(row)
                    elif not (row.takeovers or row.accepted):
                        if row.entry.is_keyed:
                            self.rows.remove(row)
                        else:
                            row.answered_s = self.clock.now_s if row.retries <= note.retries else -math.inf
                    continue
                row.accepted = True
                if note.answered and row.retries == note.retries:
                    row.answered_s = self.clock.now_s

    async def prune(self, *, is_keyed: bool, older_than_s: float, at_most: int) -> int | None:
        await self._ready()
        old = [
            r
            for r in self.rows
            if r.entry.is_keyed is is_keyed
            and (
                self.clock.now_s - r.seen_s > older_than_s + r.patience_s
                or (r.withdrawn and r.answered_s is not None and self.clock.now_s - r.answered_s > REFUSED_S)
            )
        ][:at_most]
        self.rows = [r for r in self.rows if r not in old]
        return len(old)

    async def _ready(self) -> None:
        self.asked += 1
        await self.hold.wait()
        await asyncio.sleep(0)
        if self.away:
            raise BookAway("switched off")

    def _standing(self, row: _Row) -> Standing:
        return Standing(
            is_keyed=row.entry.is_keyed,
            name=row.entry.name,
            customer_id=row.entry.customer_id,
            digest=row.entry.digest,
            retries=row.retries,
            takeovers=row.takeovers,
            is_accepted=row.accepted,
            age_s=self.clock.now_s - row.entered_s,
            quiet_s=self.clock.now_s - row.seen_s,
            decisions=row.entry.decisions,
        )


def accepted(of: Entry, **more: Any) -> Note:
    """The note that this call's request is on the log."""
    return Note(is_keyed=of.is_keyed, request_id=of.decisions.request_id, retries=of.retries, accepted=True, **more)


def withdrawn(of: Entry) -> Note:
    """The note that this call was refused."""
    return replace(accepted(of), accepted=False, withdrawn=True)


def void(of: Entry) -> Note:
    """The note that this call's request came to nothing."""
    return replace(accepted(of), accepted=False, void=True)


def once(book: MemoryBook) -> Once:
    """One process's."""
    return Once(book, horizon_s=HORIZON_S)


async def claim(by: Once, said: Sameness, **decided: Any) -> Claim:
    """A call's place in the book, with decisions of its own."""
    return await by.claim(said, decisions(**decided))


async def settle(*processes: Once) -> None:
    """What became of claims is written."""
    for one in processes:
        await one._notes.write()
