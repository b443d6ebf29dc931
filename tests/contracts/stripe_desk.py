"""One customer and one meter at some Stripe: what both Stripe suites act through.

It speaks the official client only; `control` and `totals` are the stand-in's own paths.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import stripe
from aiohttp.test_utils import TestServer

from infra.stripe_standin.account import Account
from infra.stripe_standin.control import create_app
from infra.stripe_standin.server import Standin

STANDIN_KEY = "sk_test_standin_0123456789abcdef"
HOUR_S = 3_600
PATIENCE_S = {"standin": 5.0, "sandbox": 180.0}


def connect(key: str, base: str | None) -> tuple[stripe.StripeClient, Any]:
    transport: Any = stripe.AIOHTTPClient(timeout=20)
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
        while (seen := await self.hours(start_s, count)) != expected and time.monotonic() < deadline_s:  # noqa: ASYNC110 - a remote server
            await asyncio.sleep(0.01 if self.side == "standin" else 2)
        assert seen == expected

    async def control(self, path: str, order: dict[str, Any] | None = None, method: str = "POST") -> Any:
        headers = {"Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.request(method, f"{self.base}/_standin/{path}", json=order, headers=headers) as response,
        ):
            return await response.json()

    async def totals(self) -> float:
        """The customer's counted sum, from the stand-in's own view."""
        state = await self.control("state", method="GET")
        total: float = state["totals"].get(self.event_name, {}).get(self.customer, 0)
        return total


@asynccontextmanager
async def local_desk(state_dir: Path) -> AsyncIterator[Desk]:
    async with TestServer(create_app(Standin(Account(state_dir), api_key=STANDIN_KEY))) as server:
        base = str(server.make_url("")).rstrip("/")
        client, transport = connect(STANDIN_KEY, base)
        local = Desk(client, base, "standin")
        await local.open()
        yield local
        await transport.close_async()
