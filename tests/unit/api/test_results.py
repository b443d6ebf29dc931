from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from api.errors import AnswerLost, ApiError, DeadlinePassed
from api.results import waiting as module
from api.results.cache import CacheAway
from api.results.log import Schemas
from api.results.result_log import ResultLog
from api.results.waiting import Results, Waiter
from schemas.codec import encode
from schemas.ids import new_request_id
from schemas.keys import RedisKeys
from schemas.records import InferenceFinished
from tests.conditions import eventually
from tests.factories import finished, requested
from tests.fake_log import FakeLog, result_log
from tests.fakes import FakeCache
from tests.newer_writer import NewerWriter, forgetful

KEYS = RedisKeys(namespace="n")


@asynccontextmanager
async def running(
    cache: FakeCache, schemas: Schemas | None = None, log: ResultLog | None = None
) -> AsyncIterator[Results]:
    found_by = log or result_log()
    results = Results(cache, KEYS, found_by, instance="api-1", schemas=schemas)
    loops = [results.listen(), results.sweep(), *((found_by.follow(), found_by.look()) if log else ())]
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    await eventually(lambda: cache.subscriptions)
    yield results
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def a_result(**changes: Any) -> InferenceFinished:
    return finished(requested(request_id=new_request_id()), **changes)


def put(cache: FakeCache, result: InferenceFinished) -> None:
    cache.values[KEYS.result(result.request_id)] = encode(result)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def answer(results: Results, waiter: Waiter, within_s: float = 20.0) -> InferenceFinished:
    try:
        return await results.wait(waiter, within_s=within_s)
    finally:
        results.forget(waiter)


async def test_a_hint_delivers_every_result_it_names() -> None:
    cache, found = FakeCache(), [a_result() for _ in range(3)]
    async with running(cache) as results:
        waiters = [results.expect(r.request_id, r.customer_id) for r in found]
        for r in found:
            put(cache, r)
        cache.hints.put_nowait(b"".join(r.request_id.bytes for r in found) + new_request_id().bytes)
        assert await asyncio.gather(*(answer(results, w) for w in waiters)) == found
        assert results.waiting == 0


async def test_a_lost_hint_is_made_good_by_reading_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.02)
    cache, result = FakeCache(), a_result()
    async with running(cache) as results:
        waiter = results.expect(result.request_id, result.customer_id)
        put(cache, result)
        assert await answer(results, waiter) == result


async def test_after_a_reconnect_everything_awaited_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 3600)  # only the reconnect can find it
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    cache, result = FakeCache(), a_result()
    async with running(cache) as results:
        waiter = results.expect(result.request_id, result.customer_id)
        put(cache, result)
        cache.hints.put_nowait(CacheAway("connection lost"))
        assert await answer(results, waiter) == result
        assert cache.subscriptions == 2


async def test_another_customers_result_is_never_handed_out() -> None:
    cache, result = FakeCache(), a_result(customer_id="cust_other")
    async with running(cache) as results:
        waiter = results.expect(result.request_id, "cust_mine")
        put(cache, result)
        cache.hints.put_nowait(result.request_id.bytes)
        with pytest.raises(DeadlinePassed):
            await answer(results, waiter, within_s=0.2)


async def test_a_result_under_the_wrong_key_is_never_handed_out() -> None:
    cache, result, other = FakeCache(), a_result(), a_result()
    async with running(cache) as results:
        waiter = results.expect(result.request_id, result.customer_id)
        cache.values[KEYS.result(result.request_id)] = encode(other)
        cache.hints.put_nowait(result.request_id.bytes)
        with pytest.raises(DeadlinePassed):
            await answer(results, waiter, within_s=0.2)


async def test_an_unreadable_result_is_an_error_not_a_hang() -> None:
    cache, result = FakeCache(), a_result()
    async with running(cache) as results:
        waiter = results.expect(result.request_id, result.customer_id)
        cache.values[KEYS.result(result.request_id)] = b"\x00junk"
        cache.hints.put_nowait(result.request_id.bytes)
        with pytest.raises(ApiError, match=str(result.request_id)) as refused:
            await answer(results, waiter)
        assert refused.value.code == "result_unreadable"
        assert refused.value.headers == {"x-should-retry": "false"}


async def test_the_deadline_names_the_request() -> None:
    async with running(FakeCache()) as results:
        waiter = results.expect(new_request_id(), "c")
        with pytest.raises(DeadlinePassed, match=str(waiter.request_id)) as passed:
            await answer(results, waiter, within_s=0.01)
        assert passed.value.headers == {"x-should-retry": "false"}
        assert results.waiting == 0


async def test_neither_redis_nor_the_log_fails_every_waiter_by_name_and_is_survived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_SWEEP_S", 0.01)
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    monkeypatch.setattr(module, "UNREACHABLE_S", 0.05)
    cache, log = FakeCache(), FakeLog()
    async with running(cache, log=result_log(log)) as results:
        waiters = [results.expect(new_request_id(), "c") for _ in range(3)]
        cache.away = log.away = True
        for w in waiters:
            with pytest.raises(AnswerLost, match=str(w.request_id)) as lost:
                await answer(results, w)
            assert lost.value.headers == {"x-should-retry": "false"}  # it was accepted: another call is another bill
        assert results.slowness() is not None
        cache.away = log.away = False
        cache.hints.put_nowait(CacheAway("the old connection"))
        result = a_result()
        waiter = results.expect(result.request_id, result.customer_id)
        put(cache, result)
        assert await answer(results, waiter) == result
        await eventually(lambda: results.slowness() is None)


async def test_without_redis_the_log_answers_and_this_process_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    monkeypatch.setattr(module, "UNREACHABLE_S", 0.05)
    cache, log = FakeCache(), FakeLog()
    log.add("results", new_request_id().bytes, b"", time_ms=0)  # so that the topic is there
    async with running(cache, log=result_log(log)) as results:
        cache.away = True
        await eventually(lambda: results.slowness() is not None)
        for _ in range(3):
            result = a_result()
            waiter = results.expect(result.request_id, result.customer_id)
            reads = cache.reads
            await eventually(lambda reads=reads: cache.reads > reads + 10)  # longer than Redis may be away alone
            log.add("results", result.request_id.bytes, encode(result), time_ms=now_ms())
            assert await answer(results, waiter) == result
        assert results.trouble() is None
        assert cache.put_backs == 0


async def test_what_redis_lost_is_found_on_the_log_and_put_back_and_only_for_its_customer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.05)
    monkeypatch.setattr(module, "_SWEEP_S", 0.01)
    cache, log, result = FakeCache(), FakeLog(), a_result()
    async with running(cache, log=result_log(log)) as results:
        mine = results.expect(result.request_id, result.customer_id)
        theirs = results.expect(result.request_id, "cust_other")
        log.add("results", result.request_id.bytes, encode(result), time_ms=now_ms())
        assert await answer(results, mine) == result
        await eventually(lambda: cache.values == {KEYS.result(result.request_id): encode(result)})
        assert results.counts["results_put_back"] == 1
        with pytest.raises(DeadlinePassed):
            await answer(results, theirs, within_s=0.1)


async def test_a_call_that_redis_answers_never_reads_the_log() -> None:
    cache, log = FakeCache(), FakeLog()
    async with running(cache, log=result_log(log)) as results:
        for _ in range(3):
            result = a_result()
            waiter = results.expect(result.request_id, result.customer_id)
            put(cache, result)
            cache.hints.put_nowait(result.request_id.bytes)
            assert await answer(results, waiter) == result
        assert log.opened == 0


async def test_a_repetition_of_a_finished_request_does_not_wait_for_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SWEEP_S", 3600)
    cache, log, result = FakeCache(), FakeLog(), a_result()
    admitted_at = datetime.now(timezone.utc) - timedelta(seconds=10)
    log.add("results", result.request_id.bytes, encode(result), time_ms=now_ms() - 9_000)
    async with running(cache, log=result_log(log)) as results:
        waiter = results.expect(result.request_id, result.customer_id, admitted_at=admitted_at)
        await results.look(waiter)
        assert await answer(results, waiter) == result


async def test_one_failed_read_does_not_fail_the_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SWEEP_S", 0.01)
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    cache, result = FakeCache(), a_result()
    async with running(cache) as results:
        waiter = results.expect(result.request_id, result.customer_id)
        cache.away = True
        await eventually(lambda: results.slowness() is not None)
        cache.away = False
        put(cache, result)
        assert await answer(results, waiter) == result


async def test_draining_answers_the_rest_with_their_ids() -> None:
    async with running(FakeCache()) as results:
        waiter = results.expect(new_request_id(), "c")
        waiting = asyncio.ensure_future(answer(results, waiter))
        await results.drain(within_s=0.01)
        with pytest.raises(AnswerLost, match=str(waiter.request_id)) as lost:
            await waiting
        assert lost.value.headers == {"x-should-retry": "false"}


class NewerSchemas:
    """Implements Schemas: `learnt` is set once the schemas topic was read after the question."""

    def __init__(self) -> None:
        self.asked = 0
        self.learnt = False

    def ask(self) -> int:
        self.asked += 1
        return self.asked

    def answered(self, number: int) -> bool:
        return self.learnt


@pytest.mark.parametrize("published", [True, False])
async def test_a_result_of_a_newer_worker_waits_for_its_schema_and_no_longer(
    published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.02)
    own = forgetful()
    monkeypatch.setattr(module, "decode", own.decode)
    cache, result, schemas = FakeCache(), a_result(), NewerSchemas()
    writer = NewerWriter(result)
    async with running(cache, schemas) as results:
        waiter = results.expect(result.request_id, result.customer_id)
        cache.values[KEYS.result(result.request_id)] = writer.write(encode(result))
        cache.hints.put_nowait(result.request_id.bytes)
        await eventually(lambda: schemas.asked)
        reads = cache.reads
        await eventually(lambda: cache.reads > reads + 2)
        assert not waiter.finished.done()
        assert schemas.asked == 1
        if published:
            own.learn(writer.published)
        schemas.learnt = True
        if published:
            assert await answer(results, waiter) == result
        else:
            with pytest.raises(ApiError, match="cannot be read"):
                await answer(results, waiter)
