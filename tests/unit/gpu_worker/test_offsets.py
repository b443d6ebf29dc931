"""The position never passes a record that is not done, and never moves back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.offsets import Watermark


def test_the_position_is_the_lowest_open_offset() -> None:
    mark = Watermark()
    assert mark.to_commit() is None
    for offset in (5, 6, 9):
        mark.read(offset)
    mark.done(6)
    mark.done(9)
    assert mark.position() == 5
    mark.done(5)
    assert mark.position() == 10
    assert len(mark) == 0


def test_what_ended_out_of_order_is_told_from_what_has_not_ended() -> None:
    mark = Watermark()
    for offset in range(5):
        mark.read(offset)
    for offset in (1, 2, 4):
        mark.done(offset)
    assert (len(mark), mark.undone) == (5, 2)
    mark.done(0)
    assert (len(mark), mark.undone) == (2, 1)


def test_a_position_is_committed_once_and_only_forward() -> None:
    mark = Watermark()
    mark.read(0)
    assert mark.to_commit() == 0
    mark.committed(0)
    assert mark.to_commit() is None
    mark.done(0)
    assert mark.to_commit() == 1
    mark.committed(1)
    mark.committed(0)  # an answer that came late
    assert mark.to_commit() is None


def test_offsets_that_were_not_read_or_are_done_are_refused() -> None:
    mark = Watermark()
    mark.read(3)
    with pytest.raises(KeyError):
        mark.done(4)
    mark.done(3)
    with pytest.raises(KeyError):
        mark.done(3)
    with pytest.raises(ValueError, match="arrived after 3"):
        mark.read(3)


@given(st.permutations(range(8)), st.integers(0, 8))
def test_everything_below_the_position_is_done_in_any_order(order: list[int], count: int) -> None:
    mark = Watermark()
    for offset in range(8):
        mark.read(offset)
    for offset in order[:count]:
        mark.done(offset)
    open_ = set(range(8)) - set(order[:count])
    assert mark.position() == min(open_, default=8)
