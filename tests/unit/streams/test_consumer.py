"""Only what the ledger covered is committed, whatever Faust holds for acknowledged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from faust.transport.drivers import aiokafka as kafka_driver
from faust.types import TP

from streams.consumer import LedgerConsumer
from streams.in_hand import InHand
from streams.ledger.footing import Footing
from streams.ledger.stretches import Stretch

AT = TP("t", 0)


class Thread:
    def __init__(self) -> None:
        self.footing = Footing()

    def assignment(self) -> set[TP]:
        return {AT}


def consumer() -> LedgerConsumer:
    made = object.__new__(LedgerConsumer)
    made._thread = Thread()  # type: ignore[assignment]
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


def test_an_offset_of_a_partition_that_is_not_ours_is_not_kept() -> None:
    reader = consumer()
    reader.cover([Stretch(topic="t", partition=5, begin=0, end=4)])
    assert not reader._covered


async def test_a_partition_that_is_taken_away_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = consumer()
    reader.cover([Stretch(topic="t", partition=0, begin=0, end=4)])
    reader.in_hand.take(AT, [SimpleNamespace(offset=9, key=None, value=bytes(100))])
    reader._thread.footing._stands[AT] = 10  # type: ignore[index]
    committed: list[object] = []

    async def revoked(self: LedgerConsumer, _places: object) -> None:
        committed.append(dict(self._covered))

    monkeypatch.setattr(kafka_driver.Consumer, "on_partitions_revoked", revoked)
    await reader.on_partitions_revoked({AT})
    assert committed == [{AT: 4}]  # Faust commits first
    assert not reader._covered
    assert not reader.in_hand.size_bytes
    assert not reader._thread.footing._stands


async def test_what_was_fetched_before_a_seek_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = consumer()
    reader.in_hand.take(AT, [SimpleNamespace(offset=3, key=None, value=bytes(100))])

    async def sought(_self: object) -> None:
        return

    monkeypatch.setattr(kafka_driver.Consumer, "perform_seek", sought)
    await reader.perform_seek()
    assert reader.in_hand.size_bytes == 0
