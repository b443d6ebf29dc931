"""Latencies as every benchmark prints them."""

from __future__ import annotations

from collections.abc import Sequence


def percentiles_ms(latencies_s: Sequence[float], *, digits: int | None = None) -> dict[str, float]:
    """p50, p95, p99 and the longest, in milliseconds with so many digits, of at least one latency in seconds."""
    ordered = sorted(latencies_s)
    at = {p: ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 95, 99)}
    told = {**{f"p{p}_ms": s for p, s in at.items()}, "max_ms": ordered[-1]}
    return {name: round(1000 * s, digits) for name, s in told.items()}
