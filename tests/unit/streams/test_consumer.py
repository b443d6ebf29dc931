"""Only what the ledger covered is committed, and only what follows the last assignment is handed to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from faust.transport.drivers import aiokafka as kafka_driver
from faust.types import TP

from streams.agents import raw_record
from streams.consumer import LedgerConsumer
from streams.in_hand import InHand
from streams.ledger.footing import Fetch, Footing
from streams.ledger.stretches import Skipped, Stretch, stretches

AT = TP("t", 0)


class Thread:
    """The thread that fetches, with a driver that gives what the test says of partition 0, committed up to a place."""

    def __init__(self) -> None:
        self.footing = Footing()
        self.committed_at = 0
        self.fetch: range = range(0)

    def assignment(self) -> set[TP]:
        return {AT}

    async def committed(self, _tp: object) -> int:
        return self.committed_at

    async def beginning_offsets(self, tps: list[TP]) -> dict[TP, int]:
        return dict.fromkeys(tps, 0)

    def seek(self, _tp: object, _offset: int) -> None:
        pass

    async def begin(self, committed_at: int) -> None:
        """The partition is assigned."""
        self.committed_at = committed_at
        await self.footing.begin(self, {AT})

    async def getmany(self, _active: object, _timeout: float) -> dict[TP, Fetch]:
        records = [
            SimpleNamespace(
                topic="t",
                partition=0,
                offset=o,
                timestamp=1,
                timestamp_type=0,
                headers=(),
                key=b"",
                value=b"",
                checksum=None,
                serialized_key_size=0,
                serialized_value_size=0,
            )
            for o in self.fetch
        ]
        return await self.footing.follow(self, {AT: records})


def consumer() -> LedgerConsumer:
    made = object.__new__(LedgerConsumer)
    made._thread = Thread()  # type: ignore[assignment]
    made._covered = {}
    made._epochs = {}
    made.app = SimpleNamespace(consumer_generation_id=1)
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


class Events:
    """What a stream has gathered for its next batch: events of all that a consumer handed over."""

    def __init__(self, reader: LedgerConsumer) -> None:
        self._reader = reader
        self.gathered: list[Any] = []

    async def take(self, offsets: range) -> None:
        thread: Any = self._reader._thread
        thread.fetch = offsets
        for tp, records in (await self._reader._getmany(None, 0)).items():
            self.gathered += [SimpleNamespace(message=self._reader._to_message(tp, r)) for r in records]

    def batch(self) -> list[Any]:
        gathered, self.gathered = self.gathered, []
        return [raw_record(e) for e in self._reader.present(gathered)]


async def test_a_batch_holds_nothing_from_before_a_partition_went_away_and_came_back() -> None:
    """Another reader had it meanwhile and came further: together the two would be a batch with a hole."""
    reader = consumer()
    events, thread = Events(reader), cast(Thread, reader._thread)
    await thread.begin(0)
    await events.take(range(5))
    thread.footing.forget({AT})
    await thread.begin(9)
    await events.take(range(9, 12))
    with pytest.raises(Skipped):
        stretches([raw_record(e) for e in events.gathered])
    assert stretches(events.batch()) == [Stretch(topic="t", partition=0, begin=9, end=12)]


async def test_of_a_partition_that_is_gone_nothing_is_left_to_be_counted() -> None:
    reader = consumer()
    events, thread = Events(reader), cast(Thread, reader._thread)
    await thread.begin(0)
    await events.take(range(5))
    thread.footing.forget({AT})
    assert events.batch() == []


async def test_what_a_new_beginning_overtook_on_its_way_is_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faust would take it for where the reader is, and drop the records from the new beginning to there."""
    reader = consumer()
    events, thread = Events(reader), cast(Thread, reader._thread)
    await thread.begin(9)
    there = thread.getmany

    async def overtaken(active: object, timeout: float) -> dict[TP, Fetch]:
        found = await there(active, timeout)
        await thread.begin(0)
        return found

    monkeypatch.setattr(thread, "getmany", overtaken)
    await events.take(range(9, 12))
    assert (events.gathered, reader.in_hand.size_bytes) == ([], 0)
