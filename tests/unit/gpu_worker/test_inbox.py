"""Polling, pausing, rebalancing and dead letters, against a consumer that is told what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gpu_worker.dead_letters import DeadLetters
from gpu_worker.held import Bounds, Held
from gpu_worker.inbox import Inbox
from gpu_worker.recovery import Recorded
from gpu_worker.unlearnt import Unlearnt
from infra.kafka import BusUnavailable, KafkaError, RecordTooLarge, TopicPartition
from infra.schema_feed import learn_nothing
from schemas.claims import checked_in
from schemas.codec import decode, encode
from schemas.evidence import VALUE_MAX_BYTES, dead_letter
from schemas.headers import Headers
from schemas.records import DeadLetter
from tests.conditions import eventually
from tests.factories import finished, requested
from tests.newer_writer import NewerWriter, forgetful

TOPIC = "ns.inference.requests.default.v1"


@dataclass(frozen=True)
class Record:
    offset: int
    value: bytes | None
    partition: int = 0
    topic: str = TOPIC
    key: bytes | None = b"k"


class ScriptedConsumer:
    def __init__(self) -> None:
        self.next: dict[TopicPartition, list[Record]] = {}
        self.commits: list[dict[int, int]] = []
        self.paused: set[int] = set()
        self.refuse = False

    async def getmany(self, *, timeout_ms: int) -> Mapping[TopicPartition, list[Record]]:
        await asyncio.sleep(0)
        found, self.next = self.next, {}
        return {tp: records for tp, records in found.items() if tp.partition not in self.paused}

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        if self.refuse:
            raise KafkaError("rebalance in progress")
        self.commits.append({tp.partition: at for tp, at in offsets.items()})

    def pause(self, place: TopicPartition) -> None:
        self.paused.add(place.partition)

    def resume(self, place: TopicPartition) -> None:
        self.paused.discard(place.partition)


class ScriptedProducer:
    def __init__(self) -> None:
        self.letters: list[DeadLetter] = []
        self.errors: list[Exception] = []

    async def send(self, topic: str, value: bytes, *, key: bytes, headers: Headers, timeout_s: float) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.letters.append(decode(value, DeadLetter))


class ScriptedPredecessors:
    """Settle at once, finding nothing, unless `known` is cleared."""

    def __init__(self) -> None:
        self.known = asyncio.Event()
        self.known.set()
        self.inherited: dict[int, range] = {}
        self.found: dict[bytes, Recorded] = {}
        self.error: Exception | None = None
        self.asked = 0

    async def settle(self, parts: Mapping[int, Held]) -> None:
        self.asked += 1
        for partition in parts.keys() - self.inherited.keys():
            parts[partition].settle(range(0), {})
        await self.known.wait()
        if self.error:
            raise self.error
        for partition in parts.keys() & self.inherited.keys():
            parts[partition].settle(self.inherited[partition], self.found)


class Station:
    def __init__(self, **bounds: Any) -> None:
        self.consumer = ScriptedConsumer()
        self.producer = ScriptedProducer()
        producer: Any = self.producer
        bounds = {"revoke_wait_s": 0.2, **bounds}
        unlearnt = Unlearnt(bounds.pop("learn_schemas", learn_nothing))
        self.predecessors = ScriptedPredecessors()
        self.inbox = Inbox(
            self.consumer,
            DeadLetters(producer, topic="ns.dead"),
            self.predecessors,
            topic=TOPIC,
            bounds=Bounds(**bounds),
            unlearnt=unlearnt,
        )

    async def assigned(self, *partitions: int) -> Station:
        before = self.predecessors.asked
        await self.inbox.on_partitions_assigned([TopicPartition(TOPIC, p) for p in partitions])
        await eventually(lambda: self.predecessors.asked == before + 1)
        return self

    def arrive(self, *records: Record) -> None:
        for record in records:
            self.consumer.next.setdefault(TopicPartition(TOPIC, record.partition), []).append(record)


def record(offset: int, partition: int = 0) -> Record:
    return Record(offset=offset, partition=partition, value=encode(requested()))


async def test_the_low_watermark_is_committed_in_whatever_order_requests_end() -> None:
    station = await Station().assigned(0, 1)
    station.arrive(record(10), record(11), record(12), record(5, 1))
    first, second, third, other = station.inbox.claim(await station.inbox.take())
    station.inbox.done([second, third, other])
    await station.inbox.commit()
    station.inbox.done([first])
    await station.inbox.commit()
    await station.inbox.commit()
    assert station.consumer.commits == [{0: 10, 1: 6}, {0: 13}]


async def test_a_refused_commit_is_tried_again() -> None:
    station = await Station().assigned(0)
    station.arrive(record(0))
    station.inbox.done(station.inbox.claim(await station.inbox.take()))
    station.consumer.refuse = True
    await station.inbox.commit()
    station.consumer.refuse = False
    await station.inbox.commit()
    assert station.consumer.commits == [{0: 1}]


async def test_a_crowded_partition_is_paused_alone_and_polling_goes_on() -> None:
    station = await Station(records_per_partition=2).assigned(0, 1)
    station.arrive(record(0), record(1), record(0, 1))
    taken = station.inbox.claim(await station.inbox.take())
    assert await station.inbox.take() == []
    assert station.consumer.paused == {0}
    station.inbox.done(taken)
    await station.inbox.take()
    assert station.consumer.paused == set()


async def test_one_request_that_waits_long_holds_up_nothing_behind_it() -> None:
    station = await Station(records_per_partition=10).assigned(0)
    station.arrive(*(record(n) for n in range(9)))
    stuck, *others = station.inbox.claim(await station.inbox.take())
    for n in range(9, 100):
        station.inbox.done(others)
        station.arrive(record(n))
        others = station.inbox.claim(await station.inbox.take())
        assert len(others) == 1, "the partition goes on"
    assert stuck.offset == 0


async def test_what_ended_behind_one_that_has_not_is_bounded_too() -> None:
    station = await Station(records_ahead=4).assigned(0)
    station.arrive(*(record(n) for n in range(4)))
    stuck, *others = station.inbox.claim(await station.inbox.take())
    station.inbox.done(others)
    await station.inbox.take()
    assert station.consumer.paused == {0}
    station.inbox.done([stuck])
    await station.inbox.take()
    assert station.consumer.paused == set()


async def test_inherited_requests_wait_until_it_is_known_who_ended_them_and_others_do_not() -> None:
    station = Station()
    station.predecessors.known.clear()
    station.predecessors.inherited = {0: range(5, 8)}
    await station.assigned(0, 1)
    ended, open_, new, other = (requested() for _ in range(4))
    station.arrive(*(Record(offset=5 + n, value=encode(r)) for n, r in enumerate((ended, open_, ended, new))))
    station.arrive(Record(offset=0, partition=1, value=encode(other)))
    assert [d.request for d in await station.inbox.take()] == [other]
    assert await station.inbox.take() == []
    first = finished(ended)
    station.predecessors.found = {ended.request_id.bytes: Recorded(finished=first, framed=b"framed")}
    station.predecessors.known.set()
    await eventually(lambda: not station.inbox._held[0].recovering)
    known, unknown, again, after = await station.inbox.take()
    assert known.ended is not None
    assert (known.ended.finished, known.ended.logged, known.ended.reply_to) == (first, b"framed", ended.reply_to)
    assert again.ended == known.ended
    assert (unknown.request, unknown.ended) == (open_, None)
    assert (after.request, after.ended) == (new, None)
    station.inbox.done(station.inbox.claim([known, unknown, again, after]))
    await station.inbox.commit()
    assert {0: 9}.items() <= station.consumer.commits[-1].items()


async def test_a_rebalance_abandons_what_is_being_looked_up() -> None:
    station = Station()
    station.predecessors.known.clear()
    station.predecessors.inherited = {0: range(9)}
    await station.assigned(0)
    station.arrive(record(0))
    assert await station.inbox.take() == []
    await station.inbox.on_partitions_revoked([])
    station.predecessors.known.set()
    station.predecessors.inherited = {}
    await station.assigned(0)
    assert await station.inbox.take() == [], "it comes again with the new assignment"
    station.arrive(record(0))
    assert len(await station.inbox.take()) == 1


async def test_waiting_inherited_requests_count_as_in_flight() -> None:
    station = Station(records_per_partition=2)
    station.predecessors.known.clear()
    station.predecessors.inherited = {0: range(9)}
    await station.assigned(0)
    station.arrive(record(0), record(1))
    await station.inbox.take()
    await station.inbox.take()
    assert station.consumer.paused == {0}


async def _commits_badly(station: Station) -> None:
    async def broken(offsets: Mapping[TopicPartition, int]) -> None:
        raise RuntimeError("unforeseen")

    station.consumer.commit = broken  # type: ignore[method-assign]
    await station.assigned(0)
    station.arrive(record(0))
    station.inbox.done(station.inbox.claim(await station.inbox.take()))
    station.inbox.start()


async def _sets_aside_badly(station: Station) -> None:
    station.producer.errors = [RuntimeError("unforeseen")]
    await station.assigned(0)
    station.arrive(Record(offset=0, value=b"{}"))
    await station.inbox.take()


async def _recovers_badly(station: Station) -> None:
    station.predecessors.error = RuntimeError("unforeseen")
    await station.assigned(0)


@pytest.mark.parametrize("breakage", [_commits_badly, _sets_aside_badly, _recovers_badly])
async def test_what_nobody_expected_in_a_task_of_its_own_ends_the_worker(
    breakage: Callable[[Station], Awaitable[None]],
) -> None:
    station = Station(commit_every_s=0.0)
    await breakage(station)
    await eventually(lambda: station.inbox._fault)
    with pytest.raises(RuntimeError, match="unforeseen"):
        await station.inbox.take()
    for task in list(station.inbox._tasks):
        task.cancel()


async def test_too_many_bytes_pause_everything() -> None:
    station = await Station(bytes_in_all=10).assigned(0, 1)
    station.arrive(record(0))
    taken = station.inbox.claim(await station.inbox.take())
    await station.inbox.take()
    assert station.consumer.paused == {0, 1}
    station.inbox.done(taken)
    await station.inbox.take()
    assert station.consumer.paused == set()


async def test_a_revoke_waits_for_what_runs_and_commits_it_and_drops_what_waits() -> None:
    station = await Station(revoke_wait_s=5).assigned(0)
    station.arrive(record(0), record(1))
    running, waiting = await station.inbox.take()
    assert station.inbox.claim([running]) == [running]
    revoke = asyncio.create_task(station.inbox.on_partitions_revoked([]))
    await asyncio.sleep(0)
    assert station.inbox.claim([waiting]) == []
    assert not revoke.done()
    station.inbox.done([running])
    await revoke
    assert station.consumer.commits == [{0: 1}]
    await station.assigned(0)
    assert station.inbox.claim([waiting]) == [], "it comes again with the new assignment"


async def test_a_revoke_gives_up_after_its_bound_and_what_ends_later_is_not_committed() -> None:
    station = await Station(revoke_wait_s=0.01).assigned(0)
    station.arrive(record(0))
    late = station.inbox.claim(await station.inbox.take())
    await station.inbox.on_partitions_revoked([])
    await station.assigned(0)
    station.inbox.done(late)
    await station.inbox.commit()
    assert station.consumer.commits == [{0: 0}]


async def test_records_that_arrive_during_a_revoke_are_left_for_the_next_owner() -> None:
    station = await Station().assigned(0)
    await station.inbox.on_partitions_revoked([])
    station.arrive(record(0))
    assert await station.inbox.take() == []


BAD_VALUES = {
    "no value": None,
    "an empty value": b"",
    "another framing": b"{}",
    "an unknown schema": b"\x00\x00\x00\x00\x63rest",
    "a broken body": encode(requested())[:-3],
    "bytes after the body": encode(requested()) + b"!",
    "another record": encode(finished()),
    "too large to keep": b"x" * (VALUE_MAX_BYTES + 1),
}


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES.keys())
async def test_what_is_no_request_is_set_aside_with_its_evidence_and_the_rest_goes_on(value: bytes | None) -> None:
    station = await Station().assigned(0)
    bad = Record(offset=0, value=value)
    station.arrive(bad, record(1))
    (good,) = station.inbox.claim(await station.inbox.take())
    await eventually(lambda: station.inbox.set_aside == 1)
    (letter,) = station.producer.letters
    assert letter == dead_letter(bad, letter.reason, occurred_at=letter.occurred_at)
    assert (letter.value is None) == (value is None or len(value) > VALUE_MAX_BYTES)
    assert TOPIC not in letter.reason, "the place has fields of its own"
    station.inbox.done([good])
    await station.inbox.commit()
    assert station.consumer.commits == [{0: 2}]


async def test_a_newer_writers_request_waits_for_its_schema_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, writer, answered = forgetful(), NewerWriter(requested()), asyncio.Event()
    monkeypatch.setattr("gpu_worker.inbox.decode_at", codec.decode_at)
    monkeypatch.setattr("gpu_worker.unlearnt.decode_at", codec.decode_at)

    async def learn() -> None:
        await answered.wait()
        codec.learn(writer.published)

    station = Station(learn_schemas=learn)
    await station.assigned(0)
    newer = requested()
    station.arrive(Record(offset=0, value=writer.write(encode(newer))), record(1))
    (other,) = station.inbox.claim(await station.inbox.take())
    station.inbox.done([other])
    await station.inbox.commit()
    assert station.consumer.commits == [{0: 0}], "what waits is not let go"
    answered.set()
    await eventually(lambda: not station.inbox._tasks)
    (late,) = station.inbox.claim(await station.inbox.take())
    assert (late.request, late.offset) == (newer, 0)
    station.inbox.done([late])
    await station.inbox.commit()
    assert station.consumer.commits[-1] == {0: 2}
    assert station.inbox._held[0].size_bytes == 0
    assert not station.producer.letters


async def test_what_waited_for_its_schema_is_left_to_the_next_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, writer, answered = forgetful(), NewerWriter(requested()), asyncio.Event()
    monkeypatch.setattr("gpu_worker.inbox.decode_at", codec.decode_at)
    monkeypatch.setattr("gpu_worker.unlearnt.decode_at", codec.decode_at)

    async def learn() -> None:
        await answered.wait()
        codec.learn(writer.published)

    station = Station(learn_schemas=learn)
    await station.assigned(0)
    station.arrive(Record(offset=0, value=writer.write(encode(requested()))))
    assert await station.inbox.take() == []
    await station.inbox.on_partitions_revoked([])
    await station.assigned(0)
    answered.set()
    await eventually(lambda: not station.inbox._tasks)
    assert await station.inbox.take() == [], "it comes again with the new assignment"


async def test_an_offset_is_not_done_before_its_dead_letter_is_acknowledged() -> None:
    station = await Station().assigned(0)
    station.producer.errors = [BusUnavailable("away")]
    station.arrive(Record(offset=0, value=b"{}"))
    await station.inbox.take()
    await station.inbox.commit()
    assert station.consumer.commits == [{0: 0}]
    await eventually(lambda: station.inbox.set_aside == 1)
    await station.inbox.commit()
    assert station.consumer.commits == [{0: 0}, {0: 1}]


async def test_evidence_too_large_for_the_topic_is_described_instead() -> None:
    station = await Station().assigned(0)
    station.producer.errors = [RecordTooLarge("8 MB")]
    station.arrive(Record(offset=0, value=b"{}"))
    await station.inbox.take()
    await eventually(lambda: station.inbox.set_aside == 1)
    (letter,) = station.producer.letters
    assert (letter.value, letter.value_size_bytes) == (None, 2)
    assert (letter.value_sha256 or "").startswith("44136fa3")


async def test_inputs_that_lie_elsewhere_count_as_in_flight() -> None:
    request = requested()
    carried, kept = checked_in(request.inputs, request.request_id, inline_bytes=0)
    value = encode(replace(request, inputs=carried))
    (size_bytes,) = map(len, kept.values())
    station = await Station(bytes_in_all=len(value) + size_bytes - 1).assigned(0)
    station.arrive(Record(offset=0, value=value))
    taken = station.inbox.claim(await station.inbox.take())
    await station.inbox.take()
    assert station.consumer.paused == {0}
    station.inbox.done(taken)
    await station.inbox.take()
    assert station.consumer.paused == set()


@pytest.mark.parametrize("name", ["customer_id", "model", "price_id", "reply_to", "traceparent"])
async def test_a_request_whose_failure_could_not_even_be_told_is_set_aside(name: str) -> None:
    station = await Station().assigned(0)
    station.arrive(Record(offset=0, value=encode(requested(**{name: "x" * 3_000_000}))), record(1))
    (good,) = station.inbox.claim(await station.inbox.take())
    await eventually(lambda: station.inbox.set_aside == 1)
    (letter,) = station.producer.letters
    assert letter.reason == f"InferenceRequested.{name}: expected at most 1024 bytes, found 3000000 characters"
    station.inbox.done([good])
    await station.inbox.commit()
    assert station.consumer.commits == [{0: 2}]
    assert station.inbox._held[0].size_bytes == 0
