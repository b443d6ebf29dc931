"""What each Stripe endpoint does with a call, once it has arrived whole: look, decide, commit, answer.

Nothing here awaits, so one call is done before the next begins, and a call can be kept and executed later.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from infra.stripe_standin import forms
from infra.stripe_standin.account import Account
from infra.stripe_standin.books import Fact
from infra.stripe_standin.forms import Params
from infra.stripe_standin.refusals import Refusal, no_such
from infra.stripe_standin.rules import event_draft, rfc3339
from infra.stripe_standin.summaries import page, parse_range, summarise

Body = dict[str, Any]
METER_EVENTS = ("/v1/billing/meter_events", "/v2/billing/meter_events")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One authenticated request, free of HTTP machinery."""

    method: str
    path: str
    query: str
    body: bytes
    idempotency_key: str | None

    @property
    def version(self) -> str:
        """Which of Stripe's two API styles it speaks: v1 or v2."""
        return self.path[1:3]

    def params(self) -> Params:
        """Its parameters; raises Refusal when they cannot be decoded."""
        if self.method != "POST":
            return forms.decode_form(self.query)
        if self.version == "v2":
            return forms.decode_json(self.body)
        try:
            return forms.decode_form(self.body.decode())
        except UnicodeDecodeError as error:
            raise Refusal("The request body is not UTF-8.") from error

    def fingerprint(self) -> str:
        """The same for the same request, whatever its headers."""
        return hashlib.sha256(f"{self.method} {self.path}\n".encode() + self.body).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Status, JSON body and the headers that carry meaning."""

    status: int
    body: Body
    headers: dict[str, str] = field(default_factory=dict)


def execute(account: Account, call: Call, *, forced_status: int | None = None) -> Answer:
    """Answer a call and remember what it changed, in one journal line with its idempotency key.

    `forced_status` answers with that failure although the work was done.
    """
    now_s = account.now_s()
    key = call.idempotency_key if call.method == "POST" else None
    if key is not None and (stored := account.answer_to(key, now_s=now_s)) is not None:
        if stored.fingerprint != call.fingerprint():
            return _refused(_key_reused(key))
        return Answer(status=stored.status, body=stored.body, headers={"Idempotent-Replayed": "true"})
    facts: list[Fact] = []
    try:
        fact, body = _decide(account, call, now_s)
        answer, memorable = Answer(status=200, body=body), True
        facts += [fact] if fact is not None else []
    except Refusal as refusal:
        answer, memorable = _refused(refusal), refusal.executed and call.version == "v1"
    if forced_status is not None:
        answer, memorable = _broken(forced_status), forced_status >= 500 and call.version == "v1"
    if key is not None and memorable:
        facts.append(_answered(account, call, key, answer, now_s))
    if facts:
        account.commit(*facts)
    return answer


def fail(account: Account, call: Call, status: int) -> Answer:
    """Answer with a failure and do nothing; a v1 500 is remembered for its idempotency key, as Stripe does."""
    answer, key = _broken(status), call.idempotency_key
    if key is not None and call.method == "POST" and call.version == "v1" and status >= 500:
        account.commit(_answered(account, call, key, answer, account.now_s()))
    return answer


def busy_key(account: Account, call: Call) -> tuple[str, str] | None:
    """Customer and event name that a meter event occupies while it is created; None for every other call."""
    if call.method != "POST" or call.path not in METER_EVENTS:
        return None
    try:
        params = call.params()
        event_name, payload = params.get("event_name"), forms.mapping(params, "payload")
    except Refusal:
        return None
    meter = account.books.active_meter(event_name) if isinstance(event_name, str) else None
    customer = payload.get(meter["customer_mapping"]["event_payload_key"]) if meter else None
    return (customer, meter["event_name"]) if meter and isinstance(customer, str) else None


def refused(refusal: Refusal) -> Answer:
    """The answer that a refusal stands for."""
    return _refused(refusal)


def _refused(refusal: Refusal) -> Answer:
    headers = {}
    if refusal.should_retry is not None:
        headers["Stripe-Should-Retry"] = "true" if refusal.should_retry else "false"
    return Answer(status=refusal.status, body=refusal.body(), headers=headers)


def _key_reused(key: str) -> Refusal:
    message = f"Keys for idempotent requests can only be used with the parameters they were first used with ({key})."
    return Refusal(message, kind="idempotency_error")


def _broken(status: int) -> Answer:
    if status == 429:
        refusal = Refusal("Too many requests.", status=429, code="rate_limit")
        return Answer(status=429, body=refusal.body(), headers={"Stripe-Rate-Limited-Reason": "global-rate"})
    kind = "api_error" if status >= 500 else "invalid_request_error"
    return _refused(Refusal("An ordered failure.", status=status, kind=kind))


def _answered(account: Account, call: Call, key: str, answer: Answer, now_s: float) -> Fact:
    return account.answer_fact(
        key,
        fingerprint=call.fingerprint(),
        status=answer.status,
        body=answer.body,
        now_s=now_s,
        version=call.version,
    )


# -- the endpoints: (account, call, now_s, ids of the path) -> what to remember, what to answer ----------------------

Decision = tuple["Fact | None", Body]


def _create_customer(account: Account, call: Call, now_s: float) -> Decision:
    fact = account.books.create_customer(call.params(), now_s=now_s)
    return fact, fact["customer"]


def _list_customers(account: Account, call: Call, now_s: float) -> Decision:
    params = call.params()
    forms.only(params, ("email", "limit", "starting_after", "ending_before"))
    email = forms.text(params, "email")
    newest_first = reversed(account.books.customers.values())
    customers = [one for one in newest_first if not one.get("deleted") and email in (None, one.get("email"))]
    return None, page(customers, params, url=call.path)


def _retrieve_customer(account: Account, call: Call, now_s: float, customer_id: str) -> Decision:
    return None, account.books.customer(customer_id)


def _delete_customer(account: Account, call: Call, now_s: float, customer_id: str) -> Decision:
    fact = account.books.delete_customer(customer_id, now_s=now_s)
    return fact, fact["customer"]


def _create_meter(account: Account, call: Call, now_s: float) -> Decision:
    fact = account.books.create_meter(call.params(), now_s=now_s)
    return fact, fact["meter"]


def _list_meters(account: Account, call: Call, now_s: float) -> Decision:
    params = call.params()
    forms.only(params, ("status", "limit", "starting_after", "ending_before"))
    status = forms.one_of(params, "status", ("active", "inactive"))
    meters = [one for one in reversed(account.books.meters.values()) if status in (None, one["status"])]
    return None, page(meters, params, url=call.path)


def _retrieve_meter(account: Account, call: Call, now_s: float, meter_id: str) -> Decision:
    return None, account.books.meter(meter_id)


def _deactivate_meter(account: Account, call: Call, now_s: float, meter_id: str) -> Decision:
    fact = account.books.switch_meter(meter_id, active=False, now_s=now_s)
    return fact, fact["meter"]


def _reactivate_meter(account: Account, call: Call, now_s: float, meter_id: str) -> Decision:
    fact = account.books.switch_meter(meter_id, active=True, now_s=now_s)
    return fact, fact["meter"]


def _create_event(account: Account, call: Call, now_s: float) -> Decision:
    v2 = call.version == "v2"
    draft = event_draft(call.params(), now_s=now_s, v2=v2)
    try:
        fact = account.books.record_event(
            draft, now_s=now_s, lag_s=account.settings.lag_s, request_key=call.idempotency_key
        )
    except Refusal as refusal:
        if v2 and refusal.should_retry is False:
            refusal.code = "duplicate_meter_event"
        raise
    return fact, {
        "object": "v2.billing.meter_event" if v2 else "billing.meter_event",
        "created": rfc3339(now_s) if v2 else int(now_s),
        "event_name": draft.event_name,
        "identifier": fact["event"]["identifier"],
        "livemode": False,
        "payload": draft.payload,
        "timestamp": rfc3339(draft.timestamp_s) if v2 else draft.timestamp_s,
    }


def _cancel_event(account: Account, call: Call, now_s: float) -> Decision:
    params = call.params()
    fact = account.books.cancel_event(params, now_s=now_s, lag_s=account.settings.lag_s)
    return fact, {
        "object": "billing.meter_event_adjustment",
        "cancel": {"identifier": params["cancel"]["identifier"]},
        "event_name": params["event_name"],
        "livemode": False,
        "status": "pending",
        "type": "cancel",
    }


def _list_summaries(account: Account, call: Call, now_s: float, meter_id: str) -> Decision:
    meter = account.books.meter(meter_id)
    params = call.params()
    wanted = parse_range(params)
    if wanted.customer not in account.books.customers:
        raise no_such("customer", wanted.customer, param="customer", status=400)
    events = account.books.counted(meter_id, wanted.customer)
    return None, page(summarise(meter, events, wanted), params, url=call.path)


_ROUTES: tuple[tuple[str, str, Callable[..., Decision]], ...] = (
    ("POST", "/v1/customers", _create_customer),
    ("GET", "/v1/customers", _list_customers),
    ("GET", "/v1/customers/([^/]+)", _retrieve_customer),
    ("DELETE", "/v1/customers/([^/]+)", _delete_customer),
    ("POST", "/v1/billing/meters", _create_meter),
    ("GET", "/v1/billing/meters", _list_meters),
    ("GET", "/v1/billing/meters/([^/]+)", _retrieve_meter),
    ("POST", "/v1/billing/meters/([^/]+)/deactivate", _deactivate_meter),
    ("POST", "/v1/billing/meters/([^/]+)/reactivate", _reactivate_meter),
    ("GET", "/v1/billing/meters/([^/]+)/event_summaries", _list_summaries),
    ("POST", "/v[12]/billing/meter_events", _create_event),
    ("POST", "/v1/billing/meter_event_adjustments", _cancel_event),
)


def _decide(account: Account, call: Call, now_s: float) -> Decision:
    for method, pattern, endpoint in _ROUTES:
        match = re.fullmatch(pattern, call.path)
        if method == call.method and match is not None:
            return endpoint(account, call, now_s, *match.groups())
    raise Refusal(f"Unrecognized request URL ({call.method}: {call.path}).", status=404)
