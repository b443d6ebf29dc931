"""What the ledger can no longer tell apart, and what lies ahead of its clock, is set aside once, with its reason."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from uuid import UUID, uuid4

import pytest

from infra.settings import SettingsError, streams_settings
from schemas.ids import new_request_id
from schemas.records import UsageRecorded
from schemas.topics import requests_topic
from streams.ledger.dead_letters import AllRecordsBad, Kind, kind_of
from streams.ledger.dedup import AHEAD, Bounds, Extent, Opening
from streams.ledger.delivery import Delivery
from streams.ledger.stretches import Stretch
from tests.unit.streams.ledger.fake_ledger import FakeLedger
from tests.unit.streams.usage_samples import NOON, TOPIC, located, raw, usage

DAY = timedelta(days=1)
NOW = NOON + DAY
FIRST = NOON - 40 * DAY
BOUNDS = Bounds(counts_from=FIRST, first_id=UUID(int=int(FIRST.timestamp() * 1000) << 80), now=NOW)
OPEN = Bounds(counts_from=None, first_id=None, now=NOW)


def made(at: datetime, *, occurred_at: datetime | None = None, request_id: UUID | None = None) -> UsageRecorded:
    """Usage of a request made at this time, which is also when it occurred."""
    own = request_id or new_request_id(now_ns=int(at.timestamp() * 1000) * 1_000_000)
    return replace(usage(0), request_id=own, occurred_at=occurred_at or at)


SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (made(NOON), None),
        (made(FIRST), None),
        (made(FIRST - SECOND), Kind.HORIZON),
        (made(FIRST - SECOND, occurred_at=FIRST), Kind.HORIZON),  # its row may be gone, whatever it says of its time
        (made(FIRST, occurred_at=FIRST - SECOND), Kind.HORIZON),
        (made(FIRST - 1000 * DAY), Kind.HORIZON),
        (made(NOON, request_id=UUID(int=5)), None),  # no time in the id: its row is kept for ever
        (made(FIRST - SECOND, request_id=uuid4()), Kind.HORIZON),
        (made(NOW + AHEAD), None),
        (made(NOW + AHEAD + SECOND), Kind.FUTURE),
        (made(datetime.max.replace(tzinfo=timezone.utc), request_id=UUID(int=5)), Kind.FUTURE),
        (made(datetime.min.replace(tzinfo=timezone.utc), request_id=UUID(int=5)), Kind.HORIZON),
    ],
)
def test_a_records_time_is_judged_by_what_may_be_gone_and_by_the_clock(
    record: UsageRecorded, kind: Kind | None
) -> None:
    found = BOUNDS.objection(record, AHEAD)
    assert (None if found is None else kind_of(found)) is kind
    assert OPEN.objection(record, AHEAD) is None or kind is Kind.FUTURE
    # The look at the whole batch and the look at each record agree.
    plain = Opening(bounds=BOUNDS, next_offsets={}).is_plain(Extent.of([located(record)]), [], AHEAD)
    assert not plain or kind is None
    assert plain or kind is not None or record.request_id.version != 7


@pytest.mark.parametrize("days", ["39", "40.5", "0"])
def test_a_horizon_within_which_usage_is_repeated_is_refused_with_the_reason(days: str) -> None:
    env = {"INFERLOG_KAFKA_BOOTSTRAP": "127.0.0.1:1", "INFERLOG_POSTGRES_DSN": "postgresql://u@127.0.0.1:2/x"}
    assert streams_settings(env).horizon_days == requests_topic().retention_days == 40
    with pytest.raises(SettingsError, match=f"HORIZON_DAYS is {days}, expected whole days from 40: a worker that has"):
        streams_settings({**env, "INFERLOG_LEDGER_HORIZON_DAYS": days})


def test_a_batch_is_not_plain_when_any_of_it_was_read_before() -> None:
    opening = Opening(bounds=OPEN, next_offsets={(TOPIC, 0): 5})
    extent = Extent.of([located(usage(1))])
    for begin, plain in ((4, False), (5, True), (9, True)):
        assert opening.is_plain(extent, [Stretch(topic=TOPIC, partition=0, begin=begin, end=10)], AHEAD) is plain
    assert opening.is_plain(None, [Stretch(topic=TOPIC, partition=1, begin=0, end=10)], AHEAD)


@pytest.fixture
def ledger() -> FakeLedger:
    return FakeLedger()


@pytest.fixture
def delivery(ledger: FakeLedger) -> Delivery:
    return Delivery(ledger, give_up_s=1)


def items(ledger: FakeLedger) -> int:
    return sum(quantity for key, quantity in ledger.sums.items() if key[5] == "items")


def kinds(ledger: FakeLedger) -> dict[int, Kind]:
    return {offset: kind_of(reason) for (_, offset), reason in ledger.dead.items()}


async def test_old_and_future_records_are_set_aside_and_their_neighbours_count(
    delivery: Delivery, ledger: FakeLedger
) -> None:
    ledger.move_horizon(FIRST)
    records = [made(NOON), made(FIRST - SECOND), made(NOW + DAY), made(FIRST)]
    await delivery.deliver([raw(r, n) for n, r in enumerate(records)])
    assert kinds(ledger) == {1: Kind.HORIZON, 2: Kind.FUTURE}
    assert [x.offset for x in ledger.told] == [1, 2]
    assert items(ledger) == 8
    assert (delivery.counted, delivery.dead) == (2, 2)


async def test_how_far_ahead_is_a_setting(ledger: FakeLedger) -> None:
    await Delivery(ledger, give_up_s=1, ahead=2 * DAY).deliver([raw(made(NOW + DAY), 0)])
    assert not ledger.dead


async def test_a_copy_of_what_was_counted_and_let_go_of_is_set_aside_and_not_counted(
    delivery: Delivery, ledger: FakeLedger
) -> None:
    old = made(FIRST - SECOND)
    await delivery.deliver([raw(old, 0)])
    ledger.move_horizon(FIRST)
    await delivery.deliver([raw(old, 1)])
    ledger.prune()
    assert not ledger.processed
    await delivery.deliver([raw(old, 2), raw(replace(old, occurred_at=NOON), 3)])
    assert items(ledger) == 4
    assert kinds(ledger) == {1: Kind.HORIZON, 2: Kind.HORIZON, 3: Kind.HORIZON}


async def test_what_was_counted_before_the_horizon_moved_is_read_again_without_a_word(
    delivery: Delivery, ledger: FakeLedger
) -> None:
    log = [raw(r, n) for n, r in enumerate([made(FIRST - SECOND), made(NOON), made(NOW + DAY)])]
    await delivery.deliver(log)
    ledger.move_horizon(FIRST)
    ledger.prune()
    for again in (log, log[:1], [*log, raw(made(NOON), 3)]):
        await delivery.deliver(again)
    assert kinds(ledger) == {2: Kind.FUTURE}
    assert items(ledger) == 4 * 3
    assert len(ledger.told) == 1


async def test_what_was_set_aside_stays_so_when_it_is_read_again_and_its_time_has_come(
    delivery: Delivery, ledger: FakeLedger
) -> None:
    early = made(NOW + DAY)
    await delivery.deliver([raw(early, 0), raw(made(NOON), 1)])
    ledger.bounds = replace(ledger.bounds, now=NOW + 2 * DAY)
    await delivery.deliver([raw(early, 0), raw(made(NOON), 1)])
    assert kinds(ledger) == {0: Kind.FUTURE}
    assert early.request_id not in ledger.processed
    await delivery.deliver([raw(early, 2)])  # another record of it is counted: it has no letter
    assert early.request_id in ledger.processed


async def test_a_batch_that_was_overtaken_is_judged_anew(delivery: Delivery, ledger: FakeLedger) -> None:
    """A ledger that was frozen finds that its successor has counted what only now lies past the horizon."""
    old = made(FIRST - SECOND)
    ledger.move_horizon(FIRST)

    def other_commits() -> None:
        ledger.after_opening = ledger.after_rollback = lambda: None
        ledger.positions[0] = 1
        ledger.processed[old.request_id] = located(old).digest

    def overtake() -> None:
        ledger.positions[0] = 1
        ledger.after_rollback = other_commits

    ledger.after_opening = overtake
    await delivery.deliver([raw(old, 0), raw(made(NOON), 1)])
    assert ledger.transactions == 2
    assert not ledger.dead
    assert ledger.positions == {0: 2}


@pytest.mark.parametrize("at", [FIRST - DAY, NOW + DAY])
async def test_a_large_batch_of_another_time_stops_the_stream(
    delivery: Delivery, ledger: FakeLedger, at: datetime
) -> None:
    """A clock that is wrong, Postgres' own or the gateways', must not set a whole topic aside."""
    ledger.move_horizon(FIRST)
    with pytest.raises(AllRecordsBad):
        await delivery.deliver([raw(made(at), n) for n in range(100)])
    assert not ledger.dead
    assert not ledger.positions
