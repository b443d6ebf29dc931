"""What a limiter must do, apart from the limiter: a model of its decisions in integers, and exact judges of admissions.

The judges know nothing of how admissions were decided; they only need their times, costs and limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

KEPT_S, SKEW_S = 60, 2


@dataclass(frozen=True)
class Bucket:
    """`burst` units at once, one more every `interval_us` microseconds; a call takes `cost`."""

    name: str
    interval_us: int
    burst: int
    cost: int = 1


@dataclass(frozen=True)
class Money:
    """What a call may spend: see Spending. `settled_s` and `second` are seconds since 1970."""

    left: int
    settled_s: int
    second: int
    cost: int


@dataclass
class Model:
    """The generic cell rate algorithm over several buckets, places and money; all or nothing, in integers."""

    #: Per bucket: when it is full again, the interval in which that is reckoned, when it was written.
    arrival_us: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    #: Per places: request -> the moment from which its place is free.
    places: dict[str, dict[str, int]] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)
    since_s: int | None = None

    def used(self, b: Bucket, now_us: int) -> tuple[int, int]:
        """Microseconds until the bucket is full, at the pace at which it has filled since it was written."""
        tat, interval_us, at = self.arrival_us.get(b.name, (now_us, b.interval_us, now_us))
        if b.interval_us < interval_us:
            return max(0, -(-(tat - at) // interval_us) * b.interval_us - (now_us - at)), b.interval_us
        return max(0, tat - now_us), interval_us

    def take(
        self,
        buckets: Sequence[Bucket],
        now_us: int,
        *,
        places: Mapping[str, int] | None = None,
        request: str = "r",
        lasts_us: int = 0,
        money: Money | None = None,
    ) -> list[int]:
        """The script's answer. `places`: how many at most, by name."""
        found = [self.used(b, now_us) for b in buckets]
        retry_us = max([0, *(u - (b.burst - b.cost) * pace for b, (u, pace) in zip(buckets, found, strict=True))])
        if retry_us:
            answer = [0, now_us, retry_us]
            for b, (used_us, pace_us) in zip(buckets, found, strict=True):
                answer += [max(0, (b.burst * pace_us - used_us) // pace_us), used_us]
            return answer
        for number, (name, most) in enumerate((places or {}).items(), start=1):
            held = {r for r, free_us in self.places.get(name, {}).items() if free_us > now_us}
            if request not in held and len(held) >= most:
                return [-2, now_us, number]
        if money is not None:
            refusal = self._no_money(money, now_us)
            if refusal:
                return refusal
            second = max(money.second, money.settled_s)
            self.reserved[second] = self.reserved.get(second, 0) + money.cost
        answer = [1, now_us, 0]
        for b, (used_us, pace_us) in zip(buckets, found, strict=True):
            if pace_us != b.interval_us:
                used_us = -(-used_us // pace_us) * b.interval_us
            used_us += b.cost * b.interval_us
            self.arrival_us[b.name] = (now_us + used_us, b.interval_us, now_us)
            answer += [(b.burst * b.interval_us - used_us) // b.interval_us, used_us]
        for name in places or {}:
            self.places.setdefault(name, {})[request] = now_us + lasts_us
        return answer

    def _no_money(self, money: Money, now_us: int) -> list[int] | None:
        if self.since_s is None:
            self.since_s = now_us // 1_000_000 + 1 + SKEW_S
        if money.settled_s < self.since_s:
            return [-4, now_us, self.since_s]
        opened = sum(amount for second, amount in self.reserved.items() if second >= money.settled_s)
        if opened + money.cost > money.left:
            return [-3, now_us, opened]
        self.reserved = {s: a for s, a in self.reserved.items() if s >= money.settled_s - KEPT_S}
        self.since_s = max(self.since_s, money.settled_s - KEPT_S)
        return None


def excess_us(admitted_us: Iterable[int], *, interval_us: int, burst: int) -> int:
    """How far the worst window was over the rate, in microseconds; 0 or less when every window was within it.

    For every i <= j, (j - i + 1 - burst) units took at least that many intervals: one pass over the sorted times with
    a running minimum, exact.
    """
    worst = -burst * interval_us
    lowest: int | None = None
    for j, at in enumerate(sorted(admitted_us)):
        # (j - i + 1 - B)T - (t_j - t_i) = ((j + 1 - B)T - t_j) - (iT - t_i), so the smallest (iT - t_i) is the worst i.
        start = j * interval_us - at
        lowest = start if lowest is None else min(lowest, start)
        worst = max(worst, (j + 1 - burst) * interval_us - at - lowest)
    return worst


def excess_beyond_losses_us(
    admitted: Iterable[tuple[int, int]],
    *,
    interval_us: int,
    burst: int,
    losses: Sequence[tuple[int, int]],
) -> int:
    """The same for admissions of (time, cost) from a limiter that lost its memory: each loss may have given one burst
    more, from the moment when it began; what was not used a while after its end (one filling of the bucket) is gone."""
    worst = -burst * interval_us
    used = last_us = 0
    given = sorted((begin, end + burst * interval_us) for begin, end in losses)
    for at, cost in sorted(admitted):
        used = max(0, used - (at - last_us)) + cost * interval_us
        last_us = at
        while used > burst * interval_us:
            usable = next((g for g in given if g[0] <= at <= g[1]), None)
            if usable is None:
                break
            given.remove(usable)
            used = max(0, used - burst * interval_us)
        worst = max(worst, used - burst * interval_us)
    return worst


def excess_of_changing_us(admitted: Iterable[tuple[int, int, int, int]]) -> Fraction | int:
    """The same for admissions of (time, cost, interval, burst), whose limits may change from each to the next.

    What is used stays used, in units. Between two admissions the bucket fills at the faster of their rates; nothing
    holds more than the burst of the admission at hand. With limits that never change it finds what `excess_us` finds.
    """
    worst: Fraction | int | None = None
    used: Fraction | int = 0  # in microseconds of the last interval
    last_us, last_interval_us = 0, 0
    for at, cost, interval_us, burst in sorted(admitted, key=lambda a: (a[0], a[3])):
        if last_interval_us and interval_us != last_interval_us:
            pace_us = min(interval_us, last_interval_us)
            units = max(Fraction(0), Fraction(used) / last_interval_us - Fraction(at - last_us, pace_us))
            used = units * interval_us
        else:
            used = max(0, used - (at - last_us))
        used += cost * interval_us
        over = used - burst * interval_us
        worst = over if worst is None else max(worst, over)
        last_us, last_interval_us = at, interval_us
    return 0 if worst is None else worst
