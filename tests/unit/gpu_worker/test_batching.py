"""Each reason for which a batch closes, and what decides who may run with whom."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from gpu_worker.batching import Batcher, Closed, Limits, Waiting, band_tokens, waiting
from schemas.records import InferenceRequested, Task
from schemas.tensors import Tensor, bytes_tensor
from tests.factories import NOON, requested

LIMITS = Limits(max_items=4, max_cost_bytes=100, linger_s=0.010, deadline_margin_s=0.050)
ONE: Waiting[str] = Waiting(what="x", version="v", lane=0, items=1, cost_bytes=1, arrived_s=10.0, deadline_s=20.0)


def every(_: str) -> bool:
    return True


def filled(*waiting: Waiting[str], idle: bool = False) -> Batcher[str]:
    batcher: Batcher[str] = Batcher(LIMITS)
    for one in waiting:
        batcher.add(one, idle=idle)
    return batcher


def test_a_request_that_meets_an_idle_device_runs_at_once() -> None:
    batch = filled(ONE, idle=True).take(10.0, ready=every)
    assert batch is not None
    assert batch.closed is Closed.IDLE


def test_a_request_that_meets_a_busy_device_waits_from_its_own_arrival() -> None:
    batcher = filled(ONE, replace(ONE, what="later", arrived_s=10.009))
    assert batcher.next_at_s(ready=every) == pytest.approx(10.010)
    assert batcher.take(10.009, ready=every) is None
    batch = batcher.take(10.010, ready=every)
    assert batch is not None
    assert (batch.closed, batch.members) == (Closed.LINGER, ("x", "later"))


@pytest.mark.parametrize(
    ("waits", "closed", "taken"),
    [
        pytest.param([ONE] * 5, Closed.FULL, 4, id="items"),
        pytest.param([replace(ONE, items=3), replace(ONE, items=2)], Closed.FULL, 1, id="items of the next"),
        pytest.param([replace(ONE, cost_bytes=60)] * 2, Closed.COST, 1, id="cost"),
        pytest.param([replace(ONE, items=9), ONE], Closed.FULL, 1, id="one alone over the bound"),
        pytest.param([replace(ONE, deadline_s=10.04)], Closed.DEADLINE, 1, id="deadline"),
    ],
)
def test_a_batch_closes_before_its_linger(waits: list[Waiting[str]], closed: Closed, taken: int) -> None:
    batch = filled(*waits).take(10.0, ready=every)
    assert batch is not None
    assert (batch.closed, len(batch.members)) == (closed, taken)


def test_what_is_left_behind_waits_for_company_again() -> None:
    batcher = filled(*[replace(ONE, arrived_s=10.0)] * 4, replace(ONE, arrived_s=10.005), idle=True)
    assert batcher.take(10.005, ready=every) is not None
    assert batcher.take(10.005, ready=every) is None
    assert batcher.next_at_s(ready=every) == pytest.approx(10.015)


def test_the_lane_that_waited_longest_goes_first() -> None:
    batcher = filled(replace(ONE, version="b", arrived_s=10.001), replace(ONE, version="a", arrived_s=10.0))
    batch = batcher.take(10.5, ready=every)
    assert batch is not None
    assert batch.version == "a"


def test_a_version_that_is_not_ready_holds_nobody_up_and_still_expires() -> None:
    batcher = filled(replace(ONE, version="loading", deadline_s=10.5), replace(ONE, what="y", arrived_s=10.1))
    batch = batcher.take(10.2, ready=lambda version: version != "loading")
    assert batch is not None
    assert batch.members == ("y",)
    assert batcher.expired(10.5) == ["x"]
    assert len(batcher) == 0


def test_a_deadline_that_has_come_is_not_started() -> None:
    batcher = filled(replace(ONE, deadline_s=10.0), replace(ONE, what="y"))
    assert batcher.expired(10.0) == ["x"]


def text_of(size_bytes: int) -> InferenceRequested:
    return requested(task=Task.EMBEDDINGS, inputs=(bytes_tensor("text", [b"a" * size_bytes]),))


@pytest.mark.parametrize(("size_bytes", "tokens"), [(0, 16), (56, 16), (60, 32), (1000, 256), (10**6, 512)])
def test_texts_of_like_length_share_a_band(size_bytes: int, tokens: int) -> None:
    assert band_tokens(size_bytes) == tokens
    assert waiting("x", text_of(size_bytes), arrived_s=0).lane == tokens


def test_a_long_text_never_pads_a_short_one() -> None:
    short, long = (waiting("x", text_of(n), arrived_s=0) for n in (20, 2000))
    assert short.lane != long.lane


def test_the_longest_text_of_a_request_sets_what_all_its_texts_cost() -> None:
    request = requested(task=Task.EMBEDDINGS, inputs=(bytes_tensor("text", [b"a", b"a" * 1000]),), item_count=2)
    assert waiting("x", request, arrived_s=0).cost_bytes == 2 * 256 * 2048


def test_tensors_share_a_lane_when_their_items_have_one_shape() -> None:
    def of(rows: int, width: int) -> Waiting[str]:
        tensor = Tensor(name="x", datatype="FP32", shape=(rows, width), data=bytes(4 * rows * width))
        return waiting("x", requested(inputs=(tensor,), item_count=rows), arrived_s=0)

    assert of(1, 4).lane == of(3, 4).lane != of(1, 5).lane
    assert of(3, 4).cost_bytes == 48


def test_the_deadline_is_the_one_of_the_request() -> None:
    request = requested(deadline_at=NOON + timedelta(seconds=3))
    assert waiting("x", request, arrived_s=0).deadline_s == NOON.timestamp() + 3
