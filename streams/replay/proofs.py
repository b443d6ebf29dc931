"""I1 and I2 from the log: each request billed once, no limiter bucket over its rate. And the form of every verdict.

Pure, and on purpose without any code of the ledger or the limiter: what is proved is not computed by what is tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from uuid import UUID

from schemas.records import InferenceRequested, UsageRecorded

EXAMPLES = 10
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)

#: customer, hour, model, version, price, meter
LedgerKey = tuple[str, datetime, str, str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One kind of violation: how often it was met, and the first EXAMPLES of what it concerns."""

    what: str
    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of one proof. `holds` is None when it could not be checked; `notes` then say why."""

    name: str
    promise: str
    holds: bool | None
    figures: Mapping[str, int | None]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Findings:
    """Collects violations by kind, in order of first appearance."""

    _by_kind: dict[str, list[str]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def add(self, what: str, example: object) -> None:
        """Note one violation."""
        examples = self._by_kind.setdefault(what, [])
        self._counts[what] = self._counts.get(what, 0) + 1
        if len(examples) < EXAMPLES:
            examples.append(str(example))

    def all(self) -> tuple[Finding, ...]:
        """What was found."""
        return tuple(
            Finding(what=what, count=self._counts[what], examples=tuple(examples))
            for what, examples in self._by_kind.items()
        )


def verdict(
    name: str, promise: str, figures: Mapping[str, int | None], findings: Findings, notes: Sequence[str] = ()
) -> Verdict:
    """A violation outweighs a gap in the evidence; without either the promise holds."""
    found = findings.all()
    holds = False if found else (None if notes else True)
    return Verdict(name=name, promise=promise, holds=holds, figures=figures, findings=found, notes=tuple(notes))


def microseconds(moment: datetime) -> int:
    """Whole microseconds since 1970 of an aware moment, exactly."""
    return (moment - _EPOCH) // _MICROSECOND


def hour_start(moment: datetime) -> datetime:
    """Start of the UTC hour."""
    return moment.astimezone(timezone.utc).replace(minute=0, second=0, microsecond=0)


class LedgerProof:
    """I1: the ledger equals the usage topic, each request once, up to the ledger's own position.

    `next_offsets` is that position per partition; `dead` the (partition, offset) of records that the ledger set aside;
    records that occurred before `since` are not looked at. All three, the rows and the processed ids must come from
    one snapshot of the database. `aside` are the requests of set-aside records that decode: each must have been billed
    by another record.
    """

    def __init__(
        self, *, next_offsets: Mapping[int, int], dead: Set[tuple[int, int]], since: datetime | None = None
    ) -> None:
        self._next_offsets = next_offsets
        self._dead = dead
        self._since = since
        self.aside: set[UUID] = set()
        self._content: dict[bytes, int] = {}
        self._sums: dict[LedgerKey, int] = {}
        self._findings = Findings()
        self._figures: dict[str, int | None] = dict.fromkeys(
            ("records", "requests", "duplicates", "set_aside", "not_yet_read", "undecodable"), 0
        )

    def _bump(self, figure: str) -> None:
        self._figures[figure] = (self._figures[figure] or 0) + 1

    def add(self, partition: int, offset: int, record: UsageRecorded) -> None:
        """One usage record of the topic."""
        if self._since is not None and record.occurred_at < self._since:
            return
        if offset >= self._next_offsets.get(partition, 0):
            self._bump("not_yet_read")
            return
        self._bump("records")
        if (partition, offset) in self._dead:
            self._bump("set_aside")
            self.aside.add(record.request_id)
            return
        key = record.request_id.bytes
        content = hash(
            (
                record.event_id,
                record.customer_id,
                record.occurred_at,
                record.model,
                record.version,
                record.price_id,
                frozenset(record.quantities.items()),
            )
        )
        known = self._content.get(key)
        if known is not None:
            self._bump("duplicates")
            if known != content:
                place = f"partition {partition} offset {offset}"
                self._findings.add("usage records of one request differ", f"{record.request_id} at {place}")
            return
        self._content[key] = content
        self._bump("requests")
        hour = hour_start(record.occurred_at)
        for meter, quantity in record.quantities.items():
            row = (record.customer_id, hour, record.model, record.version, record.price_id, meter)
            self._sums[row] = self._sums.get(row, 0) + quantity

    def add_undecodable(self, partition: int, offset: int) -> None:
        """A record of the usage topic that does not decode: the ledger must have set it aside."""
        if offset >= self._next_offsets.get(partition, 0):
            self._bump("not_yet_read")
            return
        self._bump("undecodable")
        if (partition, offset) not in self._dead:
            self._findings.add("undecodable record was not set aside", f"partition {partition} offset {offset}")

    def finish(
        self,
        *,
        rows: Mapping[LedgerKey, int],
        processed: Iterable[UUID],
        aside_billed: Set[UUID],
        notes: Sequence[str] = (),
    ) -> Verdict:
        """Compare with the ledger's rows and processed request ids (of the hours looked at).

        `aside_billed` are those of `aside` that are processed, in whatever hour.
        """
        missing = set(self._content)
        count = 0
        for request_id in processed:
            count += 1
            if request_id.bytes in self._content:
                missing.discard(request_id.bytes)
            elif not notes:
                self._findings.add("billed request is not on the topic", request_id)
        for key in missing:
            self._findings.add("request on the topic was never billed", UUID(bytes=key))
        for request_id in sorted(self.aside - aside_billed - {UUID(bytes=key) for key in missing}):
            self._findings.add("set aside and never billed", request_id)
        if not notes:  # without the whole topic, sums cannot be compared
            for row in sorted(rows.keys() | self._sums.keys()):
                ledger, topic = rows.get(row, 0), self._sums.get(row, 0)
                if ledger != topic:
                    customer, hour, model, version, price, meter = row
                    place = f"{customer} {hour:%Y-%m-%dT%HZ} {model} {version[:12]} {price} {meter}"
                    self._findings.add("ledger and topic differ", f"{place}: ledger {ledger}, topic {topic}")
        figures = {**self._figures, "processed_requests": count, "rows": len(rows)}
        return verdict("I1", "Each request is billed once", figures, self._findings, notes)


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
