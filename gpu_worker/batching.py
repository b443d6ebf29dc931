"""Which requests run together, and when. Pure: time comes in as a number, and nothing here waits.

Requests wait in lanes: one per version, and within a version one per shape of tensors or per band of text lengths, so
that a batch never mixes versions and never pads a short text to a long one.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from schemas.records import InferenceRequested, Task

T = TypeVar("T")

#: What one padded token weighs beside a tensor's bytes: inside the model a token is a vector of some 500 floats.
TOKEN_COST_BYTES = 2048
_TEXT_BYTES_PER_TOKEN = 4
_SHORTEST_BAND_TOKENS = 16
_LONGEST_BAND_TOKENS = 512


class Closed(str, Enum):
    """Why a batch stopped waiting for more."""

    FULL = "full"
    COST = "cost"
    LINGER = "linger"
    IDLE = "idle"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one batch.

    `max_cost_bytes` counts padded input. `linger_s` is counted from the arrival of the batch's first request and is
    zero when that one met an idle device. `deadline_margin_s` before a waiting deadline the batch goes as it is.
    """

    max_items: int = 64
    max_cost_bytes: int = 16 * 1024 * 1024
    linger_s: float = 0.005
    deadline_margin_s: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Generic[T]):
    """One request in line. `cost_bytes` is that of all its items, padded; `lane` is equal for what may run together."""

    what: T
    version: str
    lane: Hashable
    items: int
    cost_bytes: int
    arrived_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Generic[T]):
    """Requests of one lane, in order of arrival."""

    version: str
    members: tuple[T, ...]
    items: int
    cost_bytes: int
    closed: Closed


def waiting(what: T, request: InferenceRequested, *, arrived_s: float) -> Waiting[T]:
    """A request with its lane and cost. Text length is guessed from bytes; the exact one needs the tokenizer."""
    if request.task is Task.EMBEDDINGS:
        longest_bytes = max((len(e) for t in request.inputs for e in t.elements()), default=0)
        band = band_tokens(longest_bytes)
        lane: Hashable = band
        cost = band * TOKEN_COST_BYTES * request.item_count
    else:
        lane = tuple((t.name, t.datatype, t.shape[1:]) for t in request.inputs)
        cost = sum(len(t.data) for t in request.inputs)
    return Waiting(
        what=what,
        version=request.version,
        lane=lane,
        items=request.item_count,
        cost_bytes=cost,
        arrived_s=arrived_s,
        deadline_s=request.deadline_at.timestamp(),
    )


def band_tokens(size_bytes: int) -> int:
    """Upper end, in tokens, of the length band of a text of this many bytes: a power of two from 16 to 512."""
    tokens = size_bytes // _TEXT_BYTES_PER_TOKEN + 2
    return min(max(_SHORTEST_BAND_TOKENS, 1 << (tokens - 1).bit_length()), _LONGEST_BAND_TOKENS)


class _Lane(Generic[T]):
    """Requests that may run together, in order of arrival; `patient` when the first found the device busy."""

    __slots__ = ("cost_bytes", "items", "line", "patient", "soonest_s")

    def __init__(self, *, patient: bool) -> None:
        self.line: OrderedDict[int, Waiting[T]] = OrderedDict()
        self.items = 0
        self.cost_bytes = 0
        self.soonest_s = math.inf  # no later than the soonest deadline in line
        self.patient = patient

    def first(self) -> Waiting[T]:
        return next(iter(self.line.values()))


class Batcher(Generic[T]):
    """Everything that waits. Not thread-safe; every method returns at once."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lanes: dict[tuple[str, Hashable], _Lane[T]] = {}
        self._by_deadline: list[tuple[float, int, tuple[str, Hashable]]] = []
        self._versions: Counter[str] = Counter()
        self._tickets = 0

    def __len__(self) -> int:
        return self._versions.total()

    def add(self, one: Waiting[T], *, idle: bool) -> None:
        """Put a request in line; `idle` says whether the device has nothing to do at this moment."""
        key = (one.version, one.lane)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(patient=not idle)
        self._tickets += 1
        lane.line[self._tickets] = one
        lane.items += one.items
        lane.cost_bytes += one.cost_bytes
        lane.soonest_s = min(lane.soonest_s, one.deadline_s)
        self._versions[one.version] += 1
        heapq.heappush(self._by_deadline, (one.deadline_s, self._tickets, key))

    def versions(self) -> list[str]:
        """Versions that something waits for."""
        return list(self._versions)

    def expired(self, now_s: float) -> list[T]:
        """Take out what must no longer be started."""
        found = []
        while self._by_deadline and self._by_deadline[0][0] <= now_s:
            _, ticket, key = heapq.heappop(self._by_deadline)
            lane = self._lanes.get(key)
            if lane is not None and ticket in lane.line:
                found.append(self._remove(key, lane, ticket).what)
        return found

    def drop(self, version: str) -> list[T]:
        """Take out everything that waits for a version."""
        found: list[T] = []
        for key in [k for k in self._lanes if k[0] == version]:
            lane = self._lanes[key]
            found += [self._remove(key, lane, ticket).what for ticket in list(lane.line)]
        return found

    def take(self, now_s: float, *, ready: Callable[[str], bool]) -> Batch[T] | None:
        """The batch that closes now, of the lane whose first request has waited longest; None when none does.

        Lanes of versions that are not `ready` are passed over. Call `expired` first: nothing is checked here.
        """
        for lane_key, lane in self._longest_waiting(ready):
            closed = self._closes(lane, now_s)
            if closed is not None:
                return self._cut(lane_key, lane, closed)
        return None

    def next_at_s(self, *, ready: Callable[[str], bool]) -> float | None:
        """When `take` or `expired` will next have something, if nothing arrives before; None: never."""
        times = [self._due_s(lane)[0] for _, lane in self._longest_waiting(ready)]
        while self._by_deadline and not self._is_waiting(*self._by_deadline[0][1:]):
            heapq.heappop(self._by_deadline)
        if self._by_deadline:
            times.append(self._by_deadline[0][0])
        return min(times, default=None)

    def _is_waiting(self, ticket: int, key: tuple[str, Hashable]) -> bool:
        lane = self._lanes.get(key)
        return lane is not None and ticket in lane.line

    def _longest_waiting(self, ready: Callable[[str], bool]) -> Iterator[tuple[tuple[str, Hashable], _Lane[T]]]:
        known = {version: ready(version) for version in self._versions}
        lanes = [(key, lane) for key, lane in self._lanes.items() if known[key[0]]]
        return iter(sorted(lanes, key=lambda entry: entry[1].first().arrived_s))

    def _closes(self, lane: _Lane[T], now_s: float) -> Closed | None:
        if lane.items >= self._limits.max_items:
            return Closed.FULL
        if lane.cost_bytes >= self._limits.max_cost_bytes:
            return Closed.COST
        due_s, why = self._due_s(lane)
        return why if due_s <= now_s else None

    def _due_s(self, lane: _Lane[T]) -> tuple[float, Closed]:
        first = lane.first()
        if not lane.patient:
            return first.arrived_s, Closed.IDLE
        linger_s = first.arrived_s + self._limits.linger_s
        deadline_s = lane.soonest_s - self._limits.deadline_margin_s
        return (linger_s, Closed.LINGER) if linger_s <= deadline_s else (deadline_s, Closed.DEADLINE)

    def _cut(self, key: tuple[str, Hashable], lane: _Lane[T], closed: Closed) -> Batch[T]:
        """The front of the lane, as much as the limits allow; a request over the limits goes alone."""
        tickets: list[int] = []
        items = cost = 0
        for ticket, one in lane.line.items():
            if tickets and items + one.items > self._limits.max_items:
                closed = Closed.FULL
                break
            if tickets and cost + one.cost_bytes > self._limits.max_cost_bytes:
                closed = Closed.COST
                break
            tickets.append(ticket)
            items += one.items
            cost += one.cost_bytes
        taken = [self._remove(key, lane, ticket) for ticket in tickets]
        # Whatever stays behind has met a busy device.
        lane.patient = True
        if min(one.deadline_s for one in taken) <= lane.soonest_s:
            lane.soonest_s = min((one.deadline_s for one in lane.line.values()), default=math.inf)
        members = tuple(one.what for one in taken)
        return Batch(version=key[0], members=members, items=items, cost_bytes=cost, closed=closed)

    def _remove(self, key: tuple[str, Hashable], lane: _Lane[T], ticket: int) -> Waiting[T]:
        one = lane.line.pop(ticket)
        lane.items -= one.items
        lane.cost_bytes -= one.cost_bytes
        self._versions[one.version] -= 1
        if not self._versions[one.version]:
            del self._versions[one.version]
        if not lane.line:
            del self._lanes[key]
        return one
