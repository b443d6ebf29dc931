"""Limits while Redis does not answer: each gateway keeps an equal part of every bucket by itself, beginning empty.

All parts together never hold or fill more than the bucket. What was decided here is owed to the shared buckets, and
entered there when Redis is back, so that going back and forth gives nobody anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from api.admission.buckets import Limit
from api.admission.demand import Demand
from api.limits.plans import SETTLE, Share, place_us
from infra.redis import LuaCall
from schemas.keys import RedisKeys

#: Gateways go back to the shared buckets within this time of each other. Of what was decided by itself, the last one to
#: two of these are owed: what is older has filled again everywhere.
OWED_US = 1_000_000
_SWEEP_EVERY_US = 1_000_000


def monotonic_us() -> int:
    """Microseconds from any start, never back."""
    return time.monotonic_ns() // 1000


@dataclass(slots=True)
class _Bucket:
    """A part of a bucket after its last call: full again `used_us` after `at_us`, reckoned in `interval_us`."""

    used_us: int
    interval_us: int
    at_us: int


@dataclass(slots=True)
class Debt:
    """Units of one bucket that the shared one does not know of: those since `since_us`, and those just before."""

    interval_us: int
    since_us: int
    units: int = 0
    before: int = 0


@dataclass(slots=True)
class _Place:
    free_at_us: int
    #: Whether the shared places have it.
    is_told: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """One run of `settle.lua`, and what it is for."""

    where: tuple[str, str]
    call: LuaCall
    debt: Debt | None = None
    place: _Place | None = None


class LocalShare:
    """This gateway's parts. `clock` gives microseconds and never goes back; `wall` is read once, to tie it to the time
    of day in the evidence."""

    def __init__(
        self,
        keys: RedisKeys,
        *,
        clock: Callable[[], int] = monotonic_us,
        wall: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._tie_us = wall() - clock()
        self._since_us: int | None = None
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self._places: dict[tuple[str, str], dict[str, _Place]] = {}
        self._debts: dict[tuple[str, str], Debt] = {}
        self._swept_us = clock()

    @property
    def owes(self) -> bool:
        """Whether there is anything to enter in the shared buckets."""
        return bool(self._debts) or any(not p.is_told for held in self._places.values() for p in held.values())

    def enter(self, since_us: int) -> None:
        """Redis has not answered since then, by this clock: every part is empty as of that moment, whatever it held
        when it was used last."""
        if self._since_us is None:
            self._since_us = since_us

    def leave(self) -> None:
        """Redis answers."""
        self._since_us = None
        self._buckets.clear()

    def hold(self, share: Share, demand: Demand, *, is_told: bool) -> None:
        """A request has its places; with `is_told` Redis has them too."""
        now_us = self._clock()
        if now_us - self._swept_us >= _SWEEP_EVERY_US:
            self._sweep(now_us)
        place = _Place(now_us + place_us(demand), is_told)
        for name, _ in share.places:
            self._places.setdefault((demand.caller.customer_id, name), {})[demand.request_id.hex] = place

    def free(self, share: Share, demand: Demand) -> None:
        """A request is over."""
        for name, _ in share.places:
            held = self._places.get((demand.caller.customer_id, name))
            if held is not None:
                held.pop(demand.request_id.hex, None)
                if not held:
                    del self._places[demand.caller.customer_id, name]

    def _sweep(self, now_us: int) -> None:
        """Forget the places that have freed themselves: nobody says when a request ends whose caller hung up."""
        self._swept_us = now_us
        for where, held in list(self._places.items()):
            for request in [r for r, place in held.items() if place.free_at_us <= now_us]:
                del held[request]
            if not held:
                del self._places[where]

    def full(self, share: Share, demand: Demand) -> tuple[str, int] | None:
        """The first places that have no room left for this gateway, and their size; None when all have."""
        now_us = self._clock()
        for name, most in share.places:
            held = self._places.get((demand.caller.customer_id, name), {})
            if demand.request_id.hex not in held and sum(p.free_at_us > now_us for p in held.values()) >= most:
                return name, most
        return None

    def take(self, share: Share, demand: Demand) -> list[int]:
        """The answer of `limits.lua`, states 1 and 0, for this gateway's part of the buckets alone."""
        now_us = self._clock()
        customer_id, costs = demand.caller.customer_id, share.plan.costs(demand.cost)
        found = [self._used(customer_id, b, now_us) for b in share.limits]
        wait_us = max(
            [0, *(u - (b.burst - c) * pace for b, c, (u, pace) in zip(share.limits, costs, found, strict=True))]
        )
        answer = [int(wait_us == 0), self._tie_us + now_us, wait_us]
        for b, whole, cost, (used_us, pace_us) in zip(share.limits, share.plan.limits, costs, found, strict=True):
            if wait_us:
                answer += (max(0, (b.burst * pace_us - used_us) // pace_us), used_us)
                continue
            if pace_us != b.interval_us:
                used_us = -(-used_us // pace_us) * b.interval_us
            used_us += cost * b.interval_us
            self._buckets[customer_id, b.name] = _Bucket(used_us, b.interval_us, now_us)
            self._owe(customer_id, whole, cost, now_us)
            answer += ((b.window_us - used_us) // b.interval_us, used_us)
        return answer

    def _used(self, customer_id: str, b: Limit, now_us: int) -> tuple[int, int]:
        """Microseconds until this part is full again, and at which pace it has filled, as `limits.lua` reckons it."""
        known = self._buckets.get((customer_id, b.name))
        if known is None:
            since_us = now_us if self._since_us is None else self._since_us
            known = _Bucket(b.window_us, b.interval_us, since_us)
        if known.interval_us > b.interval_us:
            left_us = -(-known.used_us // known.interval_us) * b.interval_us - (now_us - known.at_us)
            return max(0, left_us), b.interval_us
        return max(0, known.at_us + known.used_us - now_us), known.interval_us

    def _owe(self, customer_id: str, whole: Limit, units: int, now_us: int) -> None:
        debt = self._debts.setdefault((customer_id, whole.name), Debt(whole.interval_us, now_us))
        if now_us - debt.since_us >= OWED_US:
            debt.before = debt.units if now_us - debt.since_us < 2 * OWED_US else 0
            debt.since_us, debt.units = now_us, 0
        debt.interval_us = whole.interval_us
        debt.units += units

    def settlement(self, at_most: int) -> list[Settling]:
        """What is to be entered in the shared buckets and places, at most so much. It is no longer owed, unless it is
        handed to `restore`."""
        now_us = self._clock()
        self._sweep(now_us)
        found: list[Settling] = []
        for where in list(self._debts)[:at_most]:
            debt = self._debts.pop(where)
            age_us = now_us - debt.since_us
            units = debt.units * (age_us < 2 * OWED_US) + debt.before * (age_us < OWED_US)
            if units:
                call = _settle(self._keys.bucket(*where), "units", debt.interval_us, units)
                found.append(Settling(where=where, call=call, debt=debt))
        for where, request, place in list(self._untold())[: at_most - len(found)]:
            place.is_told = True
            call = _settle(self._keys.places(*where), "place", request, place.free_at_us - now_us)
            found.append(Settling(where=where, call=call, place=place))
        return found

    def restore(self, settlement: Sequence[Settling]) -> None:
        """It may not have been entered: it is owed still. A bucket may be charged twice so, never too little."""
        for one in settlement:
            if one.place is not None:
                one.place.is_told = False
            if one.debt is not None:
                newer = self._debts.setdefault(one.where, one.debt)
                if newer is not one.debt:
                    newer.units, newer.before = newer.units + one.debt.units, newer.before + one.debt.before
                    newer.since_us = one.debt.since_us

    def _untold(self) -> Iterator[tuple[tuple[str, str], str, _Place]]:
        for where, held in self._places.items():
            for request, place in held.items():
                if not place.is_told:
                    yield where, request, place


def _settle(key: str, what: str, first: str | int, second: int) -> LuaCall:
    return SETTLE.start((key,), (what, first, second)).call()
