"""Sums over ranges and the pages they are read in.

Hours and days are UTC, bounds are on their grid, and joined pages are the whole list.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.stripe_standin.refusals import Refusal
from infra.stripe_standin.summaries import Event, page, parse_range, summarise

START_S = 1_799_996_400


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"start_time": "1800000001"}, "start_time"),
        ({"end_time": "1800000060"}, "end_time"),
        ({"end_time": "1799996400", "start_time": "1799996400"}, "start_time"),
        ({"customer": ""}, "customer"),
        ({"value_grouping_window": "week"}, "value_grouping_window"),
        ({"dimension": "x"}, "dimension"),
    ],
)
def test_a_range_must_be_on_its_grid(change: dict[str, str], param: str) -> None:
    good = {"customer": "c", "start_time": "1799996400", "end_time": "1800003600", "value_grouping_window": "hour"}
    parse_range(good)
    with pytest.raises(Refusal) as refusal:
        parse_range({**good, **change})
    assert refusal.value.param == param


def event(value: int, timestamp_s: int) -> Event:
    return Event(
        identifier=f"e{value}", event_name="tokens", meter="mtr_1", customer="cus_1", value=value,
        timestamp_s=timestamp_s, received_s=0.0, due_s=0.0, request_key=None,
    )  # fmt: skip


def test_summaries_are_newest_first_and_leave_out_the_end() -> None:
    meter = {"id": "mtr_1", "default_aggregation": {"formula": "sum"}}
    events = [event(hour + 1, START_S + hour * 3_600) for hour in (0, 2, 1)]
    params = {"customer": "cus_1", "start_time": str(START_S), "end_time": str(START_S + 2 * 3_600)}
    found = summarise(meter, events, parse_range({**params, "value_grouping_window": "hour"}))
    assert [one["start_time"] - START_S for one in found] == [3_600, 0]
    assert [one["end_time"] - one["start_time"] for one in found] == [3_600, 3_600]
    assert [one["aggregated_value"] for one in found] == [2.0, 1.0]
    (whole,) = summarise(meter, events, parse_range(params))
    assert (whole["start_time"], whole["end_time"], whole["aggregated_value"]) == (START_S, START_S + 7_200, 3.0)
    (nothing,) = summarise(meter, [], parse_range(params))
    assert nothing["aggregated_value"] == 0.0


@given(count=st.integers(0, 35), limit=st.integers(1, 12))
def test_pages_joined_are_the_list_in_both_directions(count: int, limit: int) -> None:
    items = [{"id": f"i{number}"} for number in range(count)]
    forward: list[dict[str, Any]] = []
    params = {"limit": str(limit)}
    while True:
        part = page(items, params, url="/")
        forward += part["data"]
        if not part["has_more"]:
            break
        params["starting_after"] = part["data"][-1]["id"]
    assert forward == items
    if items:
        back = page(items, {"limit": str(limit), "ending_before": items[-1]["id"]}, url="/")
        assert back["data"] == items[:-1][-limit:]
        assert back["has_more"] == (count - 1 > limit)
