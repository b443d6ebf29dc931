"""Only what the ledger covered is committed, whatever Faust holds for acknowledged."""

from __future__ import annotations

from faust.types import TP

from streams.consumer import LedgerConsumer
from streams.in_hand import InHand
from streams.stretches import Stretch

AT = TP("t", 0)


def consumer() -> LedgerConsumer:
    made = object.__new__(LedgerConsumer)
    made._covered = {}
    made.in_hand = InHand()
    made._acked = {AT: [7, 8, 9]}
    made._committed_offset = {AT: None}
    return made


def test_what_faust_holds_for_acknowledged_is_never_committed() -> None:
    reader = consumer()
    assert reader._filter_committable_offsets(reader._filter_tps_with_pending_acks()) == {}
    reader.cover([Stretch(topic="t", partition=0, begin=0, end=4)])
    assert reader._filter_committable_offsets(reader._filter_tps_with_pending_acks()) == {AT: 4}
    reader._committed_offset[AT] = 4
    assert reader._filter_committable_offsets(reader._filter_tps_with_pending_acks()) == {}
