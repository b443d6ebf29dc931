"""I3 and I4 from the log: one version per batch, the one admitted, and accepted = finished + open, each success billed.

Pure. Holds a few machine words per request; versions, names and quantities are shared between requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from schemas.records import InferenceFinished, InferenceRequested, Outcome, UsageRecorded
from streams.replay.proofs import EXAMPLES, Findings, Verdict, hour_start, verdict

#: topic, partition, offset
Place = tuple[str, int, int]
Quantities = tuple[tuple[str, int], ...]


@dataclass(slots=True)
class _Request:
    hour: datetime
    customer_id: str
    version: str
    places: tuple[Place, ...]


@dataclass(slots=True)
class _Result:
    place: Place
    outcome: Outcome
    customer_id: str
    version: str
    quantities: Quantities


class RequestBook:
    """Every request on the log with its first result and its usage; records before `since` are left out."""

    def __init__(self, *, since: datetime | None = None) -> None:
        self._since = since
        self._shared: dict[object, object] = {}
        self._requests: dict[bytes, _Request] = {}
        self._results: dict[bytes, _Result] = {}
        self._usage: dict[bytes, Quantities] = {}
        self._aside: set[bytes] = set()
        self._written_off: set[bytes] = set()
        self._batches: dict[bytes, tuple[str, ...]] = {}
        self.repeated_requests = 0
        self.repeated_results = 0

    def _share_text(self, text: str) -> str:
        shared = self._shared.setdefault(text, text)
        return shared if isinstance(shared, str) else text

    def _share_quantities(self, quantities: Mapping[str, int]) -> Quantities:
        plain = tuple(sorted(quantities.items()))
        shared = self._shared.setdefault(plain, plain)
        return shared if isinstance(shared, tuple) else plain

    def add_request(self, place: Place, record: InferenceRequested) -> None:
        """An admission; the first per request id counts, the places of all are remembered."""
        if self._since is not None and record.occurred_at < self._since:
            return
        known = self._requests.get(record.request_id.bytes)
        if known is not None:
            self.repeated_requests += 1
            known.places += (place,)
            return
        self._requests[record.request_id.bytes] = _Request(
            hour=hour_start(record.occurred_at),
            customer_id=self._share_text(record.customer_id),
            version=self._share_text(record.version),
            places=(place,),
        )

    def add_result(self, place: Place, record: InferenceFinished) -> None:
        """An end; the first per request id, by partition and offset, is the result. All say what their batch ran."""
        if self._since is not None and record.admitted_at < self._since:
            return
        if record.batch_items > 0:
            ran = self._batches.setdefault(record.batch_id.bytes, (self._share_text(record.version),))
            if record.version not in ran:
                self._batches[record.batch_id.bytes] = (*ran, self._share_text(record.version))
        key = record.request_id.bytes
        known = self._results.get(key)
        if known is not None:
            self.repeated_results += 1
            if known.place[1:] <= place[1:]:
                return
        self._results[key] = _Result(
            place=place,
            outcome=record.outcome,
            customer_id=self._share_text(record.customer_id),
            version=self._share_text(record.version),
            quantities=self._share_quantities(record.quantities),
        )

    def add_usage(self, record: UsageRecorded) -> None:
        """A usage record; repetitions are I1's business."""
        if self._since is None or record.occurred_at >= self._since:
            self._usage.setdefault(record.request_id.bytes, self._share_quantities(record.quantities))

    def add_aside(self, record: UsageRecorded, *, written_off: bool = False) -> None:
        """A usage record that the ledger set aside: it bills nothing, so it is no usage, and none is awaited either.

        `written_off`: somebody has decided that it stays so.
        """
        self._aside.add(record.request_id.bytes)
        if written_off:
            self._written_off.add(record.request_id.bytes)

    def unsettled(self) -> set[UUID]:
        """Requests of which one of usage and result is on the log and the other is not, or was not when it was read."""
        succeeded = {k for k, r in self._results.items() if r.outcome is Outcome.SUCCEEDED} - self._aside
        return {UUID(bytes=k) for k in (succeeded - self._usage.keys()) | (self._usage.keys() - self._results.keys())}

    def prove_versions(self, *, notes: Sequence[str] = ()) -> Verdict:
        """I3: every success ran the version it was admitted with, and no batch ran two."""
        findings = Findings()
        for batch, ran in self._batches.items():
            if len(ran) > 1:
                findings.add("one batch ran several versions", f"{UUID(bytes=batch)}: {', '.join(v[:12] for v in ran)}")
        checked = 0
        for key, result in self._results.items():
            request = self._requests.get(key)
            if request is None or result.outcome is not Outcome.SUCCEEDED:
                continue
            checked += 1
            if result.version != request.version:
                findings.add(
                    "served by another version",
                    f"{UUID(bytes=key)}: admitted with {request.version[:12]}, ran {result.version[:12]}",
                )
        versions = len({r.version for r in self._requests.values()})
        figures: dict[str, int | None] = {"succeeded": checked, "versions": versions, "batches": len(self._batches)}
        return verdict("I3", "A request is served by the version it was admitted with", figures, findings, notes)

    def prove_conservation(
        self, *, committed: Mapping[tuple[str, int], int], notes: Sequence[str] = ()
    ) -> tuple[Verdict, list[dict[str, object]], list[str]]:
        """I4, its table per hour, and the first open requests.

        `committed` is the workers' committed offset per (topic, partition), read before the results were: an open
        request below it was let go of without a result, and is lost.
        """
        findings = Findings()
        hours: dict[datetime, dict[str, int]] = {}
        columns = ("accepted", "succeeded", "failed", "expired", "cancelled", "open")
        open_ids: list[str] = []
        for key, request in self._requests.items():
            hour = hours.setdefault(request.hour, dict.fromkeys(columns, 0))
            hour["accepted"] += 1
            result = self._results.get(key)
            if result is None:
                hour["open"] += 1
                if len(open_ids) < EXAMPLES:
                    open_ids.append(str(UUID(bytes=key)))
                if all(offset < committed.get((topic, p), 0) for topic, p, offset in request.places):
                    findings.add("lost: the workers went past it and left no result", UUID(bytes=key))
            elif result.outcome is Outcome.UNKNOWN:
                findings.add("outcome is unknown here", UUID(bytes=key))
            else:
                hour[result.outcome.value.lower()] += 1
                if result.customer_id != request.customer_id:
                    findings.add("result belongs to another customer", UUID(bytes=key))
        for key, result in self._results.items():
            if key not in self._requests and not notes:
                findings.add("result without a request", UUID(bytes=key))
            usage = self._usage.get(key)
            if result.outcome is Outcome.SUCCEEDED:
                if usage is None and key in self._written_off:
                    pass
                elif usage is None:
                    aside = "succeeded, and its usage was set aside"
                    findings.add(aside if key in self._aside else "succeeded without usage", UUID(bytes=key))
                elif usage != result.quantities:
                    findings.add("usage and result differ in quantities", UUID(bytes=key))
            elif usage is not None:
                findings.add("usage of a request that did not succeed", UUID(bytes=key))
        for key in self._usage:
            if notes:
                break
            if key not in self._requests:
                findings.add("usage without a request", UUID(bytes=key))
            elif key not in self._results:
                findings.add("usage without a result", UUID(bytes=key))
        figures: dict[str, int | None] = {c: sum(h[c] for h in hours.values()) for c in columns}
        figures |= {"repeated_requests": self.repeated_requests, "repeated_results": self.repeated_results}
        table: list[dict[str, object]] = [{"hour": f"{h:%Y-%m-%dT%H:00Z}", **row} for h, row in sorted(hours.items())]
        return verdict("I4", "Accepted is never lost", figures, findings, notes), table, open_ids
