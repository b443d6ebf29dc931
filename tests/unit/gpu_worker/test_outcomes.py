"""The write order: everything on the log before anything else, the cache optional, nothing forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from gpu_worker import outcomes as module
from gpu_worker.blame import MOST_IN_A_ROW, Blame, Unserviceable
from gpu_worker.claims import LargeTensors
from gpu_worker.endings import Ended
from gpu_worker.outcomes import KafkaRedisOutcomes, usage
from infra.kafka import BusUnavailable, KafkaError, KeyedRecord
from infra.redis import RedisError
from schemas.codec import decode, encode
from schemas.records import InferenceFinished, Outcome, UsageRecorded
from schemas.tensors import Tensor
from tests.blob_store import FakeBlobStore, claim_check
from tests.conditions import eventually
from tests.factories import NOON, finished, requested

LogRecord = KeyedRecord


class ScriptedProducer:
    """`answers`: for each call what happens, then all is well."""

    def __init__(self, journal: list[str], *answers: Any) -> None:
        self.journal = journal
        self.answers = list(answers)
        self.sent: list[LogRecord] = []
        self.futures: list[asyncio.Future[Any]] = []

    async def enqueue_all(
        self, records: Sequence[LogRecord], *, timeout_s: float, keys_repeat: bool = False
    ) -> tuple[list[Any], list[LogRecord]]:
        answer = self.answers.pop(0) if self.answers else "ok"
        if callable(answer):
            answer = answer()
        if answer == "away":
            raise BusUnavailable("no broker")
        unsent = list(records[1:]) if answer == "room for one" else []
        records = records[:1] if unsent else records
        self.sent += records
        self.futures = [asyncio.get_running_loop().create_future() for _ in records]
        if answer in ("ok", "room for one"):
            self.journal.append(f"{records[0][0].split('.')[2]} acknowledged")
            for future in self.futures:
                future.set_result(None)
        elif answer == "first fails":
            self.futures[0].set_exception(KafkaError("not enough replicas"))
            for future in self.futures[1:]:
                future.set_result(None)
        return [(future, [record]) for future, record in zip(self.futures, records, strict=True)], unsent


class ScriptedRedis:
    def __init__(self, journal: list[str], *, failures: int = 0) -> None:
        self.journal = journal
        self.failures = failures
        self.commands: list[tuple[Any, ...]] = []

    def pipeline(self, *, transaction: bool) -> Any:
        assert not transaction
        outer = self

        class Pipeline:
            def __init__(self) -> None:
                self.commands: list[tuple[Any, ...]] = []

            def execute_command(self, *command: Any) -> None:
                self.commands.append(command)

            async def execute(self) -> None:
                if outer.failures:
                    outer.failures -= 1
                    raise RedisError("away")
                outer.commands += self.commands
                outer.journal.append("cached")

        return Pipeline()


class Clock:
    """Noon plus some seconds."""

    def __init__(self) -> None:
        self.after_noon_s = 1.0

    def __call__(self) -> float:
        return NOON.timestamp() + self.after_noon_s


def made(
    producer: Any, redis: Any, *, clock: Clock | None = None, store: FakeBlobStore | None = None
) -> KafkaRedisOutcomes:
    large = LargeTensors(claim_check(store, inline_bytes=256 * 1024))
    return KafkaRedisOutcomes(producer, redis, large, Blame(), namespace="ns", result_ttl_s=60, clock=clock or Clock())


def end(record: InferenceFinished | None = None, *, reply_to: str = "api-1", within_s: float = 10.0) -> Ended:
    record = record or finished()
    return Ended(finished=record, reply_to=reply_to, deadline_at=record.admitted_at + timedelta(seconds=within_s))


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CACHE_RETRIES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(module, "_ACK_LOOK_S", 0.01)
    monkeypatch.setattr(module, "_USAGE_LINGER_S", 0.0)


async def test_results_are_on_the_log_before_usage_and_before_the_cache_is_touched() -> None:
    journal: list[str] = []
    producer, redis = ScriptedProducer(journal), ScriptedRedis(journal)
    request = requested()
    await made(producer, redis).record([end(finished(request))])
    assert journal[0] == "results acknowledged"
    assert sorted(journal[1:]) == ["cached", "usage acknowledged"]
    (results, key, value, _), (usage_topic, customer, billed, _) = producer.sent
    assert (results, key) == ("ns.inference.results.v1", request.request_id.bytes)
    assert decode(value, InferenceFinished) == finished(request, batch_id=decode(value, InferenceFinished).batch_id)
    assert (usage_topic, customer) == ("ns.inference.usage.v1", b"cus_acme")
    assert decode(billed, UsageRecorded).occurred_at == request.occurred_at
    assert redis.commands[0] == ("SET", f"ns.result:{request.request_id}", value, "NX", "EX", 60)


async def test_one_hint_per_api_instance_names_all_its_requests() -> None:
    journal: list[str] = []
    redis = ScriptedRedis(journal)
    ended = [end(finished(requested()), reply_to=to) for to in ("api-1", "api-2", "api-1")]
    await made(ScriptedProducer(journal), redis).record(ended)
    ids = [e.finished.request_id.bytes for e in ended]
    assert [c for c in redis.commands if c[0] == "PUBLISH"] == [
        ("PUBLISH", "ns.results:api-1", ids[0] + ids[2]),
        ("PUBLISH", "ns.results:api-2", ids[1]),
    ]


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.EXPIRED, Outcome.CANCELLED])
async def test_only_success_is_billed(outcome: Outcome) -> None:
    producer = ScriptedProducer([])
    failed = finished(outcome=outcome, outputs=(), quantities={}, error_code="x", error_message="y")
    await made(producer, ScriptedRedis([])).record([end(failed)])
    assert [topic for topic, _, _, _ in producer.sent] == ["ns.inference.results.v1"]


async def test_while_kafka_is_away_results_are_held_and_then_written() -> None:
    journal: list[str] = []
    producer = ScriptedProducer(journal, "away", "away")
    outcomes = made(producer, ScriptedRedis(journal))
    await outcomes.record([end(finished())])
    assert journal[0] == "results acknowledged"
    assert sorted(journal[1:]) == ["cached", "usage acknowledged"]
    assert outcomes.counts["log_retries"] == 2


async def test_records_on_their_way_are_waited_for_and_not_sent_twice(caplog: pytest.LogCaptureFixture) -> None:
    journal: list[str] = []
    producer = ScriptedProducer(journal, "silent")
    task = asyncio.create_task(made(producer, ScriptedRedis(journal)).record([end(finished())]))
    await eventually(lambda: producer.futures)
    await eventually(lambda: "no acknowledgement yet" in str([vars(r) for r in caplog.records]))
    assert not task.done()
    for future in producer.futures:
        future.set_result(None)
    await task
    assert len(producer.sent) == 2


async def test_only_the_record_that_failed_is_sent_again() -> None:
    producer = ScriptedProducer([], "first fails")
    await made(producer, ScriptedRedis([])).record([end(), end()])
    topics = [topic for topic, _, _, _ in producer.sent]
    assert topics == ["ns.inference.results.v1"] * 3 + ["ns.inference.usage.v1"] * 2


async def test_without_redis_the_log_is_enough() -> None:
    journal: list[str] = []
    outcomes = made(ScriptedProducer(journal), ScriptedRedis(journal, failures=99))
    await outcomes.record([end(finished())])
    assert journal == ["results acknowledged", "usage acknowledged"]
    assert outcomes.counts["results_not_cached"] == 1
    assert outcomes.counts["cache_failures"] == 4


def of_bytes(size: int) -> Tensor:
    return Tensor(name="x", datatype="UINT8", shape=(1, size), data=bytes(size))


async def test_a_result_that_neither_s3_nor_the_log_takes_becomes_a_failure_that_is_not_billed() -> None:
    producer, redis, store = ScriptedProducer([]), ScriptedRedis([]), FakeBlobStore()
    store.away = True
    await made(producer, redis, store=store).record([end(finished(outputs=(of_bytes(9 * 1024 * 1024),)))])
    ((_, _, value, _),) = producer.sent
    found = decode(value, InferenceFinished)
    assert (found.outcome, found.error_code, found.quantities) == (Outcome.FAILED, "unavailable", {})
    assert redis.commands[0][2] == value


async def test_without_s3_a_large_result_goes_onto_the_log_if_it_fits() -> None:
    producer, redis, store = ScriptedProducer([]), ScriptedRedis([]), FakeBlobStore()
    store.away = True
    result = finished(outputs=(of_bytes(1024 * 1024),))
    await made(producer, redis, store=store).record([end(result)])
    assert decode(producer.sent[0].value, InferenceFinished) == result
    assert redis.commands[0][2] == producer.sent[0].value


async def test_large_outputs_are_in_s3_before_their_result_is_on_the_log_and_the_copy_is_small() -> None:
    journal: list[str] = []
    producer, redis, store = ScriptedProducer(journal), ScriptedRedis(journal), FakeBlobStore()
    store.open.clear()
    outcomes = made(producer, redis, store=store)
    large, small = finished(outputs=(of_bytes(9 * 1024 * 1024),)), finished()
    task = asyncio.create_task(outcomes.record([end(large), end(small)]))
    await eventually(lambda: len(journal) == 3)
    logged = [record for record in producer.sent if record.topic.endswith("results.v1")]
    assert [decode(r.value, InferenceFinished) for r in logged] == [small], "it did not wait for its neighbour's blobs"
    store.open.set()
    await task
    found = decode(producer.sent[-2].value, InferenceFinished)
    assert found.outcome is Outcome.SUCCEEDED
    assert [t.blob.key for t in found.outputs if t.blob] == list(store.objects)
    assert max(len(c[2]) for c in redis.commands if c[0] == "SET") < 2000
    assert [topic for topic, _, _, _ in producer.sent].count("ns.inference.usage.v1") == 2


async def test_usage_on_its_way_does_not_hold_the_answer_up() -> None:
    journal: list[str] = []
    producer = ScriptedProducer(journal, "ok", "silent")
    task = asyncio.create_task(made(producer, ScriptedRedis(journal)).record([end()]))
    await eventually(lambda: "cached" in journal)
    assert not task.done(), "offsets wait for the usage"
    for future in producer.futures:
        future.set_result(None)
    await task


async def test_usage_of_batches_recorded_together_goes_together_and_each_waits_for_it() -> None:
    producer = ScriptedProducer([])
    outcomes = made(producer, ScriptedRedis([]))
    await asyncio.gather(*(outcomes.record([end(), end()]) for _ in range(3)))
    await outcomes.record([end()])
    assert producer.journal == ["results acknowledged"] * 3 + ["usage acknowledged"] + [
        "results acknowledged",
        "usage acknowledged",
    ]
    assert [topic for topic, _, _, _ in producer.sent].count("ns.inference.usage.v1") == 7


async def test_a_batch_given_up_does_not_take_the_usage_of_others_with_it() -> None:
    producer = ScriptedProducer([], "ok", "ok", "silent")
    outcomes = made(producer, ScriptedRedis([]))
    first, second = (asyncio.create_task(outcomes.record([end()])) for _ in range(2))
    await eventually(lambda: len(producer.sent) == 4)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    for future in producer.futures:
        future.set_result(None)
    await asyncio.wait_for(second, 5)


async def test_a_result_that_is_not_acknowledged_is_neither_billed_nor_answered() -> None:
    journal: list[str] = []
    producer = ScriptedProducer(journal, "silent")
    task = asyncio.create_task(made(producer, ScriptedRedis(journal)).record([end()]))
    await eventually(lambda: producer.futures)
    assert [topic for topic, _, _, _ in producer.sent] == ["ns.inference.results.v1"]
    assert journal == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED])
async def test_a_run_recorded_past_its_deadline_is_expired_and_not_billed(outcome: Outcome) -> None:
    producer, redis, clock = ScriptedProducer([]), ScriptedRedis([]), Clock()
    outcomes = made(producer, redis, clock=clock)
    late, in_time = end(finished(outcome=outcome), within_s=5), end(within_s=5.1)
    clock.after_noon_s = 5
    await outcomes.record([late, in_time])
    (_, _, first, _), (_, _, second, _), (_, _, billed, _) = producer.sent
    expired = decode(first, InferenceFinished)
    assert (expired.outcome, expired.outputs, expired.quantities) == (Outcome.EXPIRED, (), {})
    assert expired.error_code == "deadline_exceeded"
    assert decode(second, InferenceFinished).outcome is Outcome.SUCCEEDED
    assert decode(billed, UsageRecorded).request_id == in_time.finished.request_id
    assert redis.commands[0][2] == first
    assert outcomes.counts["expired_after_the_run"] == 1


async def test_a_result_that_waited_for_kafka_past_its_deadline_is_expired() -> None:
    clock = Clock()

    def away() -> str:
        clock.after_noon_s = 11
        return "away"

    producer = ScriptedProducer([], away)
    await made(producer, ScriptedRedis([]), clock=clock).record([end()])
    ((_, _, value, _),) = producer.sent
    assert decode(value, InferenceFinished).outcome is Outcome.EXPIRED


async def test_a_result_that_may_be_on_the_log_never_changes() -> None:
    clock = Clock()

    def fails() -> str:
        clock.after_noon_s = 11
        return "first fails"

    producer = ScriptedProducer([], fails)
    await made(producer, ScriptedRedis([]), clock=clock).record([end()])
    (_, _, first, _), (_, _, again, _), (usage_topic, _, _, _) = producer.sent
    assert first == again
    assert usage_topic == "ns.inference.usage.v1"


async def test_of_a_batch_that_was_handed_over_in_part_only_the_rest_can_still_expire() -> None:
    clock = Clock()

    def room_for_one() -> str:
        clock.after_noon_s = 11
        return "room for one"

    producer = ScriptedProducer([], room_for_one)
    await made(producer, ScriptedRedis([]), clock=clock).record([end(), end()])
    results = [decode(v, InferenceFinished).outcome for t, _, v, _ in producer.sent if t == "ns.inference.results.v1"]
    assert results == [Outcome.SUCCEEDED, Outcome.EXPIRED]
    assert [t for t, _, _, _ in producer.sent].count("ns.inference.usage.v1") == 1


async def test_an_end_that_is_on_the_log_is_billed_and_answered_whenever_it_is_found() -> None:
    producer, redis, clock = ScriptedProducer([]), ScriptedRedis([]), Clock()
    found = replace(end(within_s=5), logged=b"the bytes on the log")
    clock.after_noon_s = 3600
    await made(producer, redis, clock=clock).record([found])
    ((topic, _, billed, _),) = producer.sent
    assert topic == "ns.inference.usage.v1"
    assert decode(billed, UsageRecorded) == usage(found.finished)
    assert redis.commands[0][:3] == ("SET", f"ns.result:{found.finished.request_id}", b"the bytes on the log")
    assert redis.commands[1][0] == "PUBLISH"


def test_usage_of_a_repeated_run_is_the_same_record() -> None:
    request = requested()
    first = finished(request, worker="w1", run_us=1)
    again = finished(request, worker="w2", run_us=999, batch_items=7)
    assert usage(first) == usage(again)


HUGE = "c" * 5_000_000


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        pytest.param(
            {"quantities": {"items": 2**63}}, "EncodeError: InferenceFinished.quantities", id="no such number"
        ),
        pytest.param({"error_code": "\ud800", "outcome": Outcome.FAILED}, "EncodeError", id="no such text"),
        pytest.param({"outputs": (replace(of_bytes(1), name="\ud800"),)}, "EncodeError", id="no such name"),
        pytest.param({"customer_id": HUGE}, "ValueError: the usage takes 10000", id="usage too large for its topic"),
    ],
)
async def test_what_no_record_holds_becomes_a_failure_before_anything_is_on_the_log(
    odd: dict[str, Any], words: str
) -> None:
    producer = ScriptedProducer([])
    outcomes = made(producer, ScriptedRedis([]))
    outputs = {} if odd.get("outcome") is not Outcome.FAILED else {"outputs": (), "quantities": {}}
    bad, good = end(finished(**(outputs | odd))), end()
    await outcomes.record([bad, good])
    told = [decode(r.value, InferenceFinished) for r in producer.sent if r.topic.endswith("results.v1")]
    assert [r.outcome for r in told] == [Outcome.FAILED, Outcome.SUCCEEDED]
    assert told[0].error_code == "internal"
    assert words in (told[0].error_message or "")
    billed = [decode(r.value, UsageRecorded) for r in producer.sent if r.topic.endswith("usage.v1")]
    assert [u.request_id for u in billed] == [good.finished.request_id]


async def test_a_result_on_the_log_that_nobody_can_bill_is_counted_and_holds_nobody_up() -> None:
    producer = ScriptedProducer([])
    outcomes = made(producer, ScriptedRedis([]))
    await outcomes.record([replace(end(finished(customer_id=HUGE)), logged=b"its bytes"), end()])
    assert [r.topic for r in producer.sent] == ["ns.inference.results.v1", "ns.inference.usage.v1"]
    assert outcomes.counts["usage_lost"] == 1


async def test_what_nobody_expected_of_large_outputs_fails_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unforeseen(*args: Any, **options: Any) -> Any:
        raise RuntimeError("cannot schedule new futures")

    monkeypatch.setattr(LargeTensors, "hand_in", unforeseen)
    producer = ScriptedProducer([])
    await made(producer, ScriptedRedis([])).record([end(finished(outputs=(of_bytes(9 * 1024 * 1024),))), end()])
    told = [decode(r.value, InferenceFinished) for r in producer.sent if r.topic.endswith("results.v1")]
    assert sorted(r.outcome.value for r in told) == ["FAILED", "SUCCEEDED"]


async def test_when_no_result_at_all_can_be_recorded_the_process_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(record: Any) -> bytes:
        if isinstance(record, UsageRecorded):
            raise KeyError("a bug")
        return encode(record)

    monkeypatch.setattr(module, "encode", broken)
    producer = ScriptedProducer([])
    with pytest.raises(Unserviceable):
        await made(producer, ScriptedRedis([])).record([end() for _ in range(MOST_IN_A_ROW)])
    assert producer.sent == []


async def test_of_two_ends_of_one_request_in_a_batch_the_first_counts() -> None:
    producer, request = ScriptedProducer([]), requested()
    await made(producer, ScriptedRedis([])).record(
        [end(finished(request)), end(finished(request, customer_id="other"))]
    )
    assert [decode(r.value, InferenceFinished).customer_id for r in producer.sent[:1]] == ["cus_acme"]
    assert [r.key for r in producer.sent] == [request.request_id.bytes, b"cus_acme"]
