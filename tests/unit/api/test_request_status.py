"""What a status read says, from where, and what it reads for that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest

from api.errors import NotFound, Unavailable
from api.results import status as module
from api.results.log import Log
from api.results.readers import AT_ONCE, Readers
from api.results.status import Accepted, RequestStatus
from infra.kafka_lookups import Lookups
from schemas.codec import encode
from schemas.ids import new_request_id
from schemas.keys import RedisKeys
from schemas.records import InferenceFinished, InferenceRequested, Outcome
from schemas.topics import RESULTS, requests_topic
from tests.conditions import eventually
from tests.factories import finished, requested
from tests.fake_log import FakeLog
from tests.fakes import FakeCache
from tests.newer_writer import NewerWriter, forgetful

KEYS = RedisKeys(namespace="")
MINE = "cus_acme"


class Desk:
    """Redis, the log, and the reader of statuses."""

    def __init__(self) -> None:
        self.cache, self.log = FakeCache(), FakeLog()
        self.learnt: Callable[[], None] = lambda: None
        self.lookups = Lookups[Log](self.log.open, most=2)
        self.readers = Readers(self.lookups)
        self.status = RequestStatus(
            self.cache,
            KEYS,
            self.readers,
            namespace="",
            pools=lambda: frozenset({"default", "other"}),
            deadline_s=10.0,
            learn_schemas=self._learn,
        )
        for topic in (RESULTS.name, requests_topic().name):  # so that they are there
            for partition in range(4):
                self.log.add(topic, b"", None, time_ms=now_ms() - 3_600_000, partition=partition)

    async def _learn(self) -> None:
        self.learnt()

    def request(self, *, ago_s: float = 0.0, pool: str = "default", **changes: Any) -> InferenceRequested:
        """One that is on the log, in a partition that only its version decides."""
        made_ms = now_ms() - round(ago_s * 1000)
        at = datetime.fromtimestamp(made_ms / 1000, timezone.utc)
        request = requested(request_id=new_request_id(now_ns=made_ms * 1_000_000), occurred_at=at, **changes)
        self.log.add(requests_topic(pool).name, request.request_id.bytes, encode(request), time_ms=made_ms, partition=3)
        return request

    def finish(self, request: InferenceRequested, *, after_s: float = 0.1, **changes: Any) -> InferenceFinished:
        result = finished(request, **changes)
        at_ms = round((request.occurred_at + timedelta(seconds=after_s)).timestamp() * 1000)
        self.log.add(RESULTS.name, request.request_id.bytes, encode(result), time_ms=at_ms)
        return result

    async def says(self, request_id: UUID, customer_id: str = MINE) -> InferenceFinished | Accepted:
        return await self.status.of(request_id, customer_id)

    async def told(self, request_id: UUID) -> InferenceFinished | Accepted | None:
        """None when it cannot be told now."""
        with suppress(Unavailable):
            return await self.says(request_id)
        return None


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def test_the_copy_comes_first_and_reads_no_log() -> None:
    desk = Desk()
    result = finished(requested(request_id=new_request_id()))
    desk.cache.values[KEYS.result(result.request_id)] = encode(result)
    assert await desk.says(result.request_id) == result
    assert not desk.log.opened


@pytest.mark.parametrize("redis_away", [False, True])
async def test_without_a_copy_the_log_tells_and_the_copy_is_put_back(redis_away: bool) -> None:
    desk = Desk()
    desk.cache.away = redis_away
    for ago_s in (300.0, 200.0, 100.0):
        desk.finish(desk.request(ago_s=ago_s))
    result = desk.finish(desk.request(ago_s=50.0))
    assert await desk.says(result.request_id) == result
    assert len(desk.log.read_offsets) == 1  # nothing of another time
    desk.cache.away = False
    await eventually(lambda: redis_away or KEYS.result(result.request_id) in desk.cache.values)
    assert desk.status.counts["status_not_put_back"] == redis_away


async def test_of_two_records_the_first_is_the_result() -> None:
    desk = Desk()
    request = desk.request()
    first = desk.finish(request, outcome=Outcome.FAILED, error_code="boom", error_message="it failed")
    desk.finish(request)
    assert await desk.says(request.request_id) == first


@pytest.mark.parametrize("where", ["in Redis", "on the log", "unfinished"])
async def test_another_customers_request_is_as_an_unknown_one(where: str) -> None:
    desk = Desk()
    request = desk.request()
    if where == "in Redis":
        desk.cache.values[KEYS.result(request.request_id)] = encode(finished(request))
    if where == "on the log":
        desk.finish(request)
    unknown = new_request_id()
    with pytest.raises(NotFound) as theirs:
        await desk.says(request.request_id, "cus_other")
    with pytest.raises(NotFound) as nobodys:
        await desk.says(unknown, "cus_other")
    told = [str(e.value).replace(str(i), "") for e, i in ((theirs, request.request_id), (nobodys, unknown))]
    assert told[0] == told[1]


async def test_an_unfinished_request_is_accepted_and_asking_again_reads_on_where_it_was() -> None:
    desk = Desk()
    request = desk.request(ago_s=40.0, pool="other")
    for _ in range(20):
        desk.finish(desk.request(ago_s=30.0))
    said = await desk.says(request.request_id)
    assert isinstance(said, Accepted)
    assert (said.model, said.version, said.deadline_at) == (request.model, request.version, request.deadline_at)
    read = len(desk.log.read_offsets)
    assert isinstance(await desk.says(request.request_id), Accepted)
    assert len(desk.log.read_offsets) == read
    with pytest.raises(NotFound):  # also by what is remembered
        await desk.says(request.request_id, "cus_other")
    late = desk.finish(request, after_s=40.0)
    assert await desk.says(request.request_id) == late


@pytest.mark.parametrize(
    "request_id",
    [
        pytest.param(uuid4(), id="no id of ours"),
        pytest.param(new_request_id(now_ns=time.time_ns() + 3600 * 10**9), id="of a later time"),
    ],
)
async def test_what_cannot_be_an_id_costs_no_reading(request_id: UUID) -> None:
    desk = Desk()
    with pytest.raises(NotFound):
        await desk.says(request_id)
    assert not desk.log.opened


async def test_what_cannot_be_told_now_is_never_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    request = desk.request(ago_s=60.0)
    desk.log.away = True
    with pytest.raises(Unavailable, match="ask again"):
        await desk.says(request.request_id)
    desk.log.away = False

    monkeypatch.setattr(module, "WITHIN_S", 0.05)
    monkeypatch.setattr(module, "_SILENCE_S", 0.0)
    desk.log.held.clear()
    with pytest.raises(Unavailable, match="not found within"):
        await desk.says(request.request_id)
    desk.log.held.set()
    monkeypatch.setattr(module, "WITHIN_S", 5.0)

    # More results than one look-up may read: each goes on where the last one stopped.
    monkeypatch.setattr(module, "LOOK_BYTES", 4_000)
    key = request.request_id.bytes
    for _ in range(30):
        desk.log.add(RESULTS.name, key, b"\x00 not a result" + bytes(500), time_ms=now_ms() - 20_000)
    result = desk.finish(request, after_s=45.0)
    refused = 0
    while (said := await desk.told(request.request_id)) is None:
        refused += 1
        assert refused < 10
    assert said == result
    assert refused >= 2
    read = [offset for topic, _, offset in desk.log.read_offsets if topic == RESULTS.name]
    assert len(set(read)) == len(read)


async def test_more_requests_than_may_be_read_are_no_proof_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    monkeypatch.setattr(module, "LOOK_BYTES", 2_000)
    for _ in range(20):
        desk.request()
    with pytest.raises(Unavailable, match="more requests"):
        await desk.says(new_request_id())


async def test_one_customers_misses_leave_a_reader_to_others() -> None:
    desk = Desk()
    request = desk.request(customer_id="cus_other")
    desk.log.held.clear()
    misses = [asyncio.ensure_future(desk.says(new_request_id())) for _ in range(AT_ONCE)]
    await eventually(lambda: desk.status.counts["status_looks"] == 1)
    other = asyncio.ensure_future(desk.says(request.request_id, "cus_other"))
    await eventually(lambda: desk.status.counts["status_looks"] == 2)
    desk.log.held.set()
    assert isinstance(await other, Accepted)
    assert all(isinstance(e, NotFound) for e in await asyncio.gather(*misses, return_exceptions=True))


async def test_the_wait_for_a_reader_takes_nothing_from_the_time_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    request = desk.request()
    monkeypatch.setattr(module, "WITHIN_S", 0.01)
    monkeypatch.setattr(module, "_SILENCE_S", 0.01)
    async with desk.lookups.one(), desk.lookups.one():
        read = asyncio.ensure_future(desk.says(request.request_id))
        asked_s = time.monotonic()
        await eventually(lambda: read.done() or time.monotonic() > asked_s + 0.1)
        # From here on it has all the time, if only its time to read has not begun yet.
        monkeypatch.setattr(module, "WITHIN_S", 60.0)
    assert isinstance(await read, Accepted)


@pytest.mark.parametrize("bound", ["time", "results", "requests", "schema"])
async def test_a_look_up_that_comes_to_a_bound_gives_its_reader_back(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk()
    request = desk.request(ago_s=60.0)
    asked = request.request_id
    if bound == "time":
        desk.log.add(RESULTS.name, asked.bytes, bytes(500), time_ms=now_ms() - 50_000)
        monkeypatch.setattr(module, "WITHIN_S", -1.0)
        monkeypatch.setattr(module, "_SILENCE_S", 60.0)
    if bound == "results":
        for _ in range(9):
            desk.log.add(RESULTS.name, asked.bytes, bytes(500), time_ms=now_ms())
        monkeypatch.setattr(module, "LOOK_BYTES", 1)
    if bound == "requests":
        monkeypatch.setattr(module, "LOOK_BYTES", 1)
        for _ in range(3):
            desk.request()
        asked = new_request_id()
    if bound == "schema":
        asked = new_request_id()
        desk.log.add(requests_topic().name, asked.bytes, b"\x00 not a request", time_ms=now_ms())
    for _ in range(3):
        with pytest.raises(Unavailable, match="ask again"):
            await desk.says(asked)
    assert desk.log.opened == 1


async def test_a_reader_of_a_broker_that_says_nothing_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    request = desk.request()
    for limit in ("WITHIN_S", "_SILENCE_S"):
        monkeypatch.setattr(module, limit, 0.01)
    desk.log.held.clear()
    for _ in range(3):
        with pytest.raises(Unavailable, match="not found within"):
            await desk.says(request.request_id)
    assert desk.log.opened == 3


async def test_records_of_newer_writers_are_read_once_their_schemas_are_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, own = Desk(), forgetful()
    monkeypatch.setattr("schemas.first_results.decode", own.decode)
    monkeypatch.setattr(module, "decode", own.decode)
    request = requested(request_id=new_request_id())
    result = finished(request)
    for record, topic, schema_id in ((request, requests_topic().name, 4711), (result, RESULTS.name, 4712)):
        writer = NewerWriter(record, schema_id=schema_id)
        desk.log.add(topic, request.request_id.bytes, writer.write(encode(record)), time_ms=now_ms())
        if record is request:
            with pytest.raises(Unavailable, match="cannot be read here"):
                await desk.says(request.request_id)
        desk.learnt = lambda published=writer.published: own.learn(published)  # type: ignore[assignment,misc]
        said = await desk.says(request.request_id)
        assert isinstance(said, Accepted) if record is request else said == result
