"""A call that Stripe would turn down, as an exception that carries the whole answer.

Keeping status, code and retry advice in one value lets the rules raise without knowing about HTTP.
"""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    """One error answer in Stripe's shape.

    `executed` says whether the endpoint had begun its work: only then does a v1 idempotency key remember the
    answer. `should_retry` becomes the `Stripe-Should-Retry` header; None leaves the header out.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        executed: bool = False,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.executed = executed
        self.should_retry = should_retry

    def body(self) -> dict[str, Any]:
        """The JSON object to answer with; absent fields are left out, as Stripe does."""
        error = {"message": self.message, "type": self.kind, "code": self.code, "param": self.param}
        return {"error": {name: value for name, value in error.items() if value is not None}}


def missing(param: str) -> Refusal:
    """A required parameter was not sent."""
    return Refusal(f"Missing required param: {param}.", code="parameter_missing", param=param)


def no_such(thing: str, name: str, *, param: str = "id", status: int = 404) -> Refusal:
    """An id that names nothing: 404 in a path, 400 in a parameter."""
    return Refusal(f"No such {thing}: '{name}'", status=status, code="resource_missing", param=param)


def duplicate_event(identifier: str) -> Refusal:
    """The identifier was used within the last day.

    There is no `code` on purpose: v1 has been seen to leave it empty, so callers must know it by its words.
    """
    message = f"An event already exists with identifier {identifier}."
    return Refusal(message, executed=True, should_retry=False)


def busy(customer: str, event_name: str) -> Refusal:
    """A second call for one customer and meter while the first is still running."""
    message = (
        f"Another meter event for customer '{customer}' and event name '{event_name}' is being created; "
        "send one at a time per customer and meter."
    )
    return Refusal(message, status=429, code="lock_timeout", should_retry=True)
