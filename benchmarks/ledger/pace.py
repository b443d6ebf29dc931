"""How fast a contender reads once it runs: its position and CPU time are sampled, and the run's ends are left out.

Pure; the caller reads the clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: The part of the topic that counts. Before it programs are warming up, after it batches are no longer full.
WINDOW = (0.10, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """At a moment of a monotonic clock: how many records were done, and CPU seconds used so far, by process.

    Among those "queued": for how long the contender could have run, but had no core.
    """

    at_s: float
    records: int
    cpu_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Records a second, and microseconds of CPU that each process spent on a record. `own` is the contender itself."""

    records_per_s: float
    cpu_us: Mapping[str, float]
    records: int

    def figures(self) -> dict[str, object]:
        """What is printed. `per_cpu_s`: what the contender would do with a core of its own and servers elsewhere."""
        return {
            "events_per_s": round(self.records_per_s),
            "per_cpu_s": round(1e6 / self.cpu_us["own"]) if self.cpu_us["own"] else None,
            "cpu_us_per_event": {name: round(us, 2) for name, us in self.cpu_us.items()},
            "events_measured": self.records,
        }


def pace(samples: Sequence[Sample], *, total: int) -> Pace:
    """The pace between the first sample past the window's begin and the first past its end.

    Raises ValueError when the run was too short for two samples in the window.
    """
    inside = [s for s in samples if s.records >= WINDOW[0] * total]
    end = next((i for i, s in enumerate(inside) if s.records >= WINDOW[1] * total), None)
    if not end:
        raise ValueError(f"{len(samples)} samples are too few of a run over {total} records: use more events")
    first, last = inside[0], inside[end]
    return between(first, last)


def between(first: Sample, last: Sample) -> Pace:
    """The pace from one sample to a later one with more records."""
    records = last.records - first.records
    spent = {name: 1e6 * (last.cpu_s[name] - first.cpu_s[name]) / records for name in first.cpu_s}
    return Pace(records_per_s=records / (last.at_s - first.at_s), cpu_us=spent, records=records)
