"""What inferlog relies on Stripe for, asked through the official client.

The first half is written against "a Stripe": the stand-in always, and a real sandbox too when INFERLOG_TEST_STRIPE_KEY
holds its key (sk_test_…). The second half is about failures that only the stand-in can be told to have.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import stripe
from aiohttp.test_utils import TestServer

from infra.stripe_standin.account import Account
from infra.stripe_standin.control import create_app
from infra.stripe_standin.server import Standin

STANDIN_KEY = "sk_test_standin_0123456789abcdef"
SANDBOX_KEY = os.environ.get("INFERLOG_TEST_STRIPE_KEY", "")
if SANDBOX_KEY and not SANDBOX_KEY.startswith("sk_test_"):
    raise pytest.UsageError("INFERLOG_TEST_STRIPE_KEY must be a sandbox key, sk_test_…")
SIDES = ["standin", "sandbox"] if SANDBOX_KEY else ["standin"]
HOUR_S = 3_600
PATIENCE_S = {"standin": 5.0, "sandbox": 180.0}


def connect(key: str, base: str | None) -> tuple[stripe.StripeClient, stripe.AIOHTTPClient]:
    transport = stripe.AIOHTTPClient(timeout=20)
    if base is None:
        return stripe.StripeClient(key, http_client=transport), transport
    addresses: Any = {"api": base, "meter_events": base}
    return stripe.StripeClient(key, http_client=transport, base_addresses=addresses), transport


class Desk:
    """One customer and one meter at some Stripe, and the calls that the tests make."""

    def __init__(self, client: stripe.StripeClient, base: str | None, side: str) -> None:
        self.client, self.base, self.side = client, base, side
        self.event_name = f"probe_{uuid.uuid4().hex}"
        self.customer = self.meter = ""

    async def open(self) -> None:
        self.customer = (await self.client.v1.customers.create_async({"name": "Probe"})).id
        self.meter = await self.new_meter(self.event_name)

    async def close(self) -> None:
        await self.client.v1.customers.delete_async(self.customer)
        if (await self.client.v1.billing.meters.retrieve_async(self.meter)).status == "active":
            await self.client.v1.billing.meters.deactivate_async(self.meter)

    async def new_meter(self, event_name: str) -> str:
        meter = await self.client.v1.billing.meters.create_async(
            {"display_name": "Probe", "event_name": event_name, "default_aggregation": {"formula": "sum"}}
        )
        return meter.id

    async def send(self, value: object, identifier: str, timestamp_s: int | None = None, **more: Any) -> Any:
        payload = more.pop("payload", {"stripe_customer_id": self.customer, "value": str(value)})
        params: Any = {"event_name": self.event_name, "identifier": identifier, "payload": payload, **more}
        if timestamp_s is not None:
            params["timestamp"] = timestamp_s
        return await self.client.v1.billing.meter_events.create_async(params)

    async def hours(self, start_s: int, count: int, limit: int = 100) -> dict[int, float]:
        params: Any = {
            "customer": self.customer,
            "start_time": start_s,
            "end_time": start_s + count * HOUR_S,
            "value_grouping_window": "hour",
            "limit": limit,
        }
        found = await self.client.v1.billing.meters.event_summaries.list_async(self.meter, params)
        return {one.start_time: one.aggregated_value async for one in found.auto_paging_iter() if one.aggregated_value}

    async def settles_at(self, expected: dict[int, float], start_s: int, count: int) -> None:
        """Wait until the sums are as expected: counting is asynchronous at Stripe."""
        deadline_s = time.monotonic() + PATIENCE_S[self.side]
        while (seen := await self.hours(start_s, count)) != expected and time.monotonic() < deadline_s:
            await asyncio.sleep(0.01 if self.side == "standin" else 2)
        assert seen == expected

    async def control(self, path: str, order: dict[str, Any] | None = None, method: str = "POST") -> Any:
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.request(method, f"{self.base}/_standin/{path}", json=order) as response,
        ):
            return await response.json()

    async def totals(self) -> float:
        """The customer's counted sum, from the stand-in's own view."""
        state = await self.control("state", method="GET")
        total: float = state["totals"].get(self.event_name, {}).get(self.customer, 0)
        return total


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


@pytest.fixture
async def standin(tmp_path: Path) -> AsyncIterator[Desk]:
    async with local_desk(tmp_path) as local:
        yield local


@asynccontextmanager
async def local_desk(state_dir: Path) -> AsyncIterator[Desk]:
    async with TestServer(create_app(Standin(Account(state_dir), api_key=STANDIN_KEY))) as server:
        base = str(server.make_url("")).rstrip("/")
        client, transport = connect(STANDIN_KEY, base)
        local = Desk(client, base, "standin")
        await local.open()
        yield local
        await transport.close_async()


def this_hour_s() -> int:
    return int(time.time()) // HOUR_S * HOUR_S


# -- any Stripe ----------------------------------------------------------------------------------------------------


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
    assert refusal.value.http_status == 400
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


# -- the stand-in: time, memory, failures ----------------------------------------------------------------------------


async def test_after_a_day_an_identifier_counts_again(standin: Desk) -> None:
    await standin.send(3, "once")
    await standin.control("clock", {"advance_s": 24 * HOUR_S + 1})
    await standin.send(3, "once")
    assert await standin.totals() == 6


async def test_events_count_after_the_lag_on_the_settable_clock(standin: Desk) -> None:
    await standin.control("clock", {"advance_s": 0, "frozen": True})
    await standin.control("settings", {"lag_s": 600})
    await standin.send(3, "slow")
    assert await standin.totals() == 0
    await standin.control("clock", {"advance_s": 600})
    assert await standin.totals() == 3


async def test_an_async_error_names_the_request_not_the_event(standin: Desk) -> None:
    options: Any = {"idempotency_key": "request-1"}
    params: Any = {
        "event_name": standin.event_name,
        "identifier": "lost",
        "payload": {"stripe_customer_id": "cus_nobody", "value": "1"},
    }
    await standin.client.v1.billing.meter_events.create_async(params, options)
    state = await standin.control("state", method="GET")
    assert state["async_errors"] == [
        {"code": "meter_event_customer_not_found", "identifier": "lost", "request_key": "request-1"}
    ]


@pytest.mark.parametrize(("kind", "applied"), [("drop_request", False), ("drop_answer", True)])
async def test_a_dropped_connection_may_or_may_not_have_counted(standin: Desk, kind: str, applied: bool) -> None:
    await standin.control("faults", {"kind": kind})
    with pytest.raises(stripe.APIConnectionError):
        await standin.send(3, "lost")
    assert await standin.totals() == (3 if applied else 0)
    if applied:
        with pytest.raises(stripe.InvalidRequestError, match="already exists"):
            await standin.send(3, "lost")
    else:
        await standin.send(3, "lost")
    assert await standin.totals() == 3


async def test_a_late_request_is_applied_after_newer_ones(standin: Desk) -> None:
    await standin.control("faults", {"kind": "apply_late", "delay_s": 3_600})
    with pytest.raises(stripe.APIConnectionError):
        await standin.send(3, "late")
    await standin.send(4, "newer")
    assert await standin.totals() == 4
    await standin.control("clock", {"advance_s": 3_600})
    assert await standin.totals() == 7
    state = await standin.control("state", method="GET")
    assert [event["identifier"] for event in state["events"]] == ["newer", "late"]


async def test_an_outage_ends_when_told_to(standin: Desk) -> None:
    await standin.control("faults", {"kind": "outage"})
    for _ in range(3):
        with pytest.raises(stripe.APIConnectionError):
            await standin.send(3, "waiting")
    await standin.control("faults", method="DELETE")
    await standin.send(3, "waiting")
    assert await standin.totals() == 3


async def test_a_server_error_is_remembered_for_its_key_but_not_for_the_identifier(standin: Desk) -> None:
    await standin.control("faults", {"kind": "status", "status": 500})
    options: Any = {"idempotency_key": "attempt-1"}
    params: Any = {
        "event_name": standin.event_name,
        "identifier": "once",
        "payload": {"stripe_customer_id": standin.customer, "value": "3"},
    }
    for _ in range(2):
        with pytest.raises(stripe.APIError):
            await standin.client.v1.billing.meter_events.create_async(params, options)
    await standin.send(3, "once")
    assert await standin.totals() == 3


async def test_an_ordered_429_says_why(standin: Desk) -> None:
    await standin.control("faults", {"kind": "status", "status": 429, "count": 2})
    for _ in range(2):
        with pytest.raises(stripe.RateLimitError) as refusal:
            await standin.send(3, "paced")
        assert refusal.value.headers is not None
        assert refusal.value.headers["stripe-rate-limited-reason"] == "global-rate"
    await standin.send(3, "paced")


async def test_one_call_at_a_time_for_a_customer_and_meter(standin: Desk) -> None:
    other = (await standin.client.v1.customers.create_async({"name": "Other"})).id
    await standin.control("faults", {"kind": "hold"})
    first = asyncio.create_task(standin.send(1, "first"))
    deadline_s = time.monotonic() + 10
    while (await standin.control("state", method="GET"))["held"] == 0:
        assert time.monotonic() < deadline_s, "the first call never arrived"
    with pytest.raises(stripe.RateLimitError) as refusal:
        await standin.send(2, "second")
    assert (refusal.value.http_status, refusal.value.code) == (429, "lock_timeout")
    await standin.send(4, "other customer", payload={"stripe_customer_id": other, "value": "4"})
    await standin.control("faults/release")
    await first
    await standin.send(2, "second")
    assert await standin.totals() == 3


async def test_a_control_order_that_does_not_fit_is_refused(standin: Desk) -> None:
    for path, order in (("faults", {"kind": "explode"}), ("clock", {"now": 1}), ("settings", {"lag_s": -1})):
        with pytest.raises(aiohttp.ClientResponseError) as refusal:
            await standin.control(path, order)
        assert refusal.value.status == 400


async def start_process(state_dir: Path) -> tuple[asyncio.subprocess.Process, str]:
    command = (sys.executable, "-m", "infra.stripe_standin", "--port", "0", "--state", str(state_dir))
    process = await asyncio.create_subprocess_exec(*command, "--api-key", STANDIN_KEY, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    return process, line.decode().split()[-1]


async def test_a_killed_stand_in_comes_back_with_everything_it_confirmed(tmp_path: Path) -> None:
    process, base = await start_process(tmp_path)
    client, transport = connect(STANDIN_KEY, base)
    before = Desk(client, base, "standin")
    await before.open()
    for number in range(20):
        await before.send(number, f"e{number}")
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await transport.close_async()

    process, base = await start_process(tmp_path)
    client, transport = connect(STANDIN_KEY, base)
    after = Desk(client, base, "standin")
    after.customer, after.meter, after.event_name = before.customer, before.meter, before.event_name
    assert await after.totals() == sum(range(20))
    with pytest.raises(stripe.InvalidRequestError, match="already exists"):
        await after.send(19, "e19")
    await after.send(1, "e20")
    assert await after.totals() == sum(range(20)) + 1
    await transport.close_async()
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 10) == 0
