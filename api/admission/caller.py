"""Who calls, and what holds for the call: what it may do, how fast, how much of it at once, and for how much money."""

from __future__ import annotations

from dataclasses import dataclass

from api.admission.buckets import Limit
from api.errors import Forbidden

#: What a key may be allowed to do, and which surfaces ask for it.
OPERATIONS = ("infer", "embeddings", "models", "usage", "requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """At most `most` unfinished requests at once of what `name` says: "key:<id>" or "customer:<id>"."""

    name: str
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """The most a customer spends in a calendar month (UTC), in millionths of the currency's main unit."""

    amount_micros: int
    currency: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One key and its customer. `limits` are the key's, then the customer's; no `models` or `operations` mean all."""

    customer_id: str
    key_id: str
    limits: tuple[Limit, ...]
    concurrency: tuple[Concurrency, ...] = ()
    cap: Cap | None = None
    models: frozenset[str] = frozenset()
    operations: frozenset[str] = frozenset()

    def require(self, operation: str) -> None:
        """Raise Forbidden unless the key may do this."""
        if self.operations and operation not in self.operations:
            allowed = ", ".join(sorted(self.operations))
            raise Forbidden(f"this key may not call '{operation}', only: {allowed}", code="operation_not_allowed")

    def may_call(self, model: str) -> bool:
        """Whether the key may call this model."""
        return not self.models or model in self.models

    def require_model(self, model: str) -> None:
        """Raise Forbidden unless the key may call this model."""
        if not self.may_call(model):
            raise Forbidden(
                f"this key may not call model '{model}', only: {', '.join(sorted(self.models))}",
                code="model_not_allowed",
                param="model",
            )
