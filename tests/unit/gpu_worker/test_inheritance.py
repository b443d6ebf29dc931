"""When the log behind an assignment is read, and what happens while it cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from gpu_worker import inheritance as module
from gpu_worker.held import Held
from gpu_worker.inheritance import Inheritance
from gpu_worker.recovery import FirstResults, Recorded
from infra.kafka import BusUnavailable, KafkaError, TopicPartition
from schemas.codec import encode
from tests.factories import finished, requested
from tests.newer_writer import NewerWriter


class ScriptedMember:
    """Per partition: committed, begin, end."""

    def __init__(self, **positions: tuple[int | None, int, int]) -> None:
        self.positions = {int(name[1:]): where for name, where in positions.items()}
        self.failures = 0

    async def committed(self, place: TopicPartition) -> int | None:
        if self.failures:
            self.failures -= 1
            raise KafkaError("coordinator is away")
        return self.positions[place.partition][0]

    async def beginning_offsets(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return {place: self.positions[place.partition][1] for place in places}

    async def end_offsets(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return {place: self.positions[place.partition][2] for place in places}


class Remembering(Inheritance):
    def __init__(self, member: ScriptedMember, **options: Any) -> None:
        anything: Any = None
        super().__init__(anything, member, anything, requests="requests", results="results", reach=100, **options)
        self.readings: list[dict[int, range]] = []
        self.answers: list[Any] = []

    async def first_results(self, consumer: Any, spans: Mapping[int, range]) -> FirstResults:
        self.readings.append(dict(spans))
        answer = self.answers.pop(0) if self.answers else FirstResults()
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, FirstResults)
        return answer


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_RETRY_S", 0.0)
    monkeypatch.setattr(module, "open_consumer", lambda *_, **__: nullcontext())


async def test_nothing_inherited_is_nothing_read() -> None:
    parts = {0: Held(generation=1), 1: Held(generation=1)}
    inheritance = Remembering(ScriptedMember(p0=(7, 0, 7), p1=(None, 0, 0)))
    await inheritance.settle(parts)
    assert inheritance.readings == []
    assert not any(held.recovering for held in parts.values())


async def test_partitions_without_backlog_do_not_wait_for_those_with_one() -> None:
    parts = {0: Held(generation=1), 1: Held(generation=1)}
    inheritance = Remembering(ScriptedMember(p0=(7, 0, 9), p1=(4, 0, 4)))
    seen: list[bool] = []
    request = requested()
    first = FirstResults()
    first.found[request.request_id.bytes] = Recorded(finished=finished(request), framed=b"framed")

    async def reading(consumer: Any, spans: Mapping[int, range]) -> FirstResults:
        seen.append(parts[1].recovering)
        return first

    inheritance.first_results = reading  # type: ignore[method-assign]
    await inheritance.settle(parts)
    assert seen == [False]
    assert not parts[0].recovering


async def test_while_kafka_is_away_inherited_requests_wait_and_then_it_is_tried_again() -> None:
    parts = {0: Held(generation=1), 1: Held(generation=1)}
    member = ScriptedMember(p0=(7, 0, 9), p1=(4, 0, 4))
    member.failures = 1
    inheritance = Remembering(member)
    inheritance.answers = [BusUnavailable("away"), KafkaError("away"), FirstResults()]
    await inheritance.settle(parts)
    assert inheritance.readings == [{0: range(7, 9)}] * 3
    assert not any(held.recovering for held in parts.values())


async def test_schemas_are_learnt_for_results_that_need_them_and_only_their_partitions_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = {0: Held(generation=1), 1: Held(generation=1)}
    asked: list[tuple[bool, bool]] = []
    writer, request = NewerWriter(finished(), schema_id=4799), requested()

    async def learn() -> None:
        asked.append((parts[0].recovering, parts[1].recovering))
        if len(asked) < 3:
            raise BusUnavailable("topic inference.schemas.v1 is missing; run 'inferlog provision'")

    inheritance = Remembering(ScriptedMember(p0=(7, 0, 9), p1=(3, 0, 4)), learn_schemas=learn)
    first = FirstResults()
    first.look_for(request.request_id.bytes, 1, partition=0)
    first.offer(request.request_id.bytes, writer.write(encode(finished(request))))
    inheritance.answers = [first]
    await inheritance.settle(parts)
    assert asked == [(True, False)] * 3
    assert not parts[0].recovering
    assert len(inheritance.readings) == 1
    assert "away" not in caplog.text and "schemas that are unknown here" in caplog.text


async def test_no_schema_is_asked_for_when_all_results_are_read() -> None:
    async def learn() -> None:
        raise BusUnavailable("topic inference.schemas.v1 is missing; run 'inferlog provision'")

    parts = {0: Held(generation=1)}
    await Remembering(ScriptedMember(p0=(7, 0, 9)), learn_schemas=learn).settle(parts)
    assert not parts[0].recovering


async def test_what_is_no_outage_is_not_swallowed() -> None:
    inheritance = Remembering(ScriptedMember(p0=(7, 0, 9)))
    inheritance.answers = [RuntimeError("a bug")]
    with pytest.raises(RuntimeError, match="a bug"):
        await inheritance.settle({0: Held(generation=1)})
