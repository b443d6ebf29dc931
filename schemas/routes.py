"""Which version of a model answers whom, and from when on: routes, their revisions, and what holds at a moment.

Pure, so that it is the same in every process: commands write revisions, and each gateway evaluates them by its own
clock. A customer belongs to one of a hundred parts of all customers, for each model another one, and for ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from itertools import islice
from typing import Final

#: Into how many parts all customers are divided: a part is a hundredth of them.
PARTS: Final = 100
_ALIAS: Final = re.compile(r"[a-z][a-z0-9-]{0,39}")
_HEX: Final = re.compile(r"[0-9a-f]+")


def is_alias(text: str) -> bool:
    """Whether this may name an alias: a letter, then up to 39 letters, digits and '-', and no start of a hash."""
    return _ALIAS.fullmatch(text) is not None and _HEX.fullmatch(text) is None and text != "sha256"


def part_of(model: str, customer_id: str) -> int:
    """The part, 0 to 99, that a customer belongs to. Parts of one customer for two models have nothing in common."""
    digest = sha256(f"canary/1\0{model}\0{customer_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % PARTS


def parted(now: Mapping[str, Sequence[int]], percents: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The parts of each canary, by version, when it is to have so many percent and has those of `now`.

    A canary that grows keeps its parts and takes others from nobody but the route's own version and those that let go;
    one that shrinks gives up its highest. Raises ValueError for percents out of 1 to 100, or more than 100 in all.
    """
    for version, percent in percents.items():
        if not 1 <= percent <= PARTS:
            raise ValueError(f"canary {version[:12]}: expected 1 to 100 %, found {percent}")
    if sum(percents.values()) > PARTS:
        raise ValueError(f"canaries: expected at most 100 % in all, found {sum(percents.values())}")
    kept = {version: sorted(now.get(version, ()))[:percent] for version, percent in percents.items()}
    taken = {part for parts in kept.values() for part in parts}
    free = iter([part for part in range(PARTS) if part not in taken])
    return {
        version: tuple(sorted([*parts, *islice(free, percents[version] - len(parts))]))
        for version, parts in kept.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a model's requests go: `spread` partitions of a pool's topic, at a price, and to which version.

    `canaries` are versions with the parts of the customers they answer, disjoint; `pins` are customers with the version
    that each gets, whatever the canaries say.
    """

    version: str
    pool: str
    spread: int
    price_id: str
    canaries: Mapping[str, Sequence[int]] = field(default_factory=dict)
    pins: Mapping[str, str] = field(default_factory=dict)

    @property
    def versions(self) -> frozenset[str]:
        """Every version it names."""
        return frozenset((self.version, *self.canaries, *self.pins.values()))

    @property
    def percents(self) -> dict[str, int]:
        """Of a hundred customers how many each canary answers."""
        return {version: len(parts) for version, parts in self.canaries.items()}

    def version_for(self, model: str, customer_id: str) -> str:
        """The version that answers this customer: always the same one as long as its part stays with it."""
        pinned = self.pins.get(customer_id)
        if pinned is not None:
            return pinned
        if self.canaries:
            part = part_of(model, customer_id)
            for version, parts in self.canaries.items():
                if part in parts:
                    return version
        return self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """One change of a model's route, the `number`-th. `restores` is the revision that a rollback went back to.

    It holds from `effective_at` on. One that is not scheduled was made to hold at once, so it does as soon as it is
    known, also where the clock is behind the one that gave it its time.
    """

    model: str
    number: int
    route: Route
    effective_at: datetime
    is_scheduled: bool = False
    is_withdrawn: bool = False
    restores: int | None = None

    @property
    def order(self) -> tuple[datetime, int]:
        """By which of two that have begun the one is found that holds: the greater."""
        return self.effective_at, self.number

    def has_begun(self, at: datetime) -> bool:
        """Whether it held at that moment or some time before."""
        return not self.is_withdrawn and (not self.is_scheduled or self.effective_at <= at)


def holding(revisions: Iterable[Revision], at: datetime) -> Revision | None:
    """The revision of one model that holds at a moment; None before the first one does."""
    return max((r for r in revisions if r.has_begun(at)), key=lambda r: r.order, default=None)


def planned(revisions: Iterable[Revision], at: datetime) -> list[Revision]:
    """Those that are still to take effect, the next one first."""
    return sorted((r for r in revisions if not r.is_withdrawn and not r.has_begun(at)), key=lambda r: r.order)


def still_needed(revisions: Sequence[Revision], at: datetime) -> list[Revision]:
    """Those that say what holds at `at` or any later moment, in the order in which they take effect."""
    now = holding(revisions, at)
    begun = [] if now is None else [now]
    later = [r for r in revisions if not r.is_withdrawn and (now is None or r.order > now.order)]
    return sorted([*begun, *later], key=lambda r: r.order)


def before(revisions: Sequence[Revision], now: Revision) -> Revision | None:
    """What a rollback from `now` goes back to: the last revision before it that was another route; None without one.

    A rollback stands for the revision it restored, so the next one goes further back.
    """
    numbered = {r.number: r for r in revisions}
    origin = now
    while origin.restores is not None:
        origin = numbered[origin.restores]
    earlier = [r for r in revisions if not r.is_withdrawn and r.order < origin.order and r.route != now.route]
    return max(earlier, key=lambda r: r.order, default=None)
