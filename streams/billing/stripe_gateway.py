"""How Stripe is called: the few operations the reporter needs, and Stripe's many errors in our few words.

The only home of stripe. It makes one attempt per call and retries nothing: who resends what, and when, is decided by
those who wrote down beforehand what they are about to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Final, TypeVar

import aiohttp
import stripe

from infra.settings import StripeSettings
from streams.billing.pacing import Pace

T = TypeVar("T")
TIMEOUT_S: Final = 10.0
_PAGE: Final = 100
_CUSTOMER_ID, _ENVIRONMENT = "inferlog_customer_id", "inferlog_environment"
_NO_METER_CODES: Final = frozenset({"archived_meter", "no_meter"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """Stripe accepted the event; whether it counts, only the sums will say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """Stripe has an event with this identifier already: an earlier try was accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retryable:
    """No answer, or one that says "not now"; it may or may not have happened. `after_s`: what Stripe asked to wait.

    `remembered` means that Stripe keeps this failure for the idempotency key and would repeat it.
    """

    reason: str
    after_s: float = 0.0
    remembered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Stripe refuses these data and would refuse them again."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomerGone:
    """Stripe does not know the customer, or no longer."""

    reason: str


Answer = Delivered | Duplicate | Retryable | Rejected | CustomerGone
Failure = Retryable | Rejected | CustomerGone


class CallFailed(Exception):
    """A call other than sending an event failed; `answer` says how."""

    def __init__(self, answer: Failure | Duplicate) -> None:
        super().__init__(getattr(answer, "reason", "already there"))
        self.answer = answer


class StripeUnusable(Exception):
    """Nothing can be reported until a person acts: a wrong key, a missing permission, a meter that does not sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterEvent:
    """`units` is signed; `identifier` at most 100 characters; `at` lies in the hour that is billed."""

    event_name: str
    stripe_customer_id: str
    units: int
    identifier: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """`adds_up`: it sums every event by the default payload keys, which is what signed deltas need."""

    meter_id: str
    event_name: str
    is_active: bool
    adds_up: bool


class StripeGateway:
    """One account at Stripe. Every method takes a turn of `pace`, ends within the timeout, and besides what it names
    raises StripeUnusable."""

    def __init__(self, client: stripe.StripeClient, *, pace: Pace) -> None:
        self._client = client
        self._pace = pace

    async def send(self, event: MeterEvent) -> Answer:
        """Create a meter event; never raises CallFailed."""
        try:
            # The client makes a fresh idempotency key per call. On purpose: Stripe replays a stored 500 for a day to
            # whoever repeats the key, and the identifier already protects against counting twice.
            await self._call(
                self._client.v1.billing.meter_events.create_async(
                    {
                        "event_name": event.event_name,
                        "payload": {"stripe_customer_id": event.stripe_customer_id, "value": str(event.units)},
                        "identifier": event.identifier,
                        "timestamp": int(event.at.timestamp()),
                    }
                )
            )
        except CallFailed as failed:
            return failed.answer
        return Delivered()

    async def meters(self) -> list[Meter]:
        """All meters of the account. Raises CallFailed."""
        found: list[Meter] = []
        last = ""
        while True:
            page = await self._call(
                self._client.v1.billing.meters.list_async(
                    {"limit": _PAGE, "starting_after": last} if last else {"limit": _PAGE}
                )
            )
            found += [_meter(meter) for meter in page.data]
            if not page.has_more or not page.data:
                return found
            last = page.data[-1].id

    async def create_meter(self, event_name: str, *, idempotency_key: str) -> Meter:
        """A meter that sums every event. Raises CallFailed."""
        meter = await self._call(
            self._client.v1.billing.meters.create_async(
                {"event_name": event_name, "display_name": event_name, "default_aggregation": {"formula": "sum"}},
                {"idempotency_key": idempotency_key},
            )
        )
        return _meter(meter)

    async def customers(self, environment: str) -> dict[str, str]:
        """Stripe's customer id by ours, for every customer made by this installation. Raises CallFailed."""
        found: dict[str, str] = {}
        last = ""
        while True:
            page = await self._call(
                self._client.v1.customers.list_async(
                    {"limit": _PAGE, "starting_after": last} if last else {"limit": _PAGE}
                )
            )
            for customer in page.data:
                metadata: dict[str, str] = customer.metadata.to_dict() if customer.metadata else {}
                if metadata.get(_ENVIRONMENT) == environment and _CUSTOMER_ID in metadata:
                    # Newest first: should there ever be two, the older one wins, in every run.
                    found[metadata[_CUSTOMER_ID]] = customer.id
            if not page.has_more or not page.data:
                return found
            last = page.data[-1].id

    async def create_customer(self, customer_id: str, *, name: str, environment: str, idempotency_key: str) -> str:
        """Stripe's id of a new customer that carries ours in its metadata. Raises CallFailed."""
        customer = await self._call(
            self._client.v1.customers.create_async(
                {"name": name, "metadata": {_CUSTOMER_ID: customer_id, _ENVIRONMENT: environment}},
                {"idempotency_key": idempotency_key},
            )
        )
        return customer.id

    async def customer_is_gone(self, stripe_customer_id: str) -> bool:
        """True when Stripe has deleted the customer or never had it. Raises CallFailed."""
        try:
            customer = await self._call(self._client.v1.customers.retrieve_async(stripe_customer_id))
        except CallFailed as failed:
            if isinstance(failed.answer, CustomerGone):
                return True
            raise
        return bool(getattr(customer, "deleted", False))

    async def hour_sums(
        self, meter_id: str, stripe_customer_id: str, *, start: datetime, end: datetime
    ) -> dict[datetime, float]:
        """Stripe's sum by hour from `start` to before `end`, both full hours; hours without events are absent.

        Raises CallFailed.
        """
        found: dict[datetime, float] = {}
        last = ""
        while True:
            page = await self._call(
                self._client.v1.billing.meters.event_summaries.list_async(
                    meter_id,
                    {
                        "customer": stripe_customer_id,
                        "start_time": int(start.timestamp()),
                        "end_time": int(end.timestamp()),
                        "value_grouping_window": "hour",
                        "limit": _PAGE,
                        **({"starting_after": last} if last else {}),  # type: ignore[typeddict-item]
                    },
                )
            )
            for summary in page.data:
                found[datetime.fromtimestamp(summary.start_time, tz=timezone.utc)] = float(summary.aggregated_value)
            if not page.has_more or not page.data:
                return found
            last = page.data[-1].id

    async def _call(self, request: Awaitable[T]) -> T:
        try:
            await self._pace.turn()
        except BaseException:
            if asyncio.iscoroutine(request):
                request.close()
            raise
        try:
            return await request
        except stripe.StripeError as error:
            raise CallFailed(_translated(error)) from error
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            # The client wraps what goes wrong while connecting, but not while it reads the answer's body.
            raise CallFailed(Retryable(reason=f"no whole answer: {error!r}")) from error


@asynccontextmanager
async def open_gateway(settings: StripeSettings, *, pace: Pace) -> AsyncIterator[StripeGateway]:
    """A gateway whose connections are closed at the end; nothing is called by opening it."""
    # Every retry is ours to decide; and the client's own log lines repeat each call.
    logging.getLogger("stripe").setLevel(logging.WARNING)
    http = stripe.AIOHTTPClient(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
    client = stripe.StripeClient(
        settings.api_key,
        base_addresses={"api": settings.api_base} if settings.api_base else {},
        max_network_retries=0,
        http_client=http,
    )
    try:
        yield StripeGateway(client, pace=pace)
    finally:
        await http.close_async()  # type: ignore[no-untyped-call]


def _meter(meter: stripe.billing.Meter) -> Meter:
    sums_all = meter.default_aggregation.formula == "sum" and meter.event_time_window is None
    by_default_keys = (
        meter.customer_mapping.event_payload_key == "stripe_customer_id"
        and meter.value_settings.event_payload_key == "value"
    )
    return Meter(
        meter_id=meter.id,
        event_name=meter.event_name,
        is_active=meter.status == "active",
        adds_up=sums_all and by_default_keys,
    )


def _translated(error: stripe.StripeError) -> Failure | Duplicate:
    status, code, words = error.http_status, error.code or "", error.user_message or type(error).__name__
    if isinstance(error, stripe.APIConnectionError):
        # The client's text is a paragraph; the cause is in its last brackets.
        return Retryable(reason=f"no answer: {error.__cause__!r}")
    # On v1 the code has been seen empty, so the words count as well.
    if code == "duplicate_meter_event" or "already exists with identifier" in words:
        return Duplicate()
    if status is None or status in (409, 429) or status >= 500 or isinstance(error, stripe.IdempotencyError):
        remembered = (status or 0) >= 500 or isinstance(error, stripe.IdempotencyError)
        return Retryable(reason=f"{status}: {words}", after_s=_retry_after_s(error), remembered=remembered)
    if code in _NO_METER_CODES or words.startswith("No active meter"):
        # Not the event's fault; the next pass looks at the meters and says what is wrong with them.
        return Retryable(reason=words)
    if code == "meter_event_customer_not_found" or (code == "resource_missing" and "No such customer" in words):
        return CustomerGone(reason=words)
    if status == 400 or code == "resource_missing":
        return Rejected(code=code or "invalid_request", reason=words)
    raise StripeUnusable(f"Stripe answered {status}: {words}") from error


def _retry_after_s(error: stripe.StripeError) -> float:
    value = {name.lower(): text for name, text in (error.headers or {}).items()}.get("retry-after", "")
    return float(value) if value.isdigit() else 0.0
