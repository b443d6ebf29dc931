"""Sums of a meter's events over hours, days or one range, and the pages in which lists are read.

Pure: events in, Stripe's list objects out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from infra.stripe_standin import forms
from infra.stripe_standin.forms import Params
from infra.stripe_standin.refusals import Refusal, no_such

WINDOW_S = {"hour": 3_600, "day": 86_400}
SUMMARY_PARAMS = (
    "customer",
    "start_time",
    "end_time",
    "value_grouping_window",
    "limit",
    "starting_after",
    "ending_before",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An accepted meter event. `received_s` and `due_s` (when it starts to count) are the stand-in's time."""

    identifier: str
    event_name: str
    meter: str
    customer: str
    value: int
    timestamp_s: int
    received_s: float
    due_s: float
    request_key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What to sum: `start_s` inclusive, `end_s` exclusive, in windows of `window_s` or (None) as one."""

    customer: str
    start_s: int
    end_s: int
    window_s: int | None


def parse_range(params: Params) -> Range:
    """The range of a summaries call; raises Refusal when a bound is missing or off its grid."""
    forms.only(params, SUMMARY_PARAMS)
    customer = forms.required_text(params, "customer")
    start_s, end_s = forms.whole(params, "start_time"), forms.whole(params, "end_time")
    if start_s is None or end_s is None:
        name = "start_time" if start_s is None else "end_time"
        raise Refusal(f"Missing required param: {name}.", code="parameter_missing", param=name)
    grouping = forms.one_of(params, "value_grouping_window", ("hour", "day"))
    grid_s = WINDOW_S[grouping] if grouping else 60
    for name, bound_s in (("start_time", start_s), ("end_time", end_s)):
        if bound_s % grid_s:
            raise Refusal(f"{name} must be aligned with {grouping or 'minute'} boundaries (UTC).", param=name)
    if start_s >= end_s:
        raise Refusal("start_time must be before end_time.", param="start_time")
    return Range(customer=customer, start_s=start_s, end_s=end_s, window_s=grid_s if grouping else None)


def effective(events: Iterable[Event], event_time_window: str | None) -> list[Event]:
    """The events that count: all, or for a pre-aggregated meter the last received of each UTC window."""
    if event_time_window is None:
        return list(events)
    window_s = WINDOW_S[event_time_window]
    last = {event.timestamp_s // window_s: event for event in sorted(events, key=lambda event: event.received_s)}
    return list(last.values())


def aggregate(events: Sequence[Event], formula: str) -> int:
    """One number for some events; 0 for none."""
    if formula == "count":
        return len(events)
    if formula == "last":
        newest = max(events, key=lambda event: (event.timestamp_s, event.received_s), default=None)
        return newest.value if newest else 0
    return sum(event.value for event in events)


def summarise(meter: dict[str, Any], events: Sequence[Event], wanted: Range) -> list[dict[str, Any]]:
    """Summary objects, newest first. Windows without events are left out; an undivided range is always one object."""
    groups: dict[int, list[Event]] = {} if wanted.window_s else {wanted.start_s: []}
    for event in events:
        if wanted.start_s <= event.timestamp_s < wanted.end_s:
            window_s = wanted.window_s
            start_s = event.timestamp_s - event.timestamp_s % window_s if window_s else wanted.start_s
            groups.setdefault(start_s, []).append(event)
    formula = meter["default_aggregation"]["formula"]
    return [
        _summary(meter["id"], wanted, start_s, float(aggregate(groups[start_s], formula)))
        for start_s in sorted(groups, reverse=True)
    ]


def _summary(meter: str, wanted: Range, start_s: int, value: float) -> dict[str, Any]:
    end_s = start_s + wanted.window_s if wanted.window_s else wanted.end_s
    name = hashlib.sha256(f"{meter} {wanted.customer} {start_s} {end_s}".encode()).hexdigest()[:32]
    return {
        "id": f"mtrusg_test_{name}",
        "object": "billing.meter_event_summary",
        "aggregated_value": value,
        "end_time": end_s,
        "livemode": False,
        "meter": meter,
        "start_time": start_s,
    }


def page(items: Sequence[dict[str, Any]], params: Params, *, url: str) -> dict[str, Any]:
    """One page of a list whose order is given; raises Refusal for a bad limit or a cursor that is not in the list."""
    limit = forms.whole(params, "limit")
    if limit is None:
        limit = 10
    if not 1 <= limit <= 100:
        raise Refusal("limit must be between 1 and 100.", param="limit")
    after, before = forms.text(params, "starting_after"), forms.text(params, "ending_before")
    if after and before:
        raise Refusal("Send starting_after or ending_before, not both.", param="ending_before")
    places = {item["id"]: place for place, item in enumerate(items)}
    for name, cursor in (("starting_after", after), ("ending_before", before)):
        if cursor and cursor not in places:
            raise no_such("object", cursor, param=name, status=400)
    if before:
        end = places[before]
        start = max(0, end - limit)
        return {"object": "list", "data": list(items[start:end]), "has_more": start > 0, "url": url}
    start = places[after] + 1 if after else 0
    end = start + limit
    return {"object": "list", "data": list(items[start:end]), "has_more": end < len(items), "url": url}
