"""What is inherited, and which of the results on the log is a request's: decisions only, no log."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.endings import Ended, as_of
from gpu_worker.held import Bounds, Held
from gpu_worker.ports import Delivery
from gpu_worker.recovery import SLACK_MS, FirstResults, Recorded, inherited
from schemas.codec import encode
from schemas.records import InferenceRequested, Outcome
from tests.factories import NOON, finished, requested
from tests.newer_writer import NewerWriter, forgetful


@pytest.mark.parametrize(
    ("committed", "begin", "end", "found"),
    [
        pytest.param(5, 0, 9, range(5, 9), id="what was not committed"),
        pytest.param(9, 0, 9, range(9, 9), id="nothing"),
        pytest.param(None, 3, 9, range(3, 9), id="no owner ever committed"),
        pytest.param(None, 0, 0, range(0), id="a new partition"),
        pytest.param(2, 4, 9, range(4, 9), id="some of it was removed by retention"),
        pytest.param(12, 0, 9, range(12, 12), id="a log that lost its end"),
        pytest.param(5, 0, 1000, range(5, 105), id="no further than an owner can have come"),
    ],
)
def test_inherited_is_what_lies_past_the_groups_position(
    committed: int | None, begin: int, end: int, found: range
) -> None:
    assert inherited(committed, begin=begin, end=end, reach=100) == found


@given(
    st.none() | st.integers(0, 500), st.integers(0, 100), st.integers(0, 500), st.integers(0, 50), st.integers(0, 600)
)
def test_every_record_that_an_owner_can_have_ended_is_inherited(
    committed: int | None, begin: int, length: int, reach: int, offset: int
) -> None:
    end = begin + length
    position = begin if committed is None else committed
    span = inherited(committed, begin=begin, end=end, reach=reach)
    if max(position, begin) <= offset < min(end, position + reach):
        assert offset in span
    assert len(span) <= reach


def test_the_first_result_of_each_request_is_found_and_nothing_else() -> None:
    mine, open_, foreign = requested(), requested(), requested()
    first, second = encode(finished(mine, outcome=Outcome.EXPIRED)), encode(finished(mine))
    results = FirstResults()
    results.look_for(mine.request_id.bytes, 70_000, partition=0)
    results.look_for(open_.request_id.bytes, 60_000, partition=1)
    results.look_for(b"k", 1, partition=2)
    results.look_for(None, 1, partition=2)
    assert results.since_ms == 60_000 - SLACK_MS
    results.offer(foreign.request_id.bytes, encode(finished(foreign)))
    results.offer(mine.request_id.bytes, b"not a record")
    results.offer(mine.request_id.bytes, None)
    results.offer(mine.request_id.bytes, encode(finished(foreign)))  # another request's under this one's key
    results.offer(mine.request_id.bytes, first)
    results.offer(mine.request_id.bytes, second)
    assert set(results.found) == {mine.request_id.bytes}
    recorded = results.found[mine.request_id.bytes]
    assert (recorded.framed, recorded.finished.outcome) == (first, Outcome.EXPIRED)
    assert results.unlearnt == frozenset()


def test_results_of_unknown_schemas_count_in_their_place_once_it_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, writer = forgetful(), NewerWriter(finished())
    monkeypatch.setattr("schemas.first_results.decode", codec.decode)
    mine, nowhere, known = requested(), requested(), requested()
    results = FirstResults()
    for request, partitions in ((mine, (3, 5)), (nowhere, (70,)), (known, (1,))):
        for partition in partitions:
            results.look_for(request.request_id.bytes, 1, partition=partition)
    first = writer.write(encode(finished(mine, outcome=Outcome.EXPIRED)))
    for value in (first, encode(finished(mine))):
        results.offer(mine.request_id.bytes, value)
    results.offer(nowhere.request_id.bytes, NewerWriter(finished(), schema_id=4712).write(encode(finished(nowhere))))
    results.offer(known.request_id.bytes, encode(finished(known)))
    assert (set(results.found), results.unlearnt) == ({known.request_id.bytes}, {3, 5, 70})
    codec.learn(writer.published)
    results.look_again()
    assert set(results.found) == {known.request_id.bytes, mine.request_id.bytes}
    assert results.found[mine.request_id.bytes].framed == first
    assert results.unlearnt == frozenset()


def test_nothing_looked_for_is_nothing_to_read() -> None:
    assert FirstResults().since_ms is None


def delivery(offset: int, request: InferenceRequested | None = None) -> Delivery:
    return Delivery(request=request or requested(), partition=0, offset=offset, generation=1, size_bytes=1)


def test_results_are_forgotten_once_everything_inherited_has_ended() -> None:
    held = Held(generation=1)
    request = requested()
    held.watermark.read(0)
    recorded = Recorded(finished=finished(request), framed=b"framed")
    held.settle(range(1), {request.request_id.bytes: recorded})
    (known,) = held.admit([delivery(0, request)])
    assert known.ended is not None
    held.watermark.done(0)
    held.admit()
    held.watermark.read(1)
    (later,) = held.admit([delivery(1, request)])
    assert later.ended is None


def test_a_partition_has_too_much_by_what_is_open_or_by_what_lies_ahead() -> None:
    bounds = Bounds(records_per_partition=4, records_ahead=8)
    held = Held(generation=1)
    for offset in range(4):
        held.watermark.read(offset)
    assert held.too_much(bounds)
    for offset in range(1, 4):
        held.watermark.done(offset)
    assert held.little_enough(bounds)
    for offset in range(4, 8):
        held.watermark.read(offset)
        held.watermark.done(offset)
    assert held.too_much(bounds)
    held.watermark.done(0)
    assert held.little_enough(bounds)


def test_no_record_past_the_reach_can_have_ended() -> None:
    bounds = Bounds()
    assert bounds.reach >= bounds.records_ahead + bounds.records_per_poll


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
def test_past_the_deadline_there_is_one_outcome(outcome: Outcome) -> None:
    end = Ended(finished=finished(outcome=outcome), reply_to="a", deadline_at=NOON + timedelta(seconds=10))
    assert as_of(end, NOON + timedelta(seconds=9.999)) is end
    late = as_of(end, end.deadline_at).finished
    assert (late.outcome, late.outputs, late.quantities) == (Outcome.EXPIRED, (), {})
    assert (late.request_id, late.version, late.batch_id) == (
        end.finished.request_id,
        end.finished.version,
        end.finished.batch_id,
    )
    on_the_log = replace(end, logged=b"bytes")
    assert as_of(on_the_log, end.deadline_at) is on_the_log
