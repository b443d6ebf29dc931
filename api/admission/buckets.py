"""A bucket of the limiter: how many units at once, and how fast it fills again, in whole microseconds."""

from __future__ import annotations

from dataclasses import dataclass

#: What calls can take, in the order in which the limiter's script numbers it from 1.
UNITS = ("requests", "items", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One bucket: `burst` units at once, refilled at one per `interval_us` microseconds.

    `unit` is what a call takes of it: its requests, items or tokens. `model` is the one model whose calls count, None
    when all do. `name` is unique among a customer's buckets. A share of a small bucket may have a burst of 0: it holds
    nothing.
    """

    name: str
    interval_us: int
    burst: int
    unit: str = "requests"
    model: str | None = None

    @property
    def kind(self) -> str:
        """What the bucket belongs to, as told to callers: "key", "customer" or "model"."""
        return self.name.partition(":")[0]

    @property
    def label(self) -> str:
        """Its name in headers, the same for every key and customer: "key", "customer-tokens", "model-minilm-items"."""
        parts = self.name.split(":")
        if self.model is None:
            del parts[1:2]  # an id
        return "-".join(parts)

    @property
    def owner(self) -> str:
        """Whose limit it is, in words."""
        return f"the {self.kind}'s" if self.model is None else f"this customer's {self.model}"

    @property
    def window_us(self) -> int:
        """Microseconds in which an empty bucket fills."""
        return self.burst * self.interval_us

    def share(self, parts: int) -> Limit:
        """One of `parts` equal parts of the bucket, rounded down: together they never hold or fill more than it."""
        return Limit(
            name=self.name,
            interval_us=self.interval_us * parts,
            burst=self.burst // parts,
            unit=self.unit,
            model=self.model,
        )


def limit(name: str, *, requests_per_s: int, burst: int) -> Limit:
    """A bucket for a rate. The interval is rounded up, so that the rate is never exceeded by rounding."""
    return Limit(name=name, interval_us=-(-1_000_000 // requests_per_s), burst=burst)
