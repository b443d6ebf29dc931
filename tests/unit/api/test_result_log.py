"""Which results a gateway finds on the log for its waiting calls, and what it reads for that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from api.results import result_log as module
from api.results.result_log import ResultLog
from infra.kafka import partition_of_key
from schemas.codec import encode
from schemas.first_results import Recorded
from schemas.ids import new_request_id
from schemas.records import InferenceFinished, Outcome
from tests.conditions import eventually
from tests.factories import finished, requested
from tests.fake_log import FakeLog, result_log
from tests.newer_writer import NewerWriter, forgetful

TOPIC = "results"


class Desk:
    """A log, and who waits for results of it."""

    def __init__(self, log: FakeLog, results: ResultLog) -> None:
        self.log = log
        self.results = results
        self.found: dict[bytes, tuple[InferenceFinished, bool]] = {}
        results.deliver_to(self._deliver)

    def _deliver(self, key: bytes, found: Recorded, is_needed: bool) -> None:
        assert key not in self.found, "told twice"
        self.found[key] = (found.finished, is_needed)

    def add(self, result: InferenceFinished, *, ago_ms: int = 0, value: bytes | None = None) -> None:
        key = result.request_id.bytes
        self.log.add(TOPIC, key, encode(result) if value is None else value, time_ms=now_ms() - ago_ms)

    def expect(self, result: InferenceFinished, *, ago_ms: int = 0, is_new: bool = True) -> bytes:
        key = result.request_id.bytes
        self.results.expect(key, since_ms=now_ms() - ago_ms, is_new=is_new)
        return key

    def is_followed_to_the_end(self) -> bool:
        heads = self.results._heads
        return bool(heads) and all(head == len(self.log.places(TOPIC)[p]) for p, head in heads.items())

    async def finds(self, result: InferenceFinished) -> bool:
        """Whether it is told; its being needed is told with it."""
        found, is_needed = await eventually(lambda: self.found.get(result.request_id.bytes))
        assert found == result
        return bool(is_needed)


@asynccontextmanager
async def open_desk(log: FakeLog | None = None, **options: Any) -> AsyncIterator[Desk]:
    log = log or FakeLog()
    results = result_log(log, topic=TOPIC, **options)
    tasks = [asyncio.ensure_future(loop) for loop in (results.follow(), results.look())]
    yield Desk(log, results)
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def a_result(**changes: Any) -> InferenceFinished:
    return finished(requested(request_id=new_request_id()), **changes)


def neighbour(result: InferenceFinished, log_partitions: int = 4, **changes: Any) -> InferenceFinished:
    """A result in the same partition."""
    while True:
        other = a_result(**changes)
        keys = (result.request_id.bytes, other.request_id.bytes)
        if len({partition_of_key(k, log_partitions) for k in keys}) == 1:
            return other


async def test_what_came_before_it_was_needed_is_looked_for_from_its_time_on() -> None:
    result = a_result()
    async with open_desk() as desk:
        for _ in range(20):
            desk.add(neighbour(result), ago_ms=60_000)
        desk.expect(result, ago_ms=1_000)
        desk.add(result, ago_ms=900)
        for _ in range(20):
            desk.add(neighbour(result), ago_ms=100)
        assert not desk.log.opened  # nobody needs anything: nothing is read
        desk.results.need(result.request_id.bytes)
        assert await desk.finds(result)
        assert len(desk.log.read_offsets) == 1  # nothing older, and nothing behind it


async def test_what_is_still_to_come_is_found_as_it_comes_and_what_is_awaited_next_without_a_look() -> None:
    result = a_result()
    async with open_desk() as desk:
        desk.add(neighbour(result), ago_ms=60_000)
        desk.expect(result)
        desk.results.need(result.request_id.bytes)
        await eventually(lambda: desk.results.counts["result_log_looks"])
        desk.add(result)
        assert await desk.finds(result)
        for _ in range(5):
            other = neighbour(result)
            desk.expect(other)
            desk.add(other)
            assert not await desk.finds(other)  # on the way, before anybody needed it
        assert desk.results.counts["result_log_looks"] == 1


async def test_the_first_record_counts_also_when_the_second_is_seen_before_it() -> None:
    first = a_result(outcome=Outcome.FAILED, error_code="boom", error_message="it failed")
    second = replace(finished(requested(request_id=first.request_id)), customer_id=first.customer_id)
    async with open_desk() as desk:
        other = neighbour(first)
        desk.add(other, ago_ms=60_000)
        desk.expect(other)
        desk.results.need(other.request_id.bytes)  # so that their partition is followed
        await eventually(lambda: desk.results.counts["result_log_looks"])
        desk.log.held.clear()
        desk.add(first, ago_ms=10)
        await eventually(desk.is_followed_to_the_end)
        key = desk.expect(first, is_new=False)
        desk.results.need(key)
        desk.add(second)
        await eventually(desk.is_followed_to_the_end)
        assert not desk.found
        desk.log.held.set()
        await desk.finds(first)


async def test_of_records_that_do_not_decode_or_are_of_another_request_the_next_counts() -> None:
    result = a_result()
    async with open_desk() as desk:
        key = desk.expect(result)
        desk.add(result, value=b"\x00junk")
        desk.add(result, value=encode(a_result()))
        desk.add(result, value=b"")
        desk.add(result)
        desk.results.need(key)
        await desk.finds(result)


@pytest.mark.parametrize("by", ["the look", "following"])
async def test_an_outage_is_waited_out_and_said(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROBE_S", 0.02)
    result, log = a_result(), FakeLog()
    async with open_desk(log) as desk:
        key = desk.expect(result)
        desk.add(a_result(), ago_ms=60_000)
        if by == "the look":
            log.away = True
            desk.add(result)
        desk.results.need(key)
        if by == "following":
            await eventually(lambda: desk.results.counts["result_log_looks"])
            log.away = True
            desk.add(result)
        await eventually(lambda: desk.results.trouble() is not None)
        assert desk.results.away_s() > 0
        log.away = False
        await desk.finds(result)
        await eventually(lambda: desk.results.trouble() is None)


async def test_an_outage_leaves_nothing_behind_of_calls_that_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.001)
    log = FakeLog()
    async with open_desk(log) as desk:
        log.away = True
        for _ in range(50):
            key = desk.expect(a_result())
            desk.results.need(key)
            desk.results.forget(key)
        await eventually(lambda: desk.results.counts["result_log_failures"])
        await eventually(lambda: not desk.results._unplaced)
        assert not desk.results._awaited._all
        assert desk.results.trouble() is None  # nobody asks


async def test_nothing_of_what_is_no_longer_awaited_is_left_and_its_partition_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LINGER_S", 0.02)
    result, log = a_result(), FakeLog()
    async with open_desk(log) as desk:
        desk.add(neighbour(result), ago_ms=60_000)
        for ids in ([result], [neighbour(result)]):
            for one in ids:
                desk.results.need(desk.expect(one))
            await eventually(lambda: desk.results.counts["result_log_looks"] >= 1)
            for one in ids:
                desk.results.forget(one.request_id.bytes)
            await eventually(lambda: not desk.results._followed)
        desk.add(result)
        assert not desk.found
        assert not desk.results._awaited.needed


async def test_a_look_ends_at_its_bound_and_what_still_comes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_BYTES", 1000)
    result = a_result()
    async with open_desk() as desk:
        for _ in range(20):
            desk.add(neighbour(result), ago_ms=500)
        key = desk.expect(result, ago_ms=1_000)
        desk.results.need(key)
        await eventually(lambda: desk.results.counts["result_log_given_up"])
        assert len(desk.log.read_offsets) < 10
        desk.add(result)
        await desk.finds(result)


async def test_many_of_one_time_are_found_in_one_reading() -> None:
    first = a_result()
    ids = [first, *(neighbour(first) for _ in range(9))]
    async with open_desk() as desk:
        for one in ids:
            desk.expect(one, ago_ms=1_000)
            desk.add(one, ago_ms=900)
        for one in ids:
            desk.results.need(one.request_id.bytes)
        for one in ids:
            await desk.finds(one)
        assert desk.results.counts["result_log_looks"] == 1
        assert len(desk.log.read_offsets) == len(ids)


class NewerSchemas:
    """Implements Schemas."""

    def __init__(self) -> None:
        self.asked = 0
        self.learnt = False

    def ask(self) -> int:
        self.asked += 1
        return self.asked

    def answered(self, number: int) -> bool:
        return self.learnt


async def test_a_result_of_a_newer_worker_waits_for_its_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    own, result, schemas = forgetful(), a_result(), NewerSchemas()
    monkeypatch.setattr("schemas.first_results.decode", own.decode)
    writer = NewerWriter(result)
    async with open_desk(schemas=schemas) as desk:
        key = desk.expect(result)
        desk.add(result, value=writer.write(encode(result)))
        desk.results.need(key)
        await eventually(lambda: schemas.asked)
        assert not desk.found
        own.learn(writer.published)
        schemas.learnt = True
        await desk.finds(result)
