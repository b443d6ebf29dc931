"""What a limiter must do, apart from the limiter: an integer model of the algorithm, and an exact judge of admissions.

The judge knows nothing of how admissions were decided; it only needs their times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bucket:
    """`burst` units at once, one more every `interval_us` microseconds; a call takes `cost`."""

    name: str
    interval_us: int
    burst: int
    cost: int = 1


@dataclass
class Model:
    """The generic cell rate algorithm over several buckets, all or nothing, in integers."""

    arrival_us: dict[str, int] = field(default_factory=dict)

    def take(self, buckets: Sequence[Bucket], now_us: int) -> list[int]:
        """The script's answer: state, now, retry_after, then remaining and reset of each bucket."""
        before = [max(self.arrival_us.get(b.name, 0), now_us) for b in buckets]
        after = [tat + b.cost * b.interval_us for tat, b in zip(before, buckets, strict=True)]
        retry_us = max(0, *(tat - now_us - b.burst * b.interval_us for tat, b in zip(after, buckets, strict=True)))
        if retry_us == 0:
            self.arrival_us.update({b.name: tat for b, tat in zip(buckets, after, strict=True)})
        answer = [int(retry_us == 0), now_us, retry_us]
        for b, tat in zip(buckets, before if retry_us else after, strict=True):
            answer += [max(0, (b.burst * b.interval_us - (tat - now_us)) // b.interval_us), tat - now_us]
        return answer


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
