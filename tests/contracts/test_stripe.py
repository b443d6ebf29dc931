"""What inferlog relies on Stripe for, asked through the official client.

Written once against "a Stripe": the stand-in always, and a real sandbox too when INFERLOG_TEST_STRIPE_KEY holds its
key (sk_test_…).
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import stripe

from tests.contracts.stripe_desk import HOUR_S, Desk, connect, local_desk

SANDBOX_KEY = os.environ.get("INFERLOG_TEST_STRIPE_KEY", "")
if SANDBOX_KEY and not SANDBOX_KEY.startswith("sk_test_"):
    raise pytest.UsageError("INFERLOG_TEST_STRIPE_KEY must be a sandbox key, sk_test_…")
SIDES = ["standin", "sandbox"] if SANDBOX_KEY else ["standin"]


@pytest.fixture(params=SIDES)
async def desk(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Desk]:
    if request.param == "sandbox":
        client, transport = connect(SANDBOX_KEY, None)
        sandbox = Desk(client, None, "sandbox")
        await sandbox.open()
        yield sandbox
        await sandbox.close()
        await transport.close_async()
        return
    async with local_desk(tmp_path) as local:
        yield local


def this_hour_s() -> int:
    return int(time.time()) // HOUR_S * HOUR_S


async def test_a_customer_keeps_its_metadata(desk: Desk) -> None:
    email = f"{uuid.uuid4().hex}@example.com"
    made = await desk.client.v1.customers.create_async({"email": email, "metadata": {"customer_id": "c-1"}})
    read = await desk.client.v1.customers.retrieve_async(made.id)
    assert (read.email, read.metadata and read.metadata["customer_id"]) == (email, "c-1")
    listed = await desk.client.v1.customers.list_async({"email": email})
    assert [one.id for one in listed.data] == [made.id]
    await desk.client.v1.customers.delete_async(made.id)
    assert (await desk.client.v1.customers.retrieve_async(made.id)).deleted is True


async def test_an_idempotency_key_makes_one_customer(desk: Desk) -> None:
    options: Any = {"idempotency_key": uuid.uuid4().hex}
    first = await desk.client.v1.customers.create_async({"name": "Once"}, options)
    second = await desk.client.v1.customers.create_async({"name": "Once"}, options)
    assert first.id == second.id
    with pytest.raises(stripe.IdempotencyError):
        await desk.client.v1.customers.create_async({"name": "Other"}, options)
    await desk.client.v1.customers.delete_async(first.id)


async def test_events_are_summed_by_utc_hour(desk: Desk) -> None:
    start_s = this_hour_s() - 4 * HOUR_S
    await desk.send(10, uuid.uuid4().hex, start_s)
    await desk.send(5, uuid.uuid4().hex, start_s + HOUR_S - 1)
    await desk.send(7, uuid.uuid4().hex, start_s + HOUR_S)
    await desk.send(-3, uuid.uuid4().hex, start_s + HOUR_S + 1_800)
    await desk.settles_at({start_s: 15.0, start_s + HOUR_S: 4.0}, start_s, 4)


async def test_summaries_come_in_pages(desk: Desk) -> None:
    start_s = this_hour_s() - 6 * HOUR_S
    expected = {start_s + hour * HOUR_S: float(hour + 1) for hour in range(5)}
    for hour_s, value in expected.items():
        await desk.send(int(value), uuid.uuid4().hex, hour_s + 1_800)
    await desk.settles_at(expected, start_s, 5)
    assert await desk.hours(start_s, 5, limit=2) == expected


async def test_a_repeated_identifier_is_an_error_by_its_words_and_counts_once(desk: Desk) -> None:
    start_s, identifier = this_hour_s() - 2 * HOUR_S, uuid.uuid4().hex
    sent = await desk.send(10, identifier, start_s + 60)
    assert (sent.identifier, sent.timestamp) == (identifier, start_s + 60)
    with pytest.raises(stripe.InvalidRequestError, match=f"already exists with identifier {identifier}") as refusal:
        await desk.send(10, identifier, start_s + 60)
    assert refusal.value.http_status == 400
    assert refusal.value.headers is not None
    assert refusal.value.headers["stripe-should-retry"] == "false"
    await desk.settles_at({start_s: 10.0}, start_s, 1)


@pytest.mark.parametrize(
    "bad",
    [
        {"timestamp_s": int(time.time()) - 36 * 86_400},
        {"timestamp_s": int(time.time()) + 1_200},
        {"value": "1" * 16},
        {"event_name": "no_meter_has_this_name"},
        {"payload": {"value": "1"}},
        {"identifier": "x" * 101},
    ],
    ids=["too old", "in the future", "16 digits", "no such meter", "no customer", "long identifier"],
)
async def test_an_event_that_cannot_count_is_refused_at_once(desk: Desk, bad: dict[str, Any]) -> None:
    with pytest.raises(stripe.InvalidRequestError) as refusal:
        await desk.send(**{"value": 1, "identifier": uuid.uuid4().hex, **bad})
    assert refusal.value.http_status == 400


async def test_an_event_for_an_unknown_customer_is_accepted(desk: Desk) -> None:
    payload = {"stripe_customer_id": "cus_nobody", "value": "1"}
    assert (await desk.send(1, uuid.uuid4().hex, payload=payload)).object == "billing.meter_event"


async def test_a_cancelled_event_stops_counting(desk: Desk) -> None:
    start_s, wrong = this_hour_s() - 2 * HOUR_S, uuid.uuid4().hex
    await desk.send(10, wrong, start_s)
    await desk.send(4, uuid.uuid4().hex, start_s)
    await desk.settles_at({start_s: 14.0}, start_s, 1)
    adjustment = await desk.client.v1.billing.meter_event_adjustments.create_async(
        {"event_name": desk.event_name, "type": "cancel", "cancel": {"identifier": wrong}}
    )
    assert adjustment.status in ("pending", "complete")
    await desk.settles_at({start_s: 4.0}, start_s, 1)


async def test_v2_events_count_on_the_same_meter(desk: Desk) -> None:
    start_s, identifier = this_hour_s() - 2 * HOUR_S, uuid.uuid4().hex
    moment = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(start_s + 60))
    params: Any = {
        "event_name": desk.event_name,
        "identifier": identifier,
        "timestamp": moment,
        "payload": {"stripe_customer_id": desk.customer, "value": "6"},
    }
    sent = await desk.client.v2.billing.meter_events.create_async(params)
    assert (sent.object, sent.identifier) == ("v2.billing.meter_event", identifier)
    with pytest.raises(stripe.StripeError) as refusal:
        await desk.client.v2.billing.meter_events.create_async(params)
    assert (refusal.value.http_status, refusal.value.code) == (400, "duplicate_meter_event")
    await desk.settles_at({start_s: 6.0}, start_s, 1)


async def test_a_meter_is_found_by_status_and_takes_nothing_once_shut(desk: Desk) -> None:
    active = await desk.client.v1.billing.meters.list_async({"status": "active", "limit": 100})
    assert desk.meter in [one.id async for one in active.auto_paging_iter()]
    with pytest.raises(stripe.InvalidRequestError):
        await desk.new_meter(desk.event_name)
    shut = await desk.client.v1.billing.meters.deactivate_async(desk.meter)
    assert shut.status == "inactive"
    with pytest.raises(stripe.InvalidRequestError):
        await desk.send(1, uuid.uuid4().hex)


async def test_unknown_ids_are_not_found(desk: Desk) -> None:
    for call in (
        desk.client.v1.customers.retrieve_async("cus_nobody"),
        desk.client.v1.billing.meters.retrieve_async("mtr_nothing"),
    ):
        with pytest.raises(stripe.InvalidRequestError) as refusal:
            await call
        assert (refusal.value.http_status, refusal.value.code) == (404, "resource_missing")


async def test_a_wrong_key_is_refused(desk: Desk) -> None:
    client, transport = connect("sk_test_wrong_0123456789abcdef", desk.base)
    with pytest.raises(stripe.AuthenticationError, match="Invalid API Key"):
        await client.v1.customers.list_async()
    await transport.close_async()
