"""Failures to order: a test says what shall go wrong with the next calls, and the server asks here before each.

Only calls to Stripe's own paths are hit; the stand-in's control paths always work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

KINDS = ("drop_request", "drop_answer", "apply_late", "outage", "status", "hold")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One ordered failure.

    drop_request: the connection closes and nothing happened. drop_answer: it happened, then the connection closes.
    apply_late: the connection closes and it happens `delay_s` later on the stand-in's clock. outage: as drop_request,
    for every call. status: answers `status`; with `applied` it happened all the same. hold: the call stays inside,
    keeping its customer and meter busy, until released.

    `left` counts the calls still to hit (None: no end), `until_s` ends it on the stand-in's clock, and only paths that
    start with `path` and that carry `method` (empty: any) are hit.
    """

    kind: str
    left: int | None
    until_s: float | None
    path: str
    method: str
    status: int
    applied: bool
    delay_s: float


def parse_fault(order: Mapping[str, Any], *, now_s: float) -> Fault:
    """The fault that a control call describes; raises ValueError naming the field that does not fit."""
    unknown = set(order) - {"kind", "count", "duration_s", "path", "method", "status", "applied", "delay_s"}
    if unknown:
        raise ValueError(f"unknown field {sorted(unknown)[0]!r}")
    kind = order.get("kind")
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    duration_s = _seconds(order, "duration_s")
    endless = kind == "outage" or duration_s is not None
    count = order.get("count", None if endless else 1)
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise ValueError(f"count: expected a positive integer or null, got {count!r}")
    status = order.get("status", 500)
    if not isinstance(status, int) or not 400 <= status <= 599:
        raise ValueError(f"status: expected 400 to 599, got {status!r}")
    path, method = order.get("path", "/"), order.get("method", "")
    if not all(isinstance(value, str) for value in (path, method)):
        raise ValueError("path, method: expected strings")
    applied = order.get("applied", False)
    if applied is not True and applied is not False:
        raise ValueError(f"applied: expected true or false, got {applied!r}")
    return Fault(
        kind=kind,
        left=count,
        until_s=None if duration_s is None else now_s + duration_s,
        path=path,
        method=method.upper(),
        status=status,
        applied=applied,
        delay_s=_seconds(order, "delay_s") or 0.0,
    )


def _seconds(order: Mapping[str, Any], field: str) -> float | None:
    value = order.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{field}: expected seconds, 0 or more, got {value!r}")
    return float(value)


class FaultPlan:
    """The faults in force, oldest first; each call takes at most one."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Put a fault behind those already ordered."""
        self._faults.append(fault)

    def clear(self) -> None:
        """Everything works again from the next call on."""
        self._faults.clear()

    def take(self, method: str, path: str, *, now_s: float) -> Fault | None:
        """The fault that hits this call, used up by one; None lets the call through."""
        self._faults = [fault for fault in self._faults if fault.until_s is None or now_s < fault.until_s]
        for place, fault in enumerate(self._faults):
            if not path.startswith(fault.path) or fault.method not in ("", method):
                continue
            if fault.left == 1:
                del self._faults[place]
            elif fault.left is not None:
                self._faults[place] = replace(fault, left=fault.left - 1)
            return fault
        return None

    def described(self) -> list[dict[str, Any]]:
        """The faults in force as JSON values."""
        return [asdict(fault) for fault in self._faults]
