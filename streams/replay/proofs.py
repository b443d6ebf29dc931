"""I1 from the log: each request billed once. And the form of every verdict.

Pure, and on purpose without any code of the ledger: what is proved is not computed by what is tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime, timezone
from uuid import UUID

from schemas.records import UsageRecorded

EXAMPLES = 10

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


def hour_start(moment: datetime) -> datetime:
    """Start of the UTC hour."""
    return moment.astimezone(timezone.utc).replace(minute=0, second=0, microsecond=0)


#: What became of a dead letter, as its row says.
REDRIVEN = "redriven"
DISCARDED = "discarded"


class LedgerProof:
    """I1: the ledger equals the usage topic, each request once, up to the ledger's own position.

    `next_offsets` is that position per partition; `dead` the (partition, offset) of records that the ledger set aside,
    and `settled` the state of those that were redriven or discarded since; records that occurred before `since` are not
    looked at. All of these, the rows and the processed ids must come from one snapshot of the database. A redriven
    record is billed like any other, a discarded one bills nothing by somebody's decision. `aside` are the requests of
    the other set-aside records that decode: each must have been billed by another record.

    Of requests with ids below `first_id` the ledger may have let the processed id go. That each of them was billed once
    is then proved by the rows alone: their sums are compared like all others.
    """

    def __init__(
        self,
        *,
        next_offsets: Mapping[int, int],
        dead: Set[tuple[int, int]],
        settled: Mapping[tuple[int, int], str] | None = None,
        since: datetime | None = None,
        first_id: UUID | None = None,
    ) -> None:
        self._first_id = first_id
        self._next_offsets = next_offsets
        self._dead = dead
        self._settled = settled or {}
        self._since = since
        self.aside: set[UUID] = set()
        self._content: dict[bytes, int] = {}
        self._sums: dict[LedgerKey, int] = {}
        self._findings = Findings()
        self._notes: list[str] = []
        self._figures: dict[str, int | None] = dict.fromkeys(
            ("records", "requests", "duplicates", "set_aside", REDRIVEN, DISCARDED, "not_yet_read", "undecodable"), 0
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
            state = self._settled.get((partition, offset))
            if state is None:
                self.aside.add(record.request_id)
            else:
                self._bump(state)
            if state != REDRIVEN:
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

    def _may_be_gone(self, key: bytes) -> bool:
        """Whether an id with a time (its version is 7) lies before what the ledger keeps."""
        return self._first_id is not None and key < self._first_id.bytes and key[6] >> 4 == 7

    def add_undecodable(self, partition: int, offset: int) -> None:
        """A record of the usage topic that does not decode: the ledger must have set it aside.

        One that somebody has discarded is that, and undecodable no more.
        """
        if offset >= self._next_offsets.get(partition, 0):
            self._bump("not_yet_read")
            return
        place = f"partition {partition} offset {offset}"
        state = self._settled.get((partition, offset))
        if state != DISCARDED:
            self._bump("undecodable")
        if (partition, offset) not in self._dead:
            self._findings.add("undecodable record was not set aside", place)
        elif state is not None:
            self._bump(state)
            if state == REDRIVEN:
                self._notes.append(f"{place} was redriven and does not decode here: a newer inferlog has to verify it")

    def finish(
        self,
        *,
        rows: Mapping[LedgerKey, int],
        processed: Iterable[UUID],
        aside_billed: Set[UUID],
        outside: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> Verdict:
        """Compare with the ledger's rows and processed request ids (of the hours looked at).

        `aside_billed` are those of `aside` that are processed, in whatever hour; `outside` are rows, in words, whose
        hour no calendar has, and so no record.
        """
        notes = [*notes, *self._notes]
        for example in outside:
            self._findings.add("ledger row of an hour that no calendar has", example)
        missing = set(self._content)
        aside = {request_id for request_id in self.aside - aside_billed if request_id.bytes not in self._content}
        count = 0
        for request_id in processed:
            count += 1
            if request_id.bytes in self._content:
                missing.discard(request_id.bytes)
            elif not notes:
                self._findings.add("billed request is not on the topic", request_id)
        let_go = {key for key in missing if self._may_be_gone(key)}
        for key in missing - let_go:
            self._findings.add("request on the topic was never billed", UUID(bytes=key))
        for request_id in sorted(aside):
            self._findings.add("set aside and never billed", request_id)
        if not notes:  # without the whole topic, sums cannot be compared
            for row in sorted(rows.keys() | self._sums.keys()):
                ledger, topic = rows.get(row, 0), self._sums.get(row, 0)
                if ledger != topic:
                    customer, hour, model, version, price, meter = row
                    place = f"{customer} {hour:%Y-%m-%dT%HZ} {model} {version[:12]} {price} {meter}"
                    self._findings.add("ledger and topic differ", f"{place}: ledger {ledger}, topic {topic}")
        figures = {**self._figures, "processed_requests": count, "let_go": len(let_go), "rows": len(rows)}
        return verdict("I1", "Each request is billed once", figures, self._findings, notes)
