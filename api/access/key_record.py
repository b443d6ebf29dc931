"""A key and its customer as stored, kept small: what many of them have in common is one object in memory.

A hundred thousand of these are remembered at a time; the Caller of a call is made from one when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache

from api.admission.buckets import Limit
from api.admission.caller import Caller, Cap, Concurrency

#: Different terms that are shared in memory; far more than an operator thinks of.
_MOST_ALIKE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One unit per `interval_us` microseconds, `burst` at once. `is_base`: the rate that every key and customer has."""

    interval_us: int
    burst: int
    unit: str = "requests"
    model: str | None = None
    is_base: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What holds for a key or for a customer; without `models` or `operations` all of them."""

    rates: tuple[Rate, ...]
    max_concurrent: int | None = None
    models: frozenset[str] = frozenset()
    operations: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerRecord:
    """A customer as stored."""

    customer_id: str
    terms: Terms
    cap: Cap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """A key as stored, with its customer."""

    key_id: str
    customer: CustomerRecord
    terms: Terms
    secret_sha256: bytes = field(repr=False)
    expires_at: datetime | None = None
    revoked: bool = False


def rate(*, amount: int, window_s: int, burst: int, unit: str, model: str | None = None) -> Rate:
    """`amount` units per `window_s` seconds. The interval is rounded up, so that rounding never exceeds the rate."""
    return Rate(interval_us=-(-window_s * 1_000_000 // amount), burst=burst, unit=unit, model=model)


def base_rate(*, requests_per_s: int, burst: int) -> Rate:
    """The rate that every key and every customer has."""
    return Rate(interval_us=-(-1_000_000 // requests_per_s), burst=burst, is_base=True)


@lru_cache(maxsize=_MOST_ALIKE)
def alike(terms: Terms) -> Terms:
    """The first object with these terms."""
    return terms


@lru_cache(maxsize=_MOST_ALIKE)
def same_customer(customer: CustomerRecord) -> CustomerRecord:
    """The first object that says this of this customer."""
    return customer


def caller_of(key: KeyRecord) -> Caller:
    """Who calls with this key, and everything that holds for its calls."""
    customer_id = key.customer.customer_id
    own, shared = f"key:{key.key_id}", f"customer:{customer_id}"
    return Caller(
        customer_id=customer_id,
        key_id=key.key_id,
        limits=(*_limits(own, key.terms.rates), *_limits(shared, key.customer.terms.rates)),
        concurrency=tuple(
            Concurrency(name=name, most=terms.max_concurrent)
            for name, terms in ((own, key.terms), (shared, key.customer.terms))
            if terms.max_concurrent is not None
        ),
        cap=key.customer.cap,
        models=key.terms.models,
        operations=key.terms.operations,
    )


def _limits(owner: str, rates: Iterable[Rate]) -> Iterable[Limit]:
    for one in rates:
        yield Limit(
            name=_bucket(owner, one), interval_us=one.interval_us, burst=one.burst, unit=one.unit, model=one.model
        )


def _bucket(owner: str, one: Rate) -> str:
    """A name of its own among the customer's buckets: no id and no model's name holds a colon."""
    if one.model is not None:
        owner = f"model:{one.model}"
    return owner if one.is_base or (one.model is not None and one.unit == "requests") else f"{owner}:{one.unit}"
