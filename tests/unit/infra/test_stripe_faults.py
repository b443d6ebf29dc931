"""Ordered failures hit what they name as often as they say; forms and clock mean what they say."""

from __future__ import annotations

from typing import Any

import pytest

from infra.stripe_standin.clock import Clock
from infra.stripe_standin.faults import FaultPlan, parse_fault
from infra.stripe_standin.forms import decode_form, decode_json
from infra.stripe_standin.refusals import Refusal


def plan(*orders: dict[str, Any]) -> FaultPlan:
    faults = FaultPlan()
    for order in orders:
        faults.add(parse_fault(order, now_s=100.0))
    return faults


def kinds(faults: FaultPlan, *calls: tuple[str, str], now_s: float = 100.0) -> list[str | None]:
    taken = [faults.take(method, path, now_s=now_s) for method, path in calls]
    return [fault.kind if fault is not None else None for fault in taken]


def test_a_fault_hits_as_many_calls_as_ordered_and_the_next_one_follows() -> None:
    faults = plan({"kind": "drop_request", "count": 2}, {"kind": "drop_answer"})
    assert kinds(faults, *[("POST", "/v1/x")] * 4) == ["drop_request", "drop_request", "drop_answer", None]


def test_a_fault_hits_only_its_path_and_method() -> None:
    faults = plan({"kind": "status", "status": 429, "path": "/v1/billing", "method": "post"})
    assert kinds(faults, ("POST", "/v1/customers"), ("GET", "/v1/billing/meters")) == [None, None]
    assert kinds(faults, ("POST", "/v1/billing/meter_events")) == ["status"]


def test_an_outage_lasts_until_its_time_or_until_cleared() -> None:
    faults = plan({"kind": "outage", "duration_s": 60})
    assert kinds(faults, *[("GET", "/v1/x")] * 3, now_s=159.9) == ["outage"] * 3
    assert kinds(faults, ("GET", "/v1/x"), now_s=160.0) == [None]
    faults = plan({"kind": "outage"})
    assert kinds(faults, ("GET", "/v1/x"), now_s=1e9) == ["outage"]
    faults.clear()
    assert kinds(faults, ("GET", "/v1/x")) == [None]


@pytest.mark.parametrize(
    ("order", "field"),
    [
        ({"kind": "explode"}, "kind"),
        ({}, "kind"),
        ({"kind": "outage", "count": 0}, "count"),
        ({"kind": "outage", "count": True}, "count"),
        ({"kind": "status", "status": 200}, "status"),
        ({"kind": "status", "applied": "yes"}, "applied"),
        ({"kind": "apply_late", "delay_s": -1}, "delay_s"),
        ({"kind": "outage", "duration_s": float("nan")}, "duration_s"),
        ({"kind": "outage", "path": 7}, "path"),
        ({"kind": "outage", "often": 2}, "often"),
    ],
)
def test_an_order_that_does_not_fit_names_its_field(order: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        parse_fault(order, now_s=0.0)


def test_forms_nest() -> None:
    form = "event_name=tok&payload[value]=3&payload%5Bstripe_customer_id%5D=cus_1&expand[]=a&expand[]=b&note="
    assert decode_form(form) == {
        "event_name": "tok",
        "payload": {"value": "3", "stripe_customer_id": "cus_1"},
        "expand": {"0": "a", "1": "b"},
        "note": "",
    }


@pytest.mark.parametrize("form", ["a=1&a[b]=2", "a[b]=2&a=1", "[a]=1", "a[b=1", "a[b]c=1"])
def test_forms_that_contradict_themselves_are_refused(form: str) -> None:
    with pytest.raises(Refusal):
        decode_form(form)


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff"])
def test_json_must_be_an_object(body: bytes) -> None:
    with pytest.raises(Refusal, match="JSON"):
        decode_json(body)


def test_the_clock_follows_the_wall_unless_it_is_stopped() -> None:
    wall = [1_000.0]
    clock = Clock(lambda: wall[0])
    clock.setting = clock.moved_to(5_000.0, frozen=False)
    wall[0] += 10
    assert clock.now_s() == 5_010.0
    clock.setting = clock.moved_to(6_000.0, frozen=True)
    wall[0] += 10
    assert clock.now_s() == 6_000.0
