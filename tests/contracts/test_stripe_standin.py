"""Failures that only the stand-in can be told to have, its settable time, and its memory, through the official client.

The reporter's tests lean on these: a fault that did not happen as ordered would make them prove nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import stripe

from tests.conditions import eventually
from tests.contracts.stripe_desk import HOUR_S, STANDIN_KEY, Desk, connect, local_desk


@pytest.fixture
async def standin(tmp_path: Path) -> AsyncIterator[Desk]:
    async with local_desk(tmp_path) as local:
        yield local


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
    await arrival(standin)
    with pytest.raises(stripe.RateLimitError) as refusal:
        await standin.send(2, "second")
    assert refusal.value.http_status == 429
    assert refusal.value.error is not None
    assert refusal.value.error.code == "lock_timeout"  # the client leaves `.code` empty on a 429
    await standin.send(4, "other customer", payload={"stripe_customer_id": other, "value": "4"})
    await standin.control("faults/release")
    await first
    await standin.send(2, "second")
    assert await standin.totals() == 3


async def test_one_call_at_a_time_for_an_idempotency_key(standin: Desk) -> None:
    await standin.control("faults", {"kind": "hold"})
    options: Any = {"idempotency_key": "one"}
    first = asyncio.create_task(standin.client.v1.customers.create_async({"name": "Once"}, options))
    await arrival(standin)
    with pytest.raises(stripe.APIError) as refusal:
        await standin.client.v1.customers.create_async({"name": "Once"}, options)
    assert refusal.value.http_status == 409
    await standin.control("faults/release")
    made = await first
    assert (await standin.client.v1.customers.create_async({"name": "Once"}, options)).id == made.id


async def arrival(standin: Desk) -> None:
    """Wait until a held call is inside the stand-in."""

    async def inside() -> bool:
        return bool((await standin.control("state", method="GET"))["held"])

    held: Callable[[], bool | Awaitable[bool]] = inside
    await eventually(held, timeout_s=10, what="the held call inside the stand-in")


async def test_a_control_order_that_does_not_fit_is_refused(standin: Desk) -> None:
    for path, order in (("faults", {"kind": "explode"}), ("clock", {"now": 1}), ("settings", {"lag_s": -1})):
        with pytest.raises(aiohttp.ClientResponseError) as refusal:
            await standin.control(path, order)
        assert refusal.value.status == 400


#: What a form or a script of a web page may send to another address without asking it first.
UNASKED = ["", "application/x-www-form-urlencoded", "multipart/form-data", "text/plain"]


@pytest.mark.parametrize("kind", UNASKED)
@pytest.mark.parametrize("path", ["clock", "settings", "faults", "faults/release"])
async def test_a_web_page_cannot_give_orders(standin: Desk, path: str, kind: str) -> None:
    before = await standin.control("state", method="GET")
    url = f"{standin.base}/_standin/{path}"
    order = json.dumps({"kind": "outage"} if path == "faults" else {}).encode()
    async with aiohttp.ClientSession(skip_auto_headers=["Content-Type"]) as page:
        headers = {"Origin": "http://example.org", **({"Content-Type": kind} if kind else {})}
        async with page.post(url, data=order, headers=headers) as refusal:
            assert refusal.status == 415
            assert "Content-Type: application/json" in (await refusal.json())["error"]
        # Otherwise the browser asks first, and is not given permission.
        asked = {"Origin": "http://example.org", "Access-Control-Request-Method": "POST"}
        async with page.options(url, headers=asked) as answer:
            assert answer.status >= 400
            assert "Access-Control-Allow-Origin" not in answer.headers
    after = await standin.control("state", method="GET")
    assert (after["faults"], after["settings"], after["held"]) == (before["faults"], before["settings"], 0)


async def start_process(state_dir: Path) -> tuple[asyncio.subprocess.Process, str]:
    command = (sys.executable, "-m", "infra.stripe_standin", "--port", "0", "--state", str(state_dir))
    environ = {**os.environ, "INFERLOG_STRIPE_API_KEY": STANDIN_KEY}
    process = await asyncio.create_subprocess_exec(*command, env=environ, stdout=asyncio.subprocess.PIPE)
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
