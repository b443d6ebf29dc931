"""Letters of workers come into the table by themselves, bounded, and by one process at a time."""

from __future__ import annotations

import pytest

from infra.kafka import BusUnavailable
from infra.postgres import open_connection, queries
from infra.turns import Turn
from schemas.evidence import dead_letter
from schemas.records import DeadLetter
from schemas.topics import requests_topic
from streams.ledger.raw import RawRecord
from streams.quarantine.collector import Collector
from tests.conditions import eventually
from tests.factories import NOON
from tests.integration.ledger_world import Spawn
from tests.integration.quarantine_desk import QuarantineDesk


@pytest.fixture
def desk(env: dict[str, str], spawn: Spawn) -> QuarantineDesk:
    return QuarantineDesk(env, spawn)


def letter(desk: QuarantineDesk, offset: int) -> DeadLetter:
    topic = requests_topic().in_namespace(desk.settings.kafka.namespace).name
    record = RawRecord(topic=topic, partition=0, offset=offset, follows=offset, key=b"k", value=b"bad")
    return dead_letter(record, "a broken body", occurred_at=NOON)


async def test_a_ledger_brings_the_letters_of_workers_into_the_table(desk: QuarantineDesk) -> None:
    await desk.tell([letter(desk, 1)])
    desk.worker()

    async def there() -> bool:
        return await desk.states() == {"open": 1}

    await eventually(there, what="the letter in the table", timeout_s=30)


async def test_a_round_is_bounded_and_the_next_goes_on_where_it_ended(desk: QuarantineDesk) -> None:
    await desk.tell([letter(desk, n) for n in range(5)])
    collector = Collector(desk.settings.kafka, desk.settings.postgres, max_letters=2)
    for expected in (2, 4, 5, 5):
        await collector.round()
        assert (await desk.states(), collector.collected) == ({"open": expected}, expected)
    assert collector.figures()["state"] == "idle"


async def test_one_process_at_a_time_collects(desk: QuarantineDesk) -> None:
    await desk.tell([letter(desk, 1)])
    collector = Collector(desk.settings.kafka, desk.settings.postgres)
    async with open_connection(desk.settings.postgres) as other:
        assert await other.fetchval(queries("infra")["try_turn"], Turn.COLLECTOR)
        await collector.round()
        assert (await desk.states(), collector.state) == ({}, "standby")
    await collector.round()
    assert await desk.states() == {"open": 1}


async def test_what_newer_writers_wrote_is_learnt_before_it_is_judged(desk: QuarantineDesk) -> None:
    """What cannot be decoded is passed over for good."""
    await desk.tell([letter(desk, 1)])

    async def away() -> None:
        raise BusUnavailable("the schemas cannot be asked for")

    collector = Collector(desk.settings.kafka, desk.settings.postgres, learn_schemas=away)
    with pytest.raises(BusUnavailable):
        await collector.round()
    assert await desk.states() == {}
    await Collector(desk.settings.kafka, desk.settings.postgres).round()
    assert await desk.states() == {"open": 1}
