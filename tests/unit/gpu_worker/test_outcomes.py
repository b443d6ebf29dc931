"""The write order: everything on the log before anything else, the cache optional, nothing forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from gpu_worker import outcomes as module
from gpu_worker.endings import Ended
from gpu_worker.outcomes import KafkaRedisOutcomes, usage
from infra.kafka import BusUnavailable, KafkaError
from infra.redis import RedisError
from schemas.codec import decode
from schemas.records import InferenceFinished, Outcome, UsageRecorded
from schemas.tensors import Tensor
from tests.conditions import eventually
from tests.factories import finished, requested

LogRecord = tuple[str, bytes, bytes]


class ScriptedProducer:
    """`answers`: for each call what happens, then all is well."""

    def __init__(self, journal: list[str], *answers: Any) -> None:
        self.journal = journal
        self.answers = list(answers)
        self.sent: list[LogRecord] = []
        self.futures: list[asyncio.Future[Any]] = []

    async def enqueue_all(self, records: Sequence[LogRecord], *, timeout_s: float) -> list[Any]:
        answer = self.answers.pop(0) if self.answers else "ok"
        if answer == "away":
            raise BusUnavailable("no broker")
        self.sent += records
        self.futures = [asyncio.get_running_loop().create_future() for _ in records]
        if answer == "ok":
            self.journal.append("acknowledged")
            for future in self.futures:
                future.set_result(None)
        elif answer == "first fails":
            self.futures[0].set_exception(KafkaError("not enough replicas"))
            for future in self.futures[1:]:
                future.set_result(None)
        return [(future, [record]) for future, record in zip(self.futures, records, strict=True)]


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


def made(producer: Any, redis: Any) -> KafkaRedisOutcomes:
    return KafkaRedisOutcomes(producer, redis, namespace="ns", result_ttl_s=60)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CACHE_RETRIES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(module, "_ACK_LOOK_S", 0.01)


async def test_result_and_usage_are_on_the_log_before_the_cache_is_touched() -> None:
    journal: list[str] = []
    producer, redis = ScriptedProducer(journal), ScriptedRedis(journal)
    request = requested()
    await made(producer, redis).record([Ended(finished=finished(request), reply_to="api-1")])
    assert journal == ["acknowledged", "cached"]
    (results, key, value), (usage_topic, customer, billed) = producer.sent
    assert (results, key) == ("ns.inference.results.v1", request.request_id.bytes)
    assert decode(value, InferenceFinished) == finished(request, batch_id=decode(value, InferenceFinished).batch_id)
    assert (usage_topic, customer) == ("ns.inference.usage.v1", b"cus_acme")
    assert decode(billed, UsageRecorded).occurred_at == request.occurred_at
    assert redis.commands[0] == ("SET", f"ns.result:{request.request_id}", value, "NX", "EX", 60)


async def test_one_hint_per_api_instance_names_all_its_requests() -> None:
    journal: list[str] = []
    redis = ScriptedRedis(journal)
    ended = [Ended(finished=finished(requested()), reply_to=to) for to in ("api-1", "api-2", "api-1")]
    await made(ScriptedProducer(journal), redis).record(ended)
    ids = [e.finished.request_id.bytes for e in ended]
    assert [c for c in redis.commands if c[0] == "PUBLISH"] == [
        ("PUBLISH", "ns.results:api-1", ids[0] + ids[2]),
        ("PUBLISH", "ns.results:api-2", ids[1]),
    ]


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.EXPIRED, Outcome.CANCELLED])
async def test_only_success_is_billed(outcome: Outcome) -> None:
    producer = ScriptedProducer([])
    end = finished(outcome=outcome, outputs=(), quantities={}, error_code="x", error_message="y")
    await made(producer, ScriptedRedis([])).record([Ended(finished=end, reply_to="api-1")])
    assert [topic for topic, _, _ in producer.sent] == ["ns.inference.results.v1"]


async def test_while_kafka_is_away_results_are_held_and_then_written() -> None:
    journal: list[str] = []
    producer = ScriptedProducer(journal, "away", "away")
    outcomes = made(producer, ScriptedRedis(journal))
    await outcomes.record([Ended(finished=finished(), reply_to="api-1")])
    assert journal == ["acknowledged", "cached"]
    assert outcomes.counts["log_retries"] == 2


async def test_records_on_their_way_are_waited_for_and_not_sent_twice(caplog: pytest.LogCaptureFixture) -> None:
    journal: list[str] = []
    producer = ScriptedProducer(journal, "silent")
    task = asyncio.create_task(
        made(producer, ScriptedRedis(journal)).record([Ended(finished=finished(), reply_to="a")])
    )
    await eventually(lambda: producer.futures)
    await eventually(lambda: "no acknowledgement yet" in str([vars(r) for r in caplog.records]))
    assert not task.done()
    for future in producer.futures:
        future.set_result(None)
    await task
    assert len(producer.sent) == 2


async def test_only_the_record_that_failed_is_sent_again() -> None:
    producer = ScriptedProducer([], "first fails")
    await made(producer, ScriptedRedis([])).record([Ended(finished=finished(), reply_to="api-1")])
    topics = [topic for topic, _, _ in producer.sent]
    assert topics == ["ns.inference.results.v1", "ns.inference.usage.v1", "ns.inference.results.v1"]


async def test_without_redis_the_log_is_enough() -> None:
    journal: list[str] = []
    outcomes = made(ScriptedProducer(journal), ScriptedRedis(journal, failures=99))
    await outcomes.record([Ended(finished=finished(), reply_to="api-1")])
    assert journal == ["acknowledged"]
    assert outcomes.counts["results_not_cached"] == 1
    assert outcomes.counts["cache_failures"] == 4


async def test_a_result_that_no_topic_takes_becomes_a_failure_that_is_not_billed() -> None:
    producer, redis = ScriptedProducer([]), ScriptedRedis([])
    huge = Tensor(name="x", datatype="UINT8", shape=(1, 9 * 1024 * 1024), data=bytes(9 * 1024 * 1024))
    await made(producer, redis).record([Ended(finished=finished(outputs=(huge,)), reply_to="api-1")])
    ((_, _, value),) = producer.sent
    found = decode(value, InferenceFinished)
    assert (found.outcome, found.error_code, found.quantities) == (Outcome.FAILED, "result_too_large", {})
    assert redis.commands[0][2] == value


def test_usage_of_a_repeated_run_is_the_same_record() -> None:
    request = requested()
    first = finished(request, worker="w1", run_us=1)
    again = finished(request, worker="w2", run_us=999, batch_items=7)
    assert usage(first) == usage(again)
