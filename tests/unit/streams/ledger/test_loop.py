"""The loop keeps the process and Postgres busy at once, and waits only where nothing is to be gained by going on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from infra.kafka import KafkaError, TopicPartition
from infra.settings import streams_settings
from streams.garbage import collect_seldom
from streams.ledger.delivery import Delivery
from streams.ledger.loop import UsageLoop
from streams.ledger.membership import Membership
from streams.ledger.sorting import STEP_RECORDS
from streams.ledger.stretches import Stretch
from tests.unit.streams.ledger.fake_ledger import FakeLedger
from tests.unit.streams.usage_samples import TOPIC, raw, usage

BATCH = 10
ENV = {
    "INFERLOG_KAFKA_BOOTSTRAP": "127.0.0.1:1",
    "INFERLOG_POSTGRES_DSN": "postgresql://x",
    "INFERLOG_LEDGER_MODE": "loop",
    "INFERLOG_LEDGER_BATCH": str(BATCH),
    "INFERLOG_LEDGER_WAIT_S": "0.05",
}


class Driver:
    """An aiokafka consumer of partitions 0 and 1 that gives each of its `fetches` in turn."""

    def __init__(self, fetches: list[dict[int, range]], *, ends: dict[int, int | None]) -> None:
        self._fetches = fetches
        self._ends = ends
        self._coordinator = None
        self._subscription = SimpleNamespace(subscription=None)
        self.begins = {0: 0, 1: 0}
        self.asked: Callable[[], Awaitable[None]] | None = None

    async def committed(self, tp: TopicPartition) -> int:
        return self.begins[tp.partition]

    async def beginning_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        if self.asked is not None:
            await self.asked()
        return dict.fromkeys(tps, 0)

    def seek(self, _tp: TopicPartition, _offset: int) -> None:
        pass

    def assignment(self) -> set[TopicPartition]:
        return {TopicPartition(TOPIC, p) for p in (0, 1)}

    async def getmany(self, *, timeout_ms: int, max_records: int) -> dict[TopicPartition, list[Any]]:
        fetch = self._fetches.pop(0) if self._fetches else {}
        assert sum(map(len, fetch.values())) <= max_records
        return {
            TopicPartition(TOPIC, p): [
                SimpleNamespace(topic=TOPIC, partition=p, offset=o, key=b"k", value=raw(usage(1000 * p + o), o).value)
                for o in offsets
            ]
            for p, offsets in fetch.items()
        }

    def last_stable_offset(self, tp: TopicPartition) -> int | None:
        return self._ends[tp.partition]

    async def commit(self, _offsets: object) -> None:
        pass


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the process waits for on purpose, in seconds."""
    found: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds:
            found.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return found


def new_loop(ledger: FakeLedger) -> UsageLoop:
    delivery = Delivery(ledger, give_up_s=10.0)
    membership = Membership(group="g", patience_s=60.0)
    return UsageLoop(
        streams_settings(ENV), topic=TOPIC, group="g", delivery=delivery, membership=membership, beacon=None
    )


async def step(driver: Driver) -> FakeLedger:
    """What one step made of the ledger."""
    ledger = FakeLedger()
    loop = new_loop(ledger)
    await loop._footing.begin(driver, driver.assignment())
    await loop._step(driver)
    await loop._written()
    return ledger


async def test_a_short_fetch_is_not_waited_for_while_a_whole_batch_is_on_the_log(pauses: list[float]) -> None:
    ledger = await step(Driver([{0: range(6)}], ends={0: 17, 1: None}))
    assert (ledger.positions, pauses) == ({0: 6}, [])


async def test_at_the_end_of_the_log_what_comes_within_the_wait_is_one_batch(pauses: list[float]) -> None:
    """Markers may lie behind the last record, and are not taken for more of them."""
    ledger = await step(Driver([{0: range(3)}, {}, {1: range(2)}, {0: range(3, 4)}], ends={0: 6, 1: 4}))
    assert (ledger.positions, ledger.counts) == ({0: 4, 1: 2}, 1)
    assert sum(pauses) == pytest.approx(0.05)


async def test_a_batch_that_is_full_is_not_waited_for(pauses: list[float]) -> None:
    ledger = await step(Driver([{0: range(6)}, {0: range(6, 10)}, {1: range(5)}], ends={0: 11, 1: None}))
    assert ledger.positions == {0: 10}
    assert sum(pauses) < 0.05


async def test_nothing_is_waited_for_twice_where_nothing_is(pauses: list[float]) -> None:
    ledger = await step(Driver([], ends={0: 4, 1: 4}))
    assert (ledger.positions, pauses) == ({}, [])


@pytest.mark.usefixtures("pauses")
async def test_what_was_gathered_of_a_partition_that_is_taken_away_is_dropped() -> None:
    """Back from another reader, it goes on from further on; together that would be a hole, which ends the process."""
    ledger = FakeLedger()
    loop, driver = new_loop(ledger), Driver([{0: range(3), 1: range(2)}, {0: range(7, 9)}], ends={0: 9, 1: 2})
    taken = TopicPartition(TOPIC, 0)

    async def taken_away_and_back() -> None:
        await loop.on_partitions_revoked([taken])
        ledger.positions[0] = driver.begins[0] = 7
        await loop._footing.begin(driver, {taken})

    await loop._footing.begin(driver, driver.assignment())
    await loop._fetch(driver, wait_s=0)
    await taken_away_and_back()
    await loop._step(driver)
    await loop._written()
    assert ledger.positions == {0: 9, 1: 2}


@pytest.mark.usefixtures("pauses")
async def test_what_is_taken_away_while_the_reader_asks_what_a_gap_is_does_not_come_back() -> None:
    loop, driver = new_loop(FakeLedger()), Driver([{0: range(3)}, {0: range(5, 6)}], ends={0: 6, 1: 0})
    await loop._footing.begin(driver, driver.assignment())
    await loop._fetch(driver, wait_s=0)
    driver.asked = lambda: loop.on_partitions_revoked([TopicPartition(TOPIC, 0)])
    await loop._fetch(driver, wait_s=0)
    assert loop._gathered == []


async def test_whatever_else_the_process_does_goes_on_while_a_batch_is_decoded() -> None:
    """So the batch before is written meanwhile; a batch that is decoded at a stretch has Postgres wait for it."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    records = [raw(usage(n), n) for n in range(4 * STEP_RECORDS)]
    batch = await Delivery(FakeLedger(), give_up_s=10.0).prepare(records)
    task.cancel()
    assert batch.total == len(records)
    assert turns >= 4


@pytest.fixture
def collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collector")
def test_a_large_batch_is_handled_without_a_look_for_cycles_and_cycles_still_go() -> None:
    collect_seldom()
    before = gc.get_stats()[0]["collections"]
    kept = [raw(usage(1), n) for n in range(10_000)]
    assert gc.get_stats()[0]["collections"] - before <= 1
    assert kept

    class Cycle:
        def __init__(self) -> None:
            self.own = self

    for _ in range(300_000):
        Cycle()
    assert gc.get_stats()[0]["collections"] > before
    assert sum(isinstance(x, Cycle) for x in gc.get_objects()) < 150_000


class Refusing(Driver):
    """As the client: one partition that is not assigned, or a rebalance, and no offset is committed."""

    def __init__(self) -> None:
        super().__init__([], ends={0: None, 1: None})
        self.mine = {TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)}
        self.rebalancing = True
        self.offsets: dict[TopicPartition, int] = {}

    def assignment(self) -> set[TopicPartition]:
        return self.mine

    async def commit(self, offsets: Any) -> None:
        if self.rebalancing or not offsets.keys() <= self.mine:
            raise KafkaError("not now")
        self.offsets |= offsets

    async def committed(self, _tp: TopicPartition) -> int:
        raise KafkaError("no answer")


async def test_a_commit_that_failed_does_not_hold_up_those_to_come() -> None:
    loop, driver = new_loop(FakeLedger()), Refusing()
    loop._consumer = driver
    loop._cover([Stretch(topic=TOPIC, partition=p, begin=0, end=5) for p in (0, 1)])
    await loop._commit(driver)
    driver.mine, driver.rebalancing = {TopicPartition(TOPIC, 1)}, False
    await loop._commit(driver)
    assert driver.offsets == {TopicPartition(TOPIC, 1): 5}


@pytest.mark.usefixtures("pauses")
async def test_an_assignment_that_does_not_begin_where_it_should_ends_the_process() -> None:
    """The client only logs what its listener raises, and would read on from wherever it stood."""
    loop, driver = new_loop(FakeLedger()), Refusing()
    loop._consumer = driver
    await loop.on_partitions_assigned([TopicPartition(TOPIC, 0)])
    with pytest.raises(KafkaError, match="no answer"):
        await loop._step(driver)
