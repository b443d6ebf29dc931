from __future__ import annotations

from collections.abc import Mapping

import pytest

from api.admission.deadlines import PoolQueue, Queues, measured, retry_in_s
from api.errors import Unavailable
from infra.kafka import BusUnavailable
from infra.lag import Queue
from tests.fakes import Clock


class FakeReader:
    def __init__(self) -> None:
        self.queues: dict[str, Queue] = {}
        self.asked: Mapping[str, str] = {}
        self.away = False

    async def read(self, groups: Mapping[str, str]) -> dict[str, Queue]:
        if self.away:
            raise BusUnavailable("switched off")
        self.asked = groups
        return {topic: queue for topic, queue in self.queues.items() if topic in groups}


def queue(waiting: int, done: int) -> Queue:
    return Queue(partitions=8, waiting=waiting, done=done)


def pool_queue(waiting: int, served_per_s: float) -> PoolQueue:
    return PoolQueue(partitions=8, waiting=waiting, done=0, served_per_s=served_per_s, measured_s=0)


async def test_a_long_queue_is_shed_with_the_time_it_needs_to_drain() -> None:
    clock, reader = Clock(), FakeReader()
    queues = Queues(namespace="n", max_queued=100, clock=clock)
    reader.queues["n.inference.requests.default.v1"] = queue(waiting=50, done=1000)
    await queues.measure(reader, ["default"])
    assert queues.check("default") is not None
    assert reader.asked == {"n.inference.requests.default.v1": "n.workers.default"}
    clock.now_s += 1
    reader.queues["n.inference.requests.default.v1"] = queue(waiting=101, done=1010)
    await queues.measure(reader, ["default"])
    with pytest.raises(Unavailable, match="101 requests wait") as refused:
        queues.check("default")
    assert refused.value.headers["Retry-After"] == "6"  # 51 too many at 10 a second


async def test_a_pool_whose_topic_is_absent_is_refused_by_name() -> None:
    reader = FakeReader()
    queues = Queues(namespace="", max_queued=100)
    reader.queues["inference.requests.default.v1"] = queue(0, 0)
    await queues.measure(reader, ["default", "gpu-a"])
    queues.check("default")
    with pytest.raises(Unavailable, match="'gpu-a'"):
        queues.check("gpu-a")


async def test_an_unmeasured_pool_is_let_through_because_publishing_decides() -> None:
    queues = Queues(namespace="", max_queued=100)
    assert queues.check("default") is None
    assert queues.trouble() is not None


async def test_health_needs_a_recent_measurement() -> None:
    clock, reader = Clock(), FakeReader()
    queues = Queues(namespace="", max_queued=100, clock=clock)
    await queues.measure(reader, [])
    assert queues.trouble() is None
    clock.now_s += 6
    assert queues.trouble() is not None


def test_the_service_rate_is_averaged() -> None:
    first = measured(None, queue(10, 100), at_s=0)
    assert first.served_per_s == 0
    second = measured(first, queue(10, 160), at_s=2)
    assert second.served_per_s == 30
    third = measured(second, queue(10, 160), at_s=3)
    assert third.served_per_s == pytest.approx(20)


def test_retry_stays_within_sane_bounds() -> None:
    assert retry_in_s(pool_queue(200, 0), max_queued=100) == 60
    assert retry_in_s(pool_queue(200, 1e9), max_queued=100) == 1
    assert retry_in_s(pool_queue(10_000, 1), max_queued=100) == 60
