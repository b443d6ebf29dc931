"""What Stripe would remember: customers, meters, events, cancellations, and what became of each.

Deciding and remembering are apart: `create_…`, `record_event` and `cancel_event` look and return a fact, `apply`
alone changes anything. Facts are JSON objects, so that replaying them in order rebuilds the same books. No I/O;
ids come from `mint`, the time is always an argument.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from infra.stripe_standin import forms
from infra.stripe_standin.forms import Params
from infra.stripe_standin.refusals import Refusal, duplicate_event, missing, no_such
from infra.stripe_standin.rules import EventDraft, event_value
from infra.stripe_standin.summaries import Event, effective

IDENTIFIER_WINDOW_S = 86_400
CUSTOMER_TEXTS = ("name", "email", "description", "phone")
METER_PARAMS = (
    "display_name",
    "event_name",
    "event_time_window",
    "default_aggregation",
    "customer_mapping",
    "value_settings",
)

Fact = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncError:
    """An event that was answered with 200 and later found not to count."""

    code: str
    event: Event


class Books:
    """The account. Times are Unix seconds; every refusal is raised as Refusal before anything is changed."""

    def __init__(self, mint: Callable[[str], str]) -> None:
        self._mint = mint
        self.customers: dict[str, dict[str, Any]] = {}
        self.meters: dict[str, dict[str, Any]] = {}
        self.events: list[Event] = []
        self.cancelled: set[int] = set()
        self.errors: dict[int, AsyncError] = {}
        self._newest: dict[str, int] = {}
        self._pending: list[tuple[float, int]] = []
        self._counted: defaultdict[tuple[str, str], list[int]] = defaultdict(list)

    # -- decide ---------------------------------------------------------------------------------------------------

    def create_customer(self, params: Params, *, now_s: float) -> Fact:
        """A new customer with the texts and metadata sent."""
        forms.only(params, (*CUSTOMER_TEXTS, "metadata"))
        texts = {name: forms.text(params, name) for name in CUSTOMER_TEXTS}
        metadata = forms.mapping(params, "metadata")
        if len(metadata) > 50:
            raise Refusal("metadata can have at most 50 keys.", param="metadata")
        for key in metadata:
            if len(key) > 40:
                raise Refusal(f"Metadata key {key!r} is longer than 40 characters.", param="metadata")
            forms.text(metadata, key, within="metadata", max_chars=500)
        customer: dict[str, Any] = {
            "id": self._mint("cus"), "object": "customer", "address": None, "balance": 0, "created": int(now_s),
            "currency": None, "default_source": None, "delinquent": False, "livemode": False, "metadata": metadata,
            "preferred_locales": [], "shipping": None,
            "tax_exempt": "none", "test_clock": None, **texts,
        }  # fmt: skip
        return {"kind": "customer", "now_s": now_s, "customer": customer}

    def delete_customer(self, customer_id: str, *, now_s: float) -> Fact:
        """Only the id remains; later events for it fail after they were accepted."""
        self.customer(customer_id)
        gone = {"id": customer_id, "object": "customer", "deleted": True}
        return {"kind": "customer", "now_s": now_s, "customer": gone}

    def create_meter(self, params: Params, *, now_s: float) -> Fact:
        """A new active meter; its event name must not be in use by another active one."""
        forms.only(params, METER_PARAMS)
        event_name = forms.required_text(params, "event_name", max_chars=100)
        display_name = forms.required_text(params, "display_name", max_chars=250)
        aggregation = forms.mapping(params, "default_aggregation")
        formula = forms.one_of(aggregation, "formula", ("sum", "count", "last"), within="default_aggregation")
        if formula is None:
            raise missing("default_aggregation[formula]")
        window = forms.one_of(params, "event_time_window", ("hour", "day"))
        by = forms.mapping(params, "customer_mapping") or {"type": "by_id"}
        if forms.one_of(by, "type", ("by_id",), within="customer_mapping") is None:
            raise missing("customer_mapping[type]")
        by_key = forms.text(by, "event_payload_key", within="customer_mapping") or "stripe_customer_id"
        values = forms.mapping(params, "value_settings")
        value_key = forms.text(values, "event_payload_key", within="value_settings") or "value"
        if self.active_meter(event_name) is not None:
            raise Refusal(f"An active meter with event name '{event_name}' already exists.", param="event_name")
        meter = {
            "id": self._mint("mtr_test"), "object": "billing.meter", "created": int(now_s), "updated": int(now_s),
            "customer_mapping": {"event_payload_key": by_key, "type": "by_id"},
            "default_aggregation": {"formula": formula}, "display_name": display_name, "event_name": event_name,
            "event_time_window": window, "livemode": False, "status": "active",
            "status_transitions": {"deactivated_at": None}, "value_settings": {"event_payload_key": value_key},
        }  # fmt: skip
        return {"kind": "meter", "now_s": now_s, "meter": meter}

    def switch_meter(self, meter_id: str, *, active: bool, now_s: float) -> Fact:
        """Deactivate or reactivate; an inactive meter takes no events."""
        meter = self.meter(meter_id)
        if active and self.active_meter(meter["event_name"]) not in (None, meter):
            raise Refusal(f"An active meter with event name '{meter['event_name']}' already exists.")
        changes = {
            "status": "active" if active else "inactive",
            "status_transitions": {"deactivated_at": None if active else int(now_s)},
            "updated": int(now_s),
        }
        return {"kind": "meter", "now_s": now_s, "meter": {**meter, **changes}}

    def record_event(self, draft: EventDraft, *, now_s: float, lag_s: float, request_key: str | None = None) -> Fact:
        """Accept an event that counts from `now_s + lag_s` on, or refuse it."""
        meter = self.active_meter(draft.event_name)
        if meter is None:
            raise Refusal(f'No active meter found for event name "{draft.event_name}".', param="event_name")
        customer_key = meter["customer_mapping"]["event_payload_key"]
        customer = draft.payload.get(customer_key)
        if not customer:
            label = f"payload[{customer_key}]"
            raise Refusal(f"Missing required param: {label}.", code="meter_event_no_customer_defined", param=label)
        value_key = meter["value_settings"]["event_payload_key"]
        counts = meter["default_aggregation"]["formula"] == "count" and value_key not in draft.payload
        value = 1 if counts else event_value(draft.payload, value_key)
        identifier = draft.identifier or self._mint("evt")
        seen = self._newest.get(identifier)
        if seen is not None and now_s - self.events[seen].received_s < IDENTIFIER_WINDOW_S:
            raise duplicate_event(identifier)
        event = Event(
            identifier=identifier, event_name=draft.event_name, meter=meter["id"], customer=customer, value=value,
            timestamp_s=draft.timestamp_s, received_s=now_s, due_s=now_s + lag_s, request_key=request_key,
        )  # fmt: skip
        return {"kind": "event", "now_s": now_s, "event": asdict(event)}

    def cancel_event(self, params: Params, *, now_s: float, lag_s: float) -> Fact:
        """Take one event back, within a day of its receipt."""
        forms.only(params, ("event_name", "type", "cancel"))
        event_name = forms.required_text(params, "event_name", max_chars=100)
        if forms.one_of(params, "type", ("cancel",)) is None:
            raise missing("type")
        identifier = forms.required_text(forms.mapping(params, "cancel"), "identifier", within="cancel")
        seen = self._newest.get(identifier)
        if seen is None or self.events[seen].event_name != event_name:
            raise no_such("meter event", identifier, param="cancel[identifier]", status=400)
        if now_s - self.events[seen].received_s >= IDENTIFIER_WINDOW_S:
            raise Refusal("Only events received in the last 24 hours can be cancelled.", param="cancel[identifier]")
        if seen in self.cancelled:
            raise Refusal(f"The event {identifier} is already cancelled.", param="cancel[identifier]")
        return {"kind": "cancel", "now_s": now_s, "place": seen, "due_s": now_s + lag_s}

    # -- look -----------------------------------------------------------------------------------------------------

    def customer(self, customer_id: str) -> dict[str, Any]:
        """The customer, a deleted one included; 404 for an id never given out."""
        if customer_id not in self.customers:
            raise no_such("customer", customer_id)
        return self.customers[customer_id]

    def meter(self, meter_id: str) -> dict[str, Any]:
        """The meter; 404 for an unknown id."""
        if meter_id not in self.meters:
            raise no_such("billing meter", meter_id)
        return self.meters[meter_id]

    def active_meter(self, event_name: str) -> dict[str, Any] | None:
        """The one active meter with this event name."""
        for meter in self.meters.values():
            if meter["event_name"] == event_name and meter["status"] == "active":
                return meter
        return None

    def counted(self, meter_id: str, customer_id: str) -> list[Event]:
        """The events that make up a customer's sums on a meter, as far as processing has come."""
        places: Iterable[int] = self._counted.get((meter_id, customer_id), ())
        standing = [self.events[place] for place in places if place not in self.cancelled]
        return effective(standing, self.meters[meter_id]["event_time_window"])

    def outcomes(self) -> list[str]:
        """What became of each event, in order: pending, counted, cancelled or the code of its error."""
        waiting = {place for _, place in self._pending}
        outcomes = []
        for place in range(len(self.events)):
            if place in self.cancelled:
                outcomes.append("cancelled")
            elif place in self.errors:
                outcomes.append(self.errors[place].code)
            else:
                outcomes.append("pending" if place in waiting else "counted")
        return outcomes

    # -- remember -------------------------------------------------------------------------------------------------

    def apply(self, fact: Fact) -> None:
        """Make a decided fact true. Processing due by its time comes first, so that a replay ends up the same."""
        self.advance(fact["now_s"])
        kind = fact["kind"]
        if kind == "customer":
            self.customers[fact["customer"]["id"]] = fact["customer"]
        elif kind == "meter":
            self.meters[fact["meter"]["id"]] = fact["meter"]
        elif kind == "event":
            event = Event(**fact["event"])
            self._newest[event.identifier] = len(self.events)
            heapq.heappush(self._pending, (event.due_s, len(self.events)))
            self.events.append(event)
        elif kind == "cancel":
            heapq.heappush(self._pending, (fact["due_s"], ~fact["place"]))
        self.advance(fact["now_s"])

    def advance(self, now_s: float) -> None:
        """Process what is due: events start to count or turn into errors, cancellations take effect."""
        while self._pending and self._pending[0][0] <= now_s:
            _, place = heapq.heappop(self._pending)
            if place < 0:
                self.cancelled.add(~place)
            else:
                self._process(place)

    def _process(self, place: int) -> None:
        event = self.events[place]
        customer = self.customers.get(event.customer)
        if self.meters[event.meter]["status"] != "active":
            self.errors[place] = AsyncError(code="archived_meter", event=event)
        elif customer is None or customer.get("deleted"):
            self.errors[place] = AsyncError(code="meter_event_customer_not_found", event=event)
        else:
            self._counted[event.meter, event.customer].append(place)
