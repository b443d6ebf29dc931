"""The boundary returns only after COMMIT, holds while Postgres is away, and finds the one bad record."""

from __future__ import annotations

import asyncpg
import pytest

from infra.kafka import BusUnavailable
from schemas.codec import encode
from schemas.evidence import VALUE_MAX_BYTES, dead_letter
from schemas.records import UsageRecorded
from streams.ledger.dead_letters import AllRecordsBad
from streams.ledger.delivery import LONGEST_PAUSE_S, Delivery, LedgerUnavailable
from tests.factories import requested
from tests.newer_writer import NewerWriter, forgetful
from tests.unit.streams.ledger.fake_ledger import BIGINT_MAX, FakeLedger
from tests.unit.streams.usage_samples import TOPIC, raw, usage


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def clock(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def ledger() -> FakeLedger:
    return FakeLedger()


@pytest.fixture
def delivery(ledger: FakeLedger, time: Time) -> Delivery:
    return Delivery(ledger, give_up_s=600, sleep=time.sleep, clock=time.clock, jitter=lambda: 1.0)


def total(ledger: FakeLedger, meter: str = "items") -> int:
    return sum(quantity for key, quantity in ledger.sums.items() if key[5] == meter)


async def test_counts_and_moves_the_position(delivery: Delivery, ledger: FakeLedger) -> None:
    await delivery.deliver([raw(usage(1), 0), raw(usage(2), 1), raw(usage(3), 0, partition=1)])
    assert total(ledger) == 12
    assert ledger.positions == {0: 2, 1: 1}


async def test_the_same_request_twice_in_a_batch_counts_once(delivery: Delivery, ledger: FakeLedger) -> None:
    await delivery.deliver([raw(usage(1), 0), raw(usage(1), 1)])
    assert total(ledger) == 4
    assert not ledger.dead


async def test_the_same_request_in_two_batches_counts_once(delivery: Delivery, ledger: FakeLedger) -> None:
    await delivery.deliver([raw(usage(1), 0)])
    await delivery.deliver([raw(usage(1), 1)])
    assert total(ledger) == 4
    assert ledger.positions == {0: 2}


A, OTHER = usage(1), usage(1, quantities={"items": 9})
OVERFLOWS = usage(1, quantities={"items": BIGINT_MAX})


def cuts(length: int) -> list[tuple[int, ...]]:
    """Every way to cut a log of that many records into batches, as their sizes."""
    if length == 0:
        return [()]
    return [(first, *rest) for first in range(1, length + 1) for rest in cuts(length - first)]


@pytest.mark.parametrize(
    ("log", "items", "dead"),
    [
        ([A, OTHER], 4, [1]),
        ([A, OTHER, OTHER], 4, [1, 2]),
        ([A, OTHER, A], 4, [1]),
        ([A, A, OTHER, usage(2), OTHER], 8, [2, 4]),
        ([A, usage(1, version="b" * 64), usage(1, customer="bolt")], 4, [1, 2]),
        ([OTHER, A, OTHER], 9, [1]),
        ([usage(2), OVERFLOWS, OVERFLOWS, A, OVERFLOWS], 8, [1, 2, 4]),  # what Postgres refuses bills nobody
    ],
)
async def test_what_contradicts_is_set_aside_wherever_batches_end(
    time: Time, log: list[UsageRecorded], items: int, dead: list[int]
) -> None:
    for sizes in cuts(len(log)):
        ledger = FakeLedger()
        delivery = Delivery(ledger, give_up_s=600, sleep=time.sleep, clock=time.clock)
        at = 0
        for size in sizes:
            await delivery.deliver([raw(log[n], n) for n in range(at, at + size)])
            at += size
        assert total(ledger) == items, sizes
        assert sorted(offset for _, offset in ledger.dead) == dead, sizes
        assert delivery.dead == len(dead), sizes


async def test_a_contradiction_says_which_request(delivery: Delivery, ledger: FakeLedger) -> None:
    await delivery.deliver([raw(A, 0)])
    await delivery.deliver([raw(OTHER, 1)])
    assert f"request {A.request_id}: differs from the usage record that was counted" in ledger.dead[0, 1]


async def test_a_request_counted_before_digests_were_kept_contradicts_nothing(
    delivery: Delivery, ledger: FakeLedger
) -> None:
    ledger.processed[A.request_id] = None
    await delivery.deliver([raw(A, 0), raw(OTHER, 1)])
    assert not ledger.dead
    assert not ledger.sums


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"not avro", "expected UsageRecorded framed"),
        (b"", "found nothing"),
        (None, "without a value"),
        (b"\x00\x00\x00\x27\x0fnew", "schema id 9999 is unknown here"),
        (encode(usage(7)) + b"!!", "2 bytes follow the record"),
        (encode(usage(7))[:-1], "UsageRecorded: "),
        (encode(requested()), "found inferlog.inference.v1.InferenceRequested"),
        (b"x" * (VALUE_MAX_BYTES + 1), "expected UsageRecorded framed"),
        (usage(7, quantities={"items": -1}), "quantities['items']: expected an integer from 0"),
        (usage(7, quantities={}), "quantities: is empty"),
        (usage(7, customer=""), "customer_id: is empty"),
    ],
)
async def test_a_bad_record_is_set_aside_and_its_neighbours_count(
    delivery: Delivery, ledger: FakeLedger, value: object, reason: str
) -> None:
    bad = raw(value, 1)  # type: ignore[arg-type]
    await delivery.deliver([raw(usage(1), 0), bad, raw(usage(2), 2)])
    assert total(ledger) == 8
    assert list(ledger.dead) == [(0, 1)]
    assert reason in ledger.dead[0, 1]
    assert ledger.positions == {0: 3}
    (told,) = ledger.told
    assert told == dead_letter(bad, told.reason, occurred_at=told.occurred_at)
    assert TOPIC not in told.reason, "the place has fields of its own"


async def test_a_letter_that_was_kept_before_is_not_told_again(delivery: Delivery, ledger: FakeLedger) -> None:
    for _ in range(3):
        await delivery.deliver([raw(b"junk", 0), raw(usage(1), 1)])
    assert [x.offset for x in ledger.told] == [0]


class Schemas:
    """The schemas topic, with one newer writer's schema on it; `away` makes the next askings fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._codec = forgetful()
        self.writer = NewerWriter(usage(1))
        self.asked = 0
        self.away: list[Exception] = []
        monkeypatch.setattr("streams.ledger.sorting.decode_at", self._codec.decode_at)

    async def learn(self) -> None:
        self.asked += 1
        if self.away:
            raise self.away.pop(0)
        self._codec.learn(self.writer.published)

    def written(self, number: int) -> bytes:
        return self.writer.write(encode(usage(number)))


@pytest.fixture
def schemas(monkeypatch: pytest.MonkeyPatch) -> Schemas:
    return Schemas(monkeypatch)


async def test_a_newer_writers_records_are_counted_once_their_schema_is_learnt(
    ledger: FakeLedger, time: Time, schemas: Schemas
) -> None:
    delivery = Delivery(ledger, give_up_s=600, learn_schemas=schemas.learn, sleep=time.sleep, clock=time.clock)
    await delivery.deliver([raw(schemas.written(n), n) for n in range(200)])  # no good one among them at first
    assert (total(ledger), ledger.dead, schemas.asked) == (800, {}, 1)
    await delivery.deliver([raw(schemas.written(200), 200)])
    assert schemas.asked == 1


async def test_ids_that_mean_nothing_are_asked_for_once_per_batch(
    ledger: FakeLedger, time: Time, schemas: Schemas
) -> None:
    delivery = Delivery(ledger, give_up_s=600, learn_schemas=schemas.learn, sleep=time.sleep, clock=time.clock)
    await delivery.deliver([*(raw(b"\x00\x00\x00\x27\x0f!", n) for n in range(98)), raw(usage(1), 98)])
    assert (len(ledger.dead), schemas.asked) == (98, 1)


async def test_while_schemas_cannot_be_asked_for_the_batch_is_held(
    ledger: FakeLedger, time: Time, schemas: Schemas
) -> None:
    schemas.away = [BusUnavailable("away")] * 3
    delivery = Delivery(ledger, give_up_s=600, learn_schemas=schemas.learn, sleep=time.sleep, clock=time.clock)
    await delivery.deliver([raw(schemas.written(1), 0)])
    assert (total(ledger), ledger.dead, len(time.pauses)) == (4, {}, 3)
    schemas.away = [BusUnavailable("away")] * 10_000
    with pytest.raises(LedgerUnavailable, match="Kafka was away for 600 s"):
        await delivery.deliver([raw(b"\x00\x00\x00\x27\x0f!", 1)])
    assert not ledger.dead
    assert ledger.positions == {0: 1}


async def test_a_record_that_the_ledger_refuses_is_set_aside_with_its_copies_and_its_neighbours_count(
    delivery: Delivery, ledger: FakeLedger
) -> None:
    bad = usage(37, quantities={"items": BIGINT_MAX})
    await delivery.deliver([*(raw(usage(n), n) for n in range(37)), raw(bad, 37), raw(bad, 38)])
    assert ledger.dead == dict.fromkeys([(0, 37), (0, 38)], "bigint out of range")
    assert len(ledger.processed) == 37
    assert (delivery.counted, delivery.dead) == (37, 2)


async def test_holds_through_an_outage_and_loses_nothing(delivery: Delivery, ledger: FakeLedger, time: Time) -> None:
    seen: list[str | None] = []

    def before() -> None:
        seen.append(delivery.holding)
        if len(seen) <= 8:
            raise ConnectionRefusedError("no one listens")

    ledger.before = before
    await delivery.deliver([raw(usage(1), 0)])
    assert total(ledger) == 4
    assert seen[0] is None
    assert "no one listens" in str(seen[5])
    assert delivery.holding is None
    assert time.pauses == sorted(time.pauses)
    assert max(time.pauses) <= LONGEST_PAUSE_S


async def test_an_unknown_commit_outcome_counts_once(delivery: Delivery, ledger: FakeLedger) -> None:
    def cut_once() -> None:
        ledger.after_commit = lambda: None
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

    ledger.after_commit = cut_once
    await delivery.deliver([raw(usage(1), 0)])
    assert ledger.transactions == 2
    assert total(ledger) == 4


async def test_gives_up_in_time_with_nothing_written(ledger: FakeLedger, time: Time) -> None:
    delivery = Delivery(ledger, give_up_s=30, sleep=time.sleep, clock=time.clock)

    def away() -> None:
        raise ConnectionRefusedError("no one listens")

    ledger.before = away
    with pytest.raises(LedgerUnavailable, match="no one listens"):
        await delivery.deliver([raw(usage(1), 0)])
    assert 30 <= time.now < 31
    assert not ledger.positions


async def test_any_other_refusal_is_raised_at_once(delivery: Delivery, ledger: FakeLedger, time: Time) -> None:
    def bug() -> None:
        raise asyncpg.UndefinedTableError("relation does not exist")

    ledger.before = bug
    with pytest.raises(asyncpg.UndefinedTableError):
        await delivery.deliver([raw(usage(1), 0)])
    assert not time.pauses
    assert not ledger.positions


async def test_a_large_batch_without_one_good_record_stops_the_stream(delivery: Delivery, ledger: FakeLedger) -> None:
    with pytest.raises(AllRecordsBad, match="all 100 records"):
        await delivery.deliver([raw(b"\x00\x00\x00\x27\x0fnew schema", n) for n in range(100)])
    assert not ledger.dead
    await delivery.deliver([raw(b"junk", n) for n in range(99)])  # a small one is set aside
    assert len(ledger.dead) == 99


async def test_told_to_set_all_aside_it_does_and_goes_on(ledger: FakeLedger) -> None:
    delivery = Delivery(ledger, give_up_s=1, set_aside_all=True)
    await delivery.deliver([raw(b"junk", n) for n in range(100)])
    await delivery.deliver([raw(usage(1), 100)])
    assert len(ledger.dead) == 100
    assert ledger.positions == {0: 101}
