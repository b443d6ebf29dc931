"""A partition while it is this worker's: what of it may start, what must wait, and whether it has too much in flight.

Pure. Records that an earlier owner may have ended wait here until it is known which of them it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpu_worker.offsets import Watermark
from gpu_worker.ports import Delivery
from gpu_worker.recovery import Recorded
from gpu_worker.soundness import require_tellable
from schemas.claims import LARGEST_BYTES, blob_bytes
from schemas.codec import Placed
from schemas.records import InferenceRequested


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much may be in flight, and how long things take.

    `records_per_partition` have not ended. `records_ahead` counts also what ended after one that has not: it is far
    larger, so that one request that waits long holds up no others, and bounds what a successor must look up.
    `revoke_wait_s` must be below the group's rebalance timeout: past that this worker is out anyway.
    """

    records_per_partition: int = 1_000
    records_ahead: int = 50_000
    records_per_poll: int = 256
    bytes_in_all: int = 128 * 1024 * 1024
    commit_every_s: float = 0.1
    revoke_wait_s: float = 5.0

    @property
    def reach(self) -> int:
        """No record this far past the committed position has ended: a poll may overshoot by its size."""
        return self.records_ahead + self.records_per_poll


@dataclass(slots=True)
class Held:
    """One partition, from one assignment to the next; `generation` numbers assignments."""

    generation: int
    watermark: Watermark = field(default_factory=Watermark)
    claimed: int = 0
    size_bytes: int = 0
    paused: bool = False
    _inherited: range = range(0)
    _found: Mapping[bytes, Recorded] | None = None  # None until it is known what earlier owners recorded
    _waiting: list[Delivery] = field(default_factory=list)

    @property
    def recovering(self) -> bool:
        """Whether it is unknown yet what earlier owners ended."""
        return self._found is None

    def settle(self, inherited: range, found: Mapping[bytes, Recorded]) -> None:
        """From now on records may start; those in `inherited` only when they have no result in `found`, by id."""
        self._inherited, self._found = inherited, found

    def delivery(self, record: Placed, request: InferenceRequested) -> Delivery:
        """The request that this record of the partition holds. What it refers to counts as held from now on.

        Raises DecodeError when not even its failure could be told.
        """
        require_tellable(request)
        beside_bytes = min(blob_bytes(request.inputs), LARGEST_BYTES)
        self.size_bytes += beside_bytes
        return Delivery(
            request=request,
            partition=record.partition,
            offset=record.offset,
            generation=self.generation,
            size_bytes=len(record.value or b"") + beside_bytes,
        )

    def add(self, delivery: Delivery) -> None:
        """One that could only be read later than it arrived; the next `admit` has it."""
        self._waiting.append(delivery)

    def admit(self, arrived: Sequence[Delivery] = ()) -> list[Delivery]:
        """Those of these and earlier deliveries whose turn has come; with its end, one that an earlier owner ended."""
        if self._found is None:
            self._waiting += arrived
            return []
        ready, self._waiting = [*self._waiting, *arrived], []
        if not self._inherited:
            return ready
        position = self.watermark.position()
        if position is not None and position >= self._inherited.stop:
            self._inherited, self._found = range(0), {}  # all of them are done: nothing to remember
        return [self._with_end(delivery) for delivery in ready]

    def _with_end(self, delivery: Delivery) -> Delivery:
        key = delivery.request.request_id.bytes
        recorded = (self._found or {}).get(key) if delivery.offset in self._inherited else None
        if recorded is None:
            return delivery
        return replace(delivery, ended=replace(delivery.ended_by(recorded.finished), logged=recorded.framed))

    def too_much(self, bounds: Bounds) -> bool:
        """Whether to stop taking records."""
        return self.watermark.undone >= bounds.records_per_partition or len(self.watermark) >= bounds.records_ahead

    def little_enough(self, bounds: Bounds) -> bool:
        """Whether to go on: at half of each bound, so that partitions do not flutter."""
        return (
            self.watermark.undone <= bounds.records_per_partition // 2
            and len(self.watermark) <= bounds.records_ahead // 2
        )
