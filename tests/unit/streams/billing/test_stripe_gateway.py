"""Stripe's errors in our words: what is delivered, what waits, what is refused, what stops everything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import stripe

from streams.billing.pacing import Pace
from streams.billing.stripe_gateway import (
    Answer,
    CustomerGone,
    Delivered,
    Duplicate,
    MeterEvent,
    Rejected,
    Retryable,
    StripeGateway,
    StripeUnusable,
)

EVENT = MeterEvent(
    event_name="inferlog_test_items",
    stripe_customer_id="cus_1",
    units=-7,
    identifier="ilr_1",
    at=datetime(2026, 3, 1, 12, 30, tzinfo=timezone.utc),
)


def gateway(create: Callable[..., Awaitable[Any]]) -> StripeGateway:
    events = SimpleNamespace(create_async=create)
    client: Any = SimpleNamespace(v1=SimpleNamespace(billing=SimpleNamespace(meter_events=events)))
    return StripeGateway(client, pace=Pace(calls_per_s=1e9, monotonic=lambda: 0.0, sleep=asyncio.sleep))


async def answer_to(error: Exception | None) -> Answer:
    async def create(*_: object) -> None:
        if error is not None:
            raise error

    return await gateway(create).send(EVENT)


def refused(message: str, *, status: int = 400, code: str | None = None, **headers: str) -> Exception:
    kind = stripe.InvalidRequestError
    return kind(message, None, code, http_status=status, headers=headers)


async def test_what_goes_out() -> None:
    sent: list[Any] = []

    async def create(*args: Any) -> None:
        sent.append(args)

    assert isinstance(await gateway(create).send(EVENT), Delivered)
    # One argument only: an idempotency key of ours would make Stripe repeat a stored 500 for a day.
    assert sent == [
        (
            {
                "event_name": "inferlog_test_items",
                "payload": {"stripe_customer_id": "cus_1", "value": "-7"},
                "identifier": "ilr_1",
                "timestamp": 1772368200,
            },
        )
    ]


@pytest.mark.parametrize(
    "error",
    [
        refused("An event already exists with identifier ilr_1."),
        refused("whatever the words", code="duplicate_meter_event"),
    ],
)
async def test_a_duplicate_is_known_by_code_or_words(error: Exception) -> None:
    assert isinstance(await answer_to(error), Duplicate)


@pytest.mark.parametrize(
    "error",
    [
        stripe.RateLimitError("slow down", http_status=429),
        stripe.RateLimitError("busy", http_status=429, code="lock_timeout"),
        refused("conflict", status=409),
        stripe.APIError("broken", http_status=500),
        stripe.APIError("not JSON at all", http_status=502),
        stripe.APIConnectionError("reset"),
        aiohttp.ClientPayloadError("cut off"),
        asyncio.TimeoutError(),
        ConnectionResetError(),
        refused('No active meter found for event name "x".'),
        refused("archived", code="archived_meter"),
    ],
)
async def test_what_may_work_later_waits_and_is_never_called_refused(error: Exception) -> None:
    assert isinstance(await answer_to(error), Retryable)


async def test_the_wait_that_stripe_asks_for_is_kept() -> None:
    answer = await answer_to(stripe.RateLimitError("slow", http_status=429, headers={"Retry-After": "7"}))
    assert isinstance(answer, Retryable)
    assert answer.after_s == 7


async def test_bad_data_are_refused_with_the_reason() -> None:
    answer = await answer_to(refused("at most 15 digits", code="meter_event_value_too_many_digits"))
    assert answer == Rejected(code="meter_event_value_too_many_digits", reason="at most 15 digits")


@pytest.mark.parametrize(
    "error",
    [
        refused("no", code="meter_event_customer_not_found"),
        refused("No such customer: 'cus_1'", status=404, code="resource_missing"),
    ],
)
async def test_an_unknown_customer_is_its_own_case(error: Exception) -> None:
    assert isinstance(await answer_to(error), CustomerGone)


@pytest.mark.parametrize(
    "error",
    [
        stripe.AuthenticationError("wrong key", http_status=401),
        stripe.PermissionError("not yours", http_status=403),
        refused("Unrecognized request URL", status=404),
    ],
)
async def test_what_no_retry_heals_and_no_event_caused_stops_the_sender(error: Exception) -> None:
    with pytest.raises(StripeUnusable):
        await answer_to(error)


async def test_bugs_are_not_mistaken_for_answers() -> None:
    with pytest.raises(ZeroDivisionError):
        await answer_to(ZeroDivisionError())
