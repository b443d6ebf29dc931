"""A small world for the reporter: its own Stripe stand-in, its own database, and one clock for both sides.

Time passes only when a test says so; pauses of the reporter take none.
"""

from __future__ import annotations

import json
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from infra.postgres import Connection, connect
from infra.settings import BillingSettings, billing_settings
from streams.billing.intents import HOUR, last_sealed_hour
from streams.billing.outcome import PassReport, Policy
from streams.billing.pacing import Pace
from streams.billing.reconcile import Compared, Comparison, compare
from streams.billing.reporter import Reporter
from streams.billing.reports import Reports
from streams.billing.sender import Edge
from streams.billing.stripe_gateway import open_gateway
from tests.processes import Process, free_port

NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
KEY = "sk_test_billing"
SENDS = {"path": "/v1/billing/meter_events", "method": "POST"}
POLICY = Policy(environment="test", seal_after_s=600)

Wrap = Callable[[Any], Any]


async def count_beyond_the_calendar(connection: Connection) -> None:
    """Usage in hours that Postgres has and no calendar, as rows from before the table refused them."""
    for (name,) in await connection.fetch(
        "SELECT conname FROM pg_constraint WHERE conrelid = 'usage_hourly'::regclass AND contype = 'c'"
    ):
        await connection.execute(f'ALTER TABLE usage_hourly DROP CONSTRAINT "{name}"')
    await connection.execute(
        "INSERT INTO usage_hourly (customer_id, hour, model, version, price_id, meter, quantity) "
        "SELECT 'acme', hour, 'digits', repeat('a', 64), 'standard-v1', 'items', 7 "
        "FROM unnest(ARRAY['-infinity', '2000-01-01 BC', '20000-01-01', 'infinity']::timestamptz[]) AS strange (hour)"
    )


class World:
    """`now` is everybody's time. The reporter is made anew for each run, as if it had been restarted."""

    def __init__(self, env: Mapping[str, str], base: str, connection: Connection) -> None:
        self.env = {**env, "INFERLOG_STRIPE_API_BASE": base, "INFERLOG_STRIPE_API_KEY": KEY}
        self.settings: BillingSettings = billing_settings(self.env)
        self.now = NOON
        self._base = base
        self._connection = connection
        self._monotonic_s = 0.0

    # -- the ledger -----------------------------------------------------------------------------------------------

    async def add_customer(self, customer_id: str) -> None:
        await self._connection.execute(
            "INSERT INTO customers (customer_id, name, requests_per_s, burst, created_at) VALUES ($1, $1, 10, 10, $2)",
            customer_id,
            NOON - timedelta(days=400),
        )

    async def use(
        self, customer_id: str, quantity: int, *, meter: str = "items", hours_ago: int = 2, version: str = "a" * 64
    ) -> None:
        """Add to one row of the ledger, or take away; `hours_ago` counts from the current hour."""
        row = (customer_id, self.hour(hours_ago), version, meter, quantity)
        done = await self._connection.execute(
            "UPDATE usage_hourly SET quantity = quantity + $5 "
            "WHERE customer_id = $1 AND hour = $2 AND version = $3 AND meter = $4",
            *row,
        )
        if done == "UPDATE 0":
            await self._connection.execute(
                "INSERT INTO usage_hourly (customer_id, hour, model, version, price_id, meter, quantity) "
                "VALUES ($1, $2, 'digits', $3, 'standard-v1', $4, $5)",
                *row,
            )

    def hour(self, hours_ago: int) -> datetime:
        return self.now.replace(minute=0, second=0, microsecond=0) - hours_ago * HOUR

    async def ledger(self) -> dict[tuple[str, str], int]:
        rows = await self._connection.fetch(
            "SELECT customer_id, meter, sum(quantity)::bigint AS units FROM usage_hourly GROUP BY 1, 2"
        )
        return {(r["customer_id"], r["meter"]): r["units"] for r in rows}

    async def states(self) -> list[tuple[str, int, int]]:
        """(state, rev, delta) of every intent, by customer, meter, hour and rev."""
        rows = await self._connection.fetch(
            "SELECT state, rev, delta_units FROM stripe_reports ORDER BY customer_id, meter, hour, rev"
        )
        return [(r["state"], r["rev"], r["delta_units"]) for r in rows]

    # -- Stripe ---------------------------------------------------------------------------------------------------

    def control(self, path: str, order: Mapping[str, Any] | None = None, *, method: str = "POST") -> Any:
        body = None if order is None else json.dumps(order).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._base}/_standin/{path}", data=body, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def fault(self, kind: str, **order: Any) -> None:
        self.control("faults", {"kind": kind, **order})

    def heal(self) -> None:
        self.control("faults", method="DELETE")

    def state(self) -> Any:
        return self.control("state", method="GET")

    def events(self) -> list[Any]:
        events: list[Any] = self.state()["events"]
        return events

    def at_stripe(self) -> dict[tuple[str, str], int]:
        """Counted units by our customer and meter, over all of Stripe's customers that carry our id."""
        state = self.state()
        ours = {c["id"]: (c.get("metadata") or {}).get("inferlog_customer_id") for c in state["customers"]}
        found: defaultdict[tuple[str, str], int] = defaultdict(int)
        for name, by_customer in state["totals"].items():
            for stripe_id, units in by_customer.items():
                found[ours[stripe_id], name.removeprefix("inferlog_test_")] += units
        return dict(found)

    async def post_foreign_event(self, customer_id: str, units: int, *, at: datetime) -> None:
        """An event that somebody else sent for our customer."""
        stripe_id = await self._connection.fetchval(
            "SELECT stripe_customer_id FROM customers WHERE customer_id = $1", customer_id
        )
        form = (
            f"event_name=inferlog_test_items&payload[stripe_customer_id]={stripe_id}&payload[value]={units}"
            f"&identifier=foreign&timestamp={int(at.timestamp())}"
        )
        self.call_stripe("POST", "/v1/billing/meter_events", form)

    def call_stripe(self, method: str, path: str, form: str | None = None) -> Any:
        request = urllib.request.Request(
            f"{self._base}{path}",
            data=None if form is None else form.encode(),
            method=method,
            headers={"Authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    # -- time and the reporter ------------------------------------------------------------------------------------

    def pass_time(self, by: timedelta) -> None:
        self.now += by
        self._monotonic_s += by.total_seconds()
        self.control("clock", {"now_s": self.now.timestamp(), "frozen": True})

    async def _sleep(self, pause_s: float) -> None:
        self._monotonic_s += pause_s

    @asynccontextmanager
    async def reporter(
        self,
        *,
        wrap_reports: Wrap = lambda reports: reports,
        wrap_gateway: Wrap = lambda gateway: gateway,
        **changes: Any,
    ) -> AsyncIterator[Reporter]:
        """A fresh reporter on a connection of its own, which is cut at the end as if the process had died."""
        pace = Pace(calls_per_s=20, monotonic=lambda: self._monotonic_s, sleep=self._sleep)
        connection = await connect(self.settings.postgres)
        try:
            reports = Reports(connection)
            async with open_gateway(self.settings.stripe, pace=pace) as gateway:
                edge = Edge(
                    reports=wrap_reports(reports),
                    gateway=wrap_gateway(gateway),
                    clock=lambda: self.now,
                    monotonic=lambda: self._monotonic_s,
                    sleep=self._sleep,
                    stopping=lambda: False,
                )
                yield Reporter(edge, replace(POLICY, **changes))
        finally:
            connection.terminate()

    async def run(self, **options: Any) -> PassReport:
        async with self.reporter(**options) as reporter:
            return await reporter.run_once()

    async def compared(self) -> Compared:
        """What `inferlog billing compare` would find."""
        pace = Pace(calls_per_s=20, monotonic=lambda: self._monotonic_s, sleep=self._sleep)
        async with open_gateway(self.settings.stripe, pace=pace) as gateway:
            return await compare(
                self._connection,
                gateway,
                environment="test",
                last_sealed=last_sealed_hour(self.now, seal_after_s=600, include_open_hours=False),
                now=self.now,
            )

    async def differing(self) -> list[Comparison]:
        """What it would complain about."""
        return [comparison for comparison in (await self.compared()).pairs if comparison.differing]


@asynccontextmanager
async def open_world(
    env: Mapping[str, str], spawn: Callable[..., Process], tmp_path: Path, *, frozen: bool = True
) -> AsyncIterator[World]:
    """A world at NOON, or with real time when not frozen."""
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    command = ["python", "-m", "infra.stripe_standin", "--port", str(port), "--state", str(tmp_path / "stripe")]
    standin = spawn(command, {"INFERLOG_STRIPE_API_KEY": KEY}, name="stripe")
    standin.wait_ready(f"{base}/healthz")
    connection = await connect(billing_settings({**env, "INFERLOG_STRIPE_API_KEY": KEY}).postgres)
    try:
        world = World(env, base, connection)
        if frozen:
            world.pass_time(timedelta(0))
        else:
            world.now = datetime.now(timezone.utc)
        yield world
    finally:
        connection.terminate()
