"""When the log behind an assignment is read, and what happens while it cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from gpu_worker import inheritance as module
from gpu_worker.held import Held
from gpu_worker.inheritance import Inheritance
from gpu_worker.recovery import Recorded
from infra.kafka import BusUnavailable, KafkaError, TopicPartition
from tests.factories import finished, requested


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
    def __init__(self, member: ScriptedMember) -> None:
        anything: Any = None
        super().__init__(anything, member, anything, requests="requests", results="results", reach=100)
        self.readings: list[dict[int, range]] = []
        self.answers: list[Any] = []

    async def first_results(self, consumer: Any, spans: Mapping[int, range]) -> Mapping[bytes, Recorded]:
        self.readings.append(dict(spans))
        answer = self.answers.pop(0) if self.answers else {}
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, dict)
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
    found = {request.request_id.bytes: Recorded(finished=finished(request), framed=b"framed")}

    async def reading(consumer: Any, spans: Mapping[int, range]) -> Mapping[bytes, Recorded]:
        seen.append(parts[1].recovering)
        return found

    inheritance.first_results = reading  # type: ignore[method-assign]
    await inheritance.settle(parts)
    assert seen == [False]
    assert not parts[0].recovering


async def test_while_kafka_is_away_inherited_requests_wait_and_then_it_is_tried_again() -> None:
    parts = {0: Held(generation=1), 1: Held(generation=1)}
    member = ScriptedMember(p0=(7, 0, 9), p1=(4, 0, 4))
    member.failures = 1
    inheritance = Remembering(member)
    inheritance.answers = [BusUnavailable("away"), KafkaError("away"), {}]
    await inheritance.settle(parts)
    assert inheritance.readings == [{0: range(7, 9)}] * 3
    assert not any(held.recovering for held in parts.values())


async def test_what_is_no_outage_is_not_swallowed() -> None:
    inheritance = Remembering(ScriptedMember(p0=(7, 0, 9)))
    inheritance.answers = [RuntimeError("a bug")]
    with pytest.raises(RuntimeError, match="a bug"):
        await inheritance.settle({0: Held(generation=1)})
