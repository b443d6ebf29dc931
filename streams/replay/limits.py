"""I2 from the log: no limiter bucket over its rate, by the limiter's own clock.

Pure, and on purpose without any code of the limiter: what is proved is not computed by what is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction
from math import floor
from typing import NamedTuple
from uuid import UUID

from schemas.ids import EPOCH
from schemas.records import InferenceRequested, LimiterMode
from streams.replay.proofs import Findings, Verdict, verdict

_MICROSECOND = timedelta(microseconds=1)


def microseconds(moment: datetime) -> int:
    """Whole microseconds since 1970 of an aware moment, exactly."""
    return (moment - EPOCH) // _MICROSECOND


class Taken(NamedTuple):
    """One admission from one bucket: when (µs), the burst and the interval (µs) that held, units, and which request."""

    at_us: int
    burst: int
    interval_us: int
    cost: int
    request: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """The tightest pair of admissions of a bucket: `spare_us` microseconds to spare, negative when over the rate."""

    spare_us: int
    first: int
    last: int


def least_spare(admissions: Sequence[Taken]) -> Spare | None:
    """The least time to spare over all pairs i <= j of admissions in order of time; None without admissions.

    While a limit stays as it is, a pair has (t_j - t_i) - (cost_i + … + cost_j - burst)·T to spare. One pass: what is
    used only grows with admissions and shrinks with time, and where it reaches nothing a new run begins, so the
    tightest pair that ends at j begins with the run that j is in.

    A limit may change from one admission to the next. Then what is used is kept in units, and has shrunk at the faster
    of both rates meanwhile; nothing may be used beyond the burst that holds at j. Exact, in fractions where need be.
    """
    least: Spare | None = None
    used: int | Fraction = 0  # microseconds of the interval that held last
    first, before = 0, None
    for j, one in enumerate(admissions):
        if before is not None and used:
            gone_us = one.at_us - before.at_us
            if before.interval_us == one.interval_us:
                used -= gone_us
            else:
                units = Fraction(used) / before.interval_us
                used = (units - Fraction(gone_us, min(before.interval_us, one.interval_us))) * one.interval_us
        if used <= 0:
            used, first = 0, j
        used += one.cost * one.interval_us
        spare_us = floor(one.burst * one.interval_us - used)
        if least is None or spare_us < least.spare_us:
            least = Spare(spare_us=spare_us, first=first, last=j)
        before = one
    return least


#: A bucket of a customer; those that a gateway kept by itself have its name, the others none.
_Place = tuple[str, str, str]


class LimitProof:
    """I2: for every bucket, no run of admissions is closer together than its rate and burst allow (limiter's clock).

    A limiter that lost its state (Redis flushed) admits at most one further burst, which this proof reports. What a
    gateway decided by itself is held to its share by its own clock, and all gateways' together to the whole limit. An
    admission that names no bucket proves nothing about any rate: with one of those I2 cannot be checked. How many
    requests were unfinished at once is not part of it: the log does not have when a place was free again.
    """

    def __init__(self, *, since: datetime | None = None) -> None:
        self._since = since
        self._seen: set[tuple[bytes, int]] = set()
        self._shared: dict[_Place, list[Taken]] = {}
        self._shares: dict[_Place, list[Taken]] = {}
        #: Per bucket, into how many parts of which size it was divided, and all that was admitted from them.
        self._divided: dict[tuple[str, str], tuple[set[tuple[int, int, int]], list[Taken]]] = {}
        self._without_evidence = 0
        self._by_gateways = 0

    def add(self, record: InferenceRequested) -> None:
        """One admission. A repeated delivery of it counts once; another admission of the same request counts again."""
        if self._since is not None and record.occurred_at < self._since:
            return
        t = microseconds(record.limiter_time)
        request_id = record.request_id.bytes
        if (request_id, t) in self._seen:
            return
        self._seen.add((request_id, t))
        if not record.limiter_buckets or record.limiter is LimiterMode.UNKNOWN:
            self._without_evidence += 1
            return
        is_local = record.limiter is LimiterMode.LOCAL
        self._by_gateways += is_local
        for b in record.limiter_buckets:
            taken = Taken(t, b.burst, b.interval_us, b.cost, request_id)
            customer_id, bucket = record.customer_id, b.bucket
            if not is_local:
                self._shared.setdefault((customer_id, bucket, ""), []).append(taken)
                continue
            self._shares.setdefault((customer_id, bucket, record.reply_to), []).append(taken)
            parts, together = self._divided.setdefault((customer_id, bucket), (set(), []))
            parts.add((b.interval_us, b.burst, b.shares))
            together.append(taken)

    def finish(self, *, notes: Sequence[str] = ()) -> Verdict:
        """Check every bucket. Missing evidence at the beginning of the log cannot hide a pair that is still on it."""
        findings = Findings()
        spares = [
            *(
                _judged("bucket over its rate", *place, taken, findings)
                for place, taken in sorted(self._shared.items())
            ),
            *(_judged("share over its rate", *place, taken, findings) for place, taken in sorted(self._shares.items())),
            *self._together(findings),
        ]
        found_us = [spare.spare_us for spare in spares if spare is not None]
        figures = {
            "admissions": len(self._seen),
            "by_gateways_alone": self._by_gateways,
            "buckets": len(self._shared.keys() | {(c, bucket, "") for c, bucket, _ in self._shares}),
            "without_evidence": self._without_evidence,
            "least_spare_us": min(found_us, default=None),
        }
        if self._without_evidence:
            gap = f"{self._without_evidence} of {len(self._seen)} admissions name no limiter bucket"
            notes = (*notes, f"{gap}: nothing says what rate they were held to")
        return verdict("I2", "A key never exceeds its rate", figures, findings, notes)

    def _together(self, findings: Findings) -> Iterator[Spare | None]:
        """All gateways that kept a bucket by themselves, held to the bucket. Where its limit changed meanwhile they may
        have heard of it at different times, and each is only held to its own share."""
        for (customer_id, bucket), (parts, taken) in sorted(self._divided.items()):
            if len(parts) > 1:
                continue
            ((interval_us, burst, shares),) = parts
            if interval_us % shares:
                findings.add(
                    "a share that is no part of a bucket", f"{customer_id} {bucket}: {interval_us} µs / {shares}"
                )
                continue
            whole = [t._replace(interval_us=interval_us // shares, burst=burst * shares) for t in taken]
            yield _judged("shares together over the rate", customer_id, bucket, "", whole, findings)


def _judged(
    what: str, customer_id: str, bucket: str, gateway: str, taken: list[Taken], findings: Findings
) -> Spare | None:
    taken.sort()  # of admissions in the same microsecond, those under the smaller burst come first
    found = least_spare(taken)
    if found is not None and found.spare_us < 0:
        first, last = (UUID(bytes=taken[k].request) for k in (found.first, found.last))
        limit = f"T {taken[found.last].interval_us} µs, burst {taken[found.last].burst}"
        where = f" of {customer_id}" + (f" at {gateway}" if gateway else "")
        findings.add(what, f"{bucket}{where} ({limit}): {-found.spare_us} µs too soon, {first} to {last}")
    return found
