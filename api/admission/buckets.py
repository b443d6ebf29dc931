"""A bucket of the limiter: how many units at once, and how fast it fills again, in whole microseconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One bucket: `burst` units at once, refilled at one per `interval_us` microseconds.

    `unit` is what a call takes of it: its requests, items or tokens. `model` is the one model whose calls count, None
    when all do. `name` is unique among a customer's buckets.
    """

    name: str
    interval_us: int
    burst: int
    unit: str = "requests"
    model: str | None = None

    @property
    def kind(self) -> str:
        """What the bucket belongs to, as told to callers: "key" or "customer"."""
        return self.name.partition(":")[0]

    @property
    def window_s(self) -> int:
        """Seconds in which an empty bucket fills, rounded up."""
        return -(-self.burst * self.interval_us // 1_000_000)


def limit(name: str, *, requests_per_s: int, burst: int) -> Limit:
    """A bucket for a rate. The interval is rounded up, so that the rate is never exceeded by rounding."""
    return Limit(name=name, interval_us=-(-1_000_000 // requests_per_s), burst=burst)
