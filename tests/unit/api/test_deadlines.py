from __future__ import annotations

from collections.abc import Mapping

import pytest

from api.admission.deadlines import ENTER, LEAST_S, LEAVE, Queues
from api.errors import BadInput, DeadlinePassed, Unavailable
from api.surfaces.oip import _timeout_s
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
    assert refused.value.code == "overloaded"


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


class Busy:
    """Queues over a pool that serves 100 a second and is never empty."""

    def __init__(self) -> None:
        self.clock, self.reader, self.done = Clock(), FakeReader(), 0
        self.queues = Queues(namespace="", max_queued=10_000, deadline_s=10, clock=self.clock)

    async def waits(self, waiting: int) -> None:
        for _ in range(2):
            self.clock.now_s += 1
            self.done += 100
            self.reader.queues["inference.requests.default.v1"] = queue(waiting, self.done)
            await self.queues.measure(self.reader, ["default"])

    def is_shed(self, within_s: float | None = None) -> bool:
        try:
            self.queues.check("default", within_s=within_s)
        except Unavailable as refused:
            return refused.code == "overloaded"
        return False


@pytest.mark.parametrize(("within_s", "waiting"), [(10, 790), (5, 390), (0.5, 30), (None, 790)])
async def test_a_call_is_refused_when_its_own_time_would_go_by_in_the_queue(
    within_s: float | None, waiting: int
) -> None:
    busy = Busy()
    await busy.waits(waiting)
    assert not busy.is_shed(within_s)
    await busy.waits(waiting + 30)
    assert busy.is_shed(within_s)
    for over_s in (0.0, -1.0):
        with pytest.raises(DeadlinePassed):
            busy.is_shed(over_s)


def test_a_deadline_that_has_passed_is_no_overload() -> None:
    with pytest.raises(DeadlinePassed, match="not accepted"):
        Queues(namespace="", max_queued=100).check("default", within_s=-0.001)


@pytest.mark.parametrize("timeout_us", [1, 9_999])
def test_a_call_that_asks_for_less_time_than_its_admission_takes_is_wrong(timeout_us: int) -> None:
    with pytest.raises(BadInput, match=r"parameters\.timeout: expected at least 10000 microseconds") as refused:
        _timeout_s({"timeout": timeout_us})
    assert refused.value.param == "parameters.timeout"
    assert _timeout_s({"timeout": 10_000}) == LEAST_S


async def test_once_calls_are_shed_they_are_until_the_queue_is_well_shorter() -> None:
    busy = Busy()
    await busy.waits(round(1000 * ENTER) - 10)
    assert not busy.is_shed()
    await busy.waits(round(1000 * ENTER) + 10)
    assert busy.is_shed()
    await busy.waits(round(1000 * LEAVE) + 10)
    assert busy.is_shed()
    await busy.waits(round(1000 * LEAVE) - 10)
    assert not busy.is_shed()
    await busy.waits(round(1000 * ENTER) - 10)
    assert not busy.is_shed()


async def test_a_call_with_little_time_changes_nothing_for_others() -> None:
    busy = Busy()
    await busy.waits(700)
    assert busy.is_shed(1.0)
    assert not busy.is_shed()


async def test_calls_let_in_since_the_reading_are_seen_whatever_came_of_them() -> None:
    busy = Busy()
    await busy.waits(500)
    for _ in range(310):
        with busy.queues.passing("default"):
            pass
    busy.queues._own["default"].answers.clear()
    assert busy.is_shed()
    assert not busy.queues._own["default"].outstanding
    await busy.waits(500)
    assert not busy.is_shed()


async def test_a_call_that_comes_while_the_queue_is_read_is_not_forgotten() -> None:
    busy = Busy()
    await busy.waits(500)
    read = busy.reader.read

    async def slow(groups: Mapping[str, str]) -> dict[str, Queue]:
        found = await read(groups)
        for _ in range(400):
            with busy.queues.passing("default"):
                pass
        return found

    busy.reader.read = slow  # type: ignore[method-assign]
    await busy.waits(500)
    busy.queues._own["default"].answers.clear()
    assert busy.is_shed()


@pytest.mark.parametrize(("waiting", "retry_s"), [(0, "60"), (900, "3"), (610, "1"), (8000, "60")])
async def test_who_is_shed_is_told_when_there_should_be_room(waiting: int, retry_s: str) -> None:
    busy = Busy()
    await busy.waits(waiting or 100)
    if not waiting:  # nothing is known of the rate: the longest time
        busy.queues = Queues(namespace="", max_queued=50, clock=busy.clock)
        await busy.queues.measure(busy.reader, ["default"])
    with pytest.raises(Unavailable) as refused:
        busy.queues.check("default", within_s=1.0)
    assert refused.value.headers["Retry-After"] == retry_s
    assert 1000 <= int(refused.value.headers["retry-after-ms"]) <= 60_000
