"""I2 from the log: no limiter bucket over its rate, by the limiter's own clock.

Pure, and on purpose without any code of the limiter: what is proved is not computed by what is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from schemas.ids import EPOCH
from schemas.records import InferenceRequested
from streams.replay.proofs import Findings, Verdict, verdict

_MICROSECOND = timedelta(microseconds=1)


def microseconds(moment: datetime) -> int:
    """Whole microseconds since 1970 of an aware moment, exactly."""
    return (moment - EPOCH) // _MICROSECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """The tightest pair of admissions of a bucket: `spare_us` microseconds to spare, negative when over the rate."""

    spare_us: int
    first: int
    last: int


def least_spare(admissions: Sequence[tuple[int, int]], *, interval_us: int, burst: int) -> Spare | None:
    """The least time to spare over all pairs i <= j of (time in µs, cost), sorted by time; None without admissions.

    What a pair has to spare is (t_j - t_i) - (cost_i + … + cost_j - burst)·T. One pass: with prefix sums S it is
    burst·T - (S_j·T - t_j) + (S_{i-1}·T - t_i), so only the smallest of the last term so far is needed. Integers only.
    """
    least: Spare | None = None
    total = 0
    lowest: tuple[int, int] | None = None
    for j, (t, cost) in enumerate(admissions):
        start = total * interval_us - t
        if lowest is None or start < lowest[0]:
            lowest = (start, j)
        total += cost
        spare = burst * interval_us - (total * interval_us - t) + lowest[0]
        if least is None or spare < least.spare_us:
            least = Spare(spare_us=spare, first=lowest[1], last=j)
    return least


class LimitProof:
    """I2: for every bucket, no run of admissions is closer together than its rate and burst allow (limiter's clock).

    Buckets are told apart by their limits, too: after a limit was changed, each setting is held to itself. A limiter
    that lost its state (Redis flushed) admits at most one further burst, which this proof reports. An admission that
    names no bucket proves nothing about any rate: with one of those I2 cannot be checked.
    """

    def __init__(self, *, since: datetime | None = None) -> None:
        self._since = since
        self._seen: set[tuple[bytes, int]] = set()
        self._buckets: dict[tuple[str, int, int], list[tuple[int, int, bytes]]] = {}
        self._without_evidence = 0

    def add(self, record: InferenceRequested) -> None:
        """One admission. A repeated delivery of it counts once; another admission of the same request counts again."""
        if self._since is not None and record.occurred_at < self._since:
            return
        t = microseconds(record.limiter_time)
        request_id = record.request_id.bytes
        if (request_id, t) in self._seen:
            return
        self._seen.add((request_id, t))
        if not record.limiter_buckets:
            self._without_evidence += 1
        for b in record.limiter_buckets:
            admissions = self._buckets.setdefault((b.bucket, b.interval_us, b.burst), [])
            admissions.append((t, b.cost, request_id))

    def finish(self, *, notes: Sequence[str] = ()) -> Verdict:
        """Check every bucket. Missing evidence at the beginning of the log cannot hide a pair that is still on it."""
        findings = Findings()
        least_us: int | None = None
        for (bucket, interval_us, burst), admissions in sorted(self._buckets.items()):
            admissions.sort()
            found = least_spare([(t, cost) for t, cost, _ in admissions], interval_us=interval_us, burst=burst)
            if found is None:
                continue
            least_us = found.spare_us if least_us is None else min(least_us, found.spare_us)
            if found.spare_us < 0:
                first, last = (UUID(bytes=admissions[k][2]) for k in (found.first, found.last))
                findings.add(
                    "bucket over its rate",
                    f"{bucket} (T {interval_us} µs, burst {burst}): {-found.spare_us} µs too soon, {first} to {last}",
                )
        figures = {
            "admissions": len(self._seen),
            "buckets": len(self._buckets),
            "without_evidence": self._without_evidence,
            "least_spare_us": least_us,
        }
        if self._without_evidence:
            gap = f"{self._without_evidence} of {len(self._seen)} admissions name no limiter bucket"
            notes = (*notes, f"{gap}: nothing says what rate they were held to")
        return verdict("I2", "A key never exceeds its rate", figures, findings, notes)
