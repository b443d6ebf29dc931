"""The stand-in over HTTP: who may call, what goes wrong on order, and one call at a time per customer and meter.

What a call does is in `endpoints`; the paths for tests are in `control`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import secrets
from collections import Counter
from dataclasses import dataclass

from aiohttp import web

from infra.stripe_standin.account import Account
from infra.stripe_standin.endpoints import Answer, Call, busy_key, execute, fail, refused
from infra.stripe_standin.faults import FaultPlan
from infra.stripe_standin.refusals import Refusal, busy

HOLD_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LateCall:
    """A call whose caller was cut off, to be executed once the stand-in's clock has reached `due_s`."""

    due_s: float
    call: Call


class Standin:
    """One running stand-in: an account, the failures ordered for it, and the calls inside it now."""

    def __init__(self, account: Account, *, api_key: str) -> None:
        self.account = account
        self.faults = FaultPlan()
        self.late: list[LateCall] = []
        self.calls: Counter[str] = Counter()
        self.held = 0
        self._api_key = api_key
        self._release = asyncio.Event()
        self._busy: set[tuple[str, str]] = set()
        self._keys_in_use: set[str] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one call to /v1 or /v2, or close its connection if that was ordered."""
        call = Call(
            method=request.method,
            path=request.path.rstrip("/"),
            query=request.query_string,
            body=await request.read(),
            idempotency_key=request.headers.get("Idempotency-Key"),
        )
        try:
            self._authorise(request.headers.get("Authorization"))
        except Refusal as refusal:
            return self._respond(call, refused(refusal))
        now_s = self.account.now_s()
        self.run_late(now_s)
        fault = self.faults.take(call.method, call.path, now_s=now_s)
        kind = fault.kind if fault is not None else ""
        if fault is not None and kind == "apply_late":
            self.late.append(LateCall(due_s=now_s + fault.delay_s, call=call))
        if kind in ("drop_request", "outage", "apply_late"):
            return self._drop(request, call, kind)
        if fault is not None and kind == "status" and not fault.applied:
            return self._respond(call, fail(self.account, call, fault.status))
        forced_status = fault.status if fault is not None and kind == "status" else None
        answer = await self._admit(call, hold=kind == "hold", forced_status=forced_status)
        return self._drop(request, call, kind) if kind == "drop_answer" else self._respond(call, answer)

    async def _admit(self, call: Call, *, hold: bool, forced_status: int | None) -> Answer:
        pair, key = busy_key(self.account, call), call.idempotency_key
        if key is not None and key in self._keys_in_use:
            message = "Another request with this idempotency key is still running."
            return refused(Refusal(message, status=409, kind="idempotency_error", code="idempotency_key_in_use"))
        if pair is not None and pair in self._busy:
            return refused(busy(*pair))
        self._keys_in_use |= {key} if key is not None else set()
        self._busy |= {pair} if pair is not None else set()
        try:
            if hold:
                await self._hold()
            if self.account.settings.latency_s:
                await asyncio.sleep(self.account.settings.latency_s)
            return execute(self.account, call, forced_status=forced_status)
        finally:
            self._keys_in_use.discard(key or "")
            if pair is not None:
                self._busy.discard(pair)

    async def _hold(self) -> None:
        self.held += 1
        try:
            await asyncio.wait_for(self._release.wait(), HOLD_LIMIT_S)
        except asyncio.TimeoutError:
            return
        finally:
            self.held -= 1

    def run_late(self, now_s: float) -> None:
        """Execute the late calls that are due; what becomes of them nobody hears."""
        due = [late for late in self.late if late.due_s <= now_s]
        self.late = [late for late in self.late if late.due_s > now_s]
        for late in due:
            execute(self.account, late.call)

    def release(self) -> None:
        """Let every held call go on and execute every late one now."""
        self._release.set()
        self._release = asyncio.Event()
        self.run_late(float("inf"))

    def _authorise(self, header: str | None) -> None:
        scheme, _, given = (header or "").partition(" ")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).decode(errors="replace").partition(":")[0]
            except binascii.Error:
                given = ""
        if not given:
            message = "You did not provide an API key: send it as 'Authorization: Bearer YOUR_KEY'."
            raise Refusal(message, status=401)
        if not hmac.compare_digest(given.encode(), self._api_key.encode()):
            shown = f"{given[:8]}{'*' * 8}{given[-4:]}" if len(given) > 16 else "*" * 8
            raise Refusal(f"Invalid API Key provided: {shown}", status=401)

    def _respond(self, call: Call, answer: Answer) -> web.Response:
        self.calls[f"{call.method} {call.path} {answer.status}"] += 1
        headers = {"Request-Id": f"req_{secrets.token_hex(7)}", **answer.headers}
        if call.idempotency_key is not None:
            headers["Idempotency-Key"] = call.idempotency_key
        return web.json_response(answer.body, status=answer.status, headers=headers)

    def _drop(self, request: web.Request, call: Call, kind: str) -> web.Response:
        self.calls[f"{call.method} {call.path} {kind}"] += 1
        if request.transport is not None:
            request.transport.abort()
        return web.Response()
