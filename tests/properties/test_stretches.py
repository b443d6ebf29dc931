"""A reader that skips is found out, wherever batches end; one that goes back or meets a gap in the log is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.ledger.raw import RawRecord
from streams.ledger.stretches import Skipped, following, stretches


class Fetched:
    def __init__(self, offset: int) -> None:
        self.offset = offset


def read(offsets: list[int], stood: int) -> list[RawRecord]:
    """What a reader that stood there hands on of these records."""
    return [
        RawRecord(topic="t", partition=0, offset=r.offset, follows=follows, key=None, value=None)
        for follows, r in following([Fetched(o) for o in offsets], stood)
    ]


#: Offsets of a log with holes where markers were, in order.
logs = st.lists(st.integers(0, 60), min_size=1, unique=True).map(sorted)


def advanced(position: int, batch: list[RawRecord]) -> int:
    """The position after this batch, by the rule of the ledger's statement. Raises Skipped."""
    for stretch in stretches(batch):
        if stretch.begin > position:
            raise Skipped(f"begins at {stretch.begin}, past {position}")
        position = max(position, stretch.end)
    return position


def cut(records: list[RawRecord], sizes: list[int]) -> list[list[RawRecord]]:
    batches, at = [], 0
    for size in [*sizes, len(records)]:
        batches.append(records[at : at + size])
        at += size
    return [b for b in batches if b]


sizes = st.lists(st.integers(1, 9), max_size=8)


@given(logs, sizes, st.data())
def test_reading_in_order_and_again_from_anywhere_read_is_accepted(
    log: list[int], sizes: list[int], data: st.DataObject
) -> None:
    once = read(log, 0)
    back = data.draw(st.integers(0, len(log)))
    stood = 0 if back == 0 else log[back - 1] + 1
    position = 0
    for batch in cut([*once, *read(log[back:], stood)], sizes):
        position = advanced(position, batch)
    assert position == log[-1] + 1


@given(logs, sizes, st.data())
def test_one_record_left_out_is_noticed_before_anything_after_it_is_kept(
    log: list[int], sizes: list[int], data: st.DataObject
) -> None:
    records = read(log, 0)
    if len(log) < 2:
        return
    lost = data.draw(st.integers(0, len(log) - 2))
    kept = records[:lost] + records[lost + 1 :]
    position = 0
    try:
        for batch in cut(kept, sizes):
            position = advanced(position, batch)
    except Skipped:
        assert position <= log[lost]
    else:
        pytest.fail("the record that was left out was not missed")


@given(logs, sizes, st.data())
def test_going_back_does_not_hide_what_was_left_out(log: list[int], sizes: list[int], data: st.DataObject) -> None:
    """The ledger is below the first record that this reader has, which goes back in the same batch."""
    begin = data.draw(st.integers(1, len(log)))
    position = data.draw(st.integers(0, log[begin - 1]))  # that record, and perhaps more before it, was not counted
    after = read(log[begin:], log[begin - 1] + 1)
    back = data.draw(st.integers(0, begin - 1))
    again = read(log[:back], 0)
    if not after:
        return
    with pytest.raises(Skipped):
        advanced(position, [*after, *again])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000)), min_size=1))
def test_the_end_is_one_past_the_highest_offset_of_each_partition(places: list[tuple[int, int]]) -> None:
    records = [RawRecord(topic="t", partition=p, offset=o, follows=0, key=None, value=None) for p, o in places]
    found = {s.partition: s.end for s in stretches(records)}
    assert found == {p: 1 + max(o for q, o in places if q == p) for p, _ in places}
