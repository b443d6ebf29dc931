"""Only what the ledger covered is committed, whatever Faust holds for acknowledged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from faust.transport.drivers import aiokafka as kafka_driver
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


async def test_what_was_fetched_before_a_seek_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = consumer()
    reader.in_hand.take(AT, [SimpleNamespace(offset=3, key=None, value=bytes(100))])

    async def sought(_self: object) -> None:
        return

    monkeypatch.setattr(kafka_driver.Consumer, "perform_seek", sought)
    monkeypatch.setattr(LedgerConsumer, "assignment", lambda _self: {AT})
    await reader.perform_seek()
    assert reader.in_hand.size_bytes == 0
