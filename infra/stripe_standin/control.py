"""The paths for tests and operators, `/_standin/…`: the clock, the failures to order, and a look inside.

They take no key and are never hit by an ordered failure; the server listens on loopback unless told otherwise. What
changes something must be called as JSON: a web page in a browser on this machine would then need permission to
(a CORS preflight), which it does not get.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import asdict, replace
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from infra.stripe_standin.clock import ClockSetting
from infra.stripe_standin.faults import parse_fault
from infra.stripe_standin.server import Standin
from infra.stripe_standin.summaries import aggregate

MAX_BODY_BYTES = 1 << 20


@web.middleware
async def _only_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    changes = request.method not in ("GET", "HEAD") and request.path.startswith("/_standin/")
    if changes and request.content_type != "application/json":
        message = "send the header Content-Type: application/json"
        raise web.HTTPUnsupportedMediaType(text=json.dumps({"error": message}), content_type="application/json")
    return await handler(request)


def create_app(standin: Standin) -> web.Application:
    """The whole HTTP surface around a stand-in; closes its account when the application is cleaned up."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_only_json])
    control = Control(standin)
    app.add_routes(
        [
            web.get("/healthz", control.healthz),
            web.get("/_standin/clock", control.clock),
            web.post("/_standin/clock", control.set_clock),
            web.post("/_standin/settings", control.set_settings),
            web.get("/_standin/faults", control.list_faults),
            web.post("/_standin/faults", control.add_fault),
            web.delete("/_standin/faults", control.clear_faults),
            web.post("/_standin/faults/release", control.release),
            web.get("/_standin/state", control.state),
            web.route("*", "/{version:v[12]}/{rest:.*}", standin.handle),
        ]
    )

    async def stop_holding(_: web.Application) -> None:
        standin.release()

    async def close(_: web.Application) -> None:
        standin.account.close()

    app.on_shutdown.append(stop_holding)
    app.on_cleanup.append(close)
    return app


class Control:
    """Handlers of the control paths; a body that does not fit is answered 400 with the field's name."""

    def __init__(self, standin: Standin) -> None:
        self._standin = standin

    async def healthz(self, request: web.Request) -> web.Response:
        """Alive, and able to tell the time."""
        return web.json_response({"status": "ok", "now_s": self._standin.account.now_s()})

    async def clock(self, request: web.Request) -> web.Response:
        """What time it is here, and why."""
        account = self._standin.account
        return web.json_response({"now_s": account.now_s(), **asdict(account.clock.setting)})

    async def set_clock(self, request: web.Request) -> web.Response:
        """One of {"now_s": …}, {"advance_s": …}, {"reset": true}; "frozen" makes it stand still, or run again."""
        account = self._standin.account
        order = await _order(request, ("now_s", "advance_s", "reset", "frozen"))
        if sum(name in order for name in ("now_s", "advance_s", "reset")) > 1:
            raise _bad("now_s, advance_s, reset: send one of them")
        frozen = order.get("frozen", account.clock.setting.frozen_at_s is not None)
        if not isinstance(frozen, bool):
            raise _bad("frozen: expected true or false")
        now_s = _number(order, "now_s", low_s=0.0)
        if now_s is None:
            now_s = account.now_s() + (_number(order, "advance_s") or 0.0)
        reset = order.get("reset") is True
        account.set_clock(ClockSetting() if reset else account.clock.moved_to(now_s, frozen=frozen))
        self._standin.run_late(account.now_s())
        return await self.clock(request)

    async def set_settings(self, request: web.Request) -> web.Response:
        """{"lag_s": …, "latency_s": …}, both optional."""
        account = self._standin.account
        order = await _order(request, ("lag_s", "latency_s"))
        changes = {name: value for name in order if (value := _number(order, name, low_s=0.0)) is not None}
        account.set_settings(replace(account.settings, **changes))
        return web.json_response(asdict(account.settings))

    async def list_faults(self, request: web.Request) -> web.Response:
        """The failures still in force."""
        return web.json_response({"faults": self._standin.faults.described()})

    async def add_fault(self, request: web.Request) -> web.Response:
        """Order a failure; `faults.parse_fault` has the fields."""
        order = await _order(request, None)
        try:
            self._standin.faults.add(parse_fault(order, now_s=self._standin.account.now_s()))
        except ValueError as error:
            raise _bad(str(error)) from error
        return await self.list_faults(request)

    async def clear_faults(self, request: web.Request) -> web.Response:
        """End every failure; held and late calls stay as they are."""
        self._standin.faults.clear()
        return await self.list_faults(request)

    async def release(self, request: web.Request) -> web.Response:
        """Let held calls go on and execute late ones now."""
        self._standin.release()
        return await self.list_faults(request)

    async def state(self, request: web.Request) -> web.Response:
        """Everything a test may want to compare; totals are of counted events, by event name and customer."""
        standin, books = self._standin, self._standin.account.books
        now_s = standin.account.now_s()
        standin.run_late(now_s)
        totals: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        for meter in books.meters.values():
            formula = meter["default_aggregation"]["formula"]
            for customer in books.customers:
                if counted := books.counted(meter["id"], customer):
                    totals[meter["event_name"]][customer] += aggregate(counted, formula)
        events = [
            {**asdict(event), "outcome": outcome} for event, outcome in zip(books.events, books.outcomes(), strict=True)
        ]
        return web.json_response(
            {
                "now_s": now_s,
                "settings": asdict(standin.account.settings),
                "faults": standin.faults.described(),
                "late": len(standin.late),
                "held": standin.held,
                "calls": dict(standin.calls),
                "customers": list(books.customers.values()),
                "meters": list(books.meters.values()),
                "events": events,
                "async_errors": [
                    {"code": error.code, "identifier": error.event.identifier, "request_key": error.event.request_key}
                    for error in books.errors.values()
                ],
                "totals": totals,
            }
        )


def _bad(message: str) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(text=json.dumps({"error": message}), content_type="application/json")


async def _order(request: web.Request, allowed: tuple[str, ...] | None) -> dict[str, Any]:
    try:
        order = json.loads(await request.read() or b"{}")
    except ValueError as error:
        raise _bad(f"the body is not JSON: {error}") from error
    if not isinstance(order, dict):
        raise _bad("the body must be a JSON object")
    for name in order:
        if allowed is not None and name not in allowed:
            raise _bad(f"unknown field {name!r}; expected {', '.join(allowed)}")
    return order


def _number(order: dict[str, Any], name: str, *, low_s: float = -math.inf) -> float | None:
    value = order.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < low_s:
        raise _bad(f"{name}: expected a number of seconds, got {value!r}")
    return float(value)
