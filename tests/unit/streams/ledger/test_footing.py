"""A reader begins at explicit offsets, and what it fetches says what it follows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from infra.kafka import TopicPartition
from streams.ledger.footing import Footing

PLACE = TopicPartition("t", 0)


class Driver:
    """An aiokafka consumer of one partition: its group's offset, and the topic's first."""

    def __init__(self, committed: int | None, first: int) -> None:
        self._committed = committed
        self.first = first
        self.sought: list[int] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def assignment(self) -> set[TopicPartition]:
        return {PLACE}

    async def committed(self, _tp: TopicPartition) -> int | None:
        return self._committed

    async def beginning_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        self.meanwhile()
        return dict.fromkeys(tps, self.first)

    def seek(self, _tp: TopicPartition, offset: int) -> None:
        self.sought.append(offset)


async def follows(footing: Footing, driver: Driver, offsets: list[int]) -> list[tuple[int, int]]:
    """(what it follows, offset) of each record of a fetch."""
    told = await footing.follow(driver, {PLACE: [SimpleNamespace(offset=o) for o in offsets]})
    return [(stood, r.offset) for stood, r in told[PLACE].records] if PLACE in told else []


@pytest.mark.parametrize(("committed", "first", "begin"), [(None, 0, 0), (None, 6, 6), (0, 0, 0), (5, 0, 5)])
async def test_every_assignment_begins_at_an_explicit_offset(committed: int | None, first: int, begin: int) -> None:
    driver = Driver(committed, first)
    assert await Footing().begin(driver, {PLACE}) == {PLACE: begin}
    assert driver.sought == [begin]


async def test_records_follow_each_other_across_fetches_and_gaps_of_the_log() -> None:
    footing, driver = Footing(), Driver(None, 0)
    await footing.begin(driver, {PLACE})
    assert await follows(footing, driver, [0, 1, 4]) == [(0, 0), (1, 1), (2, 4)]
    assert await follows(footing, driver, []) == []
    assert await follows(footing, driver, [5]) == [(5, 5)]
    assert await follows(footing, driver, [9]) == [(6, 9)]


async def test_what_the_topic_no_longer_keeps_is_not_passed_off_as_a_gap() -> None:
    footing, driver = Footing(), Driver(3, 0)
    await footing.begin(driver, {PLACE})
    driver.first = 7
    assert await follows(footing, driver, [8, 9]) == [(7, 8), (9, 9)]


async def test_a_reader_that_went_back_follows_where_it_is() -> None:
    footing, driver = Footing(), Driver(5, 0)
    await footing.begin(driver, {PLACE})
    assert await follows(footing, driver, [5]) == [(5, 5)]
    assert await follows(footing, driver, [2, 3]) == [(2, 2), (3, 3)]


async def test_what_was_fetched_before_its_partition_had_begun_is_left_out_and_comes_again() -> None:
    """The client hands it out while it is still asked where to begin; a marker at 3 is not in it, and is no hole."""
    footing, driver = Footing(), Driver(3, 0)
    assert await follows(footing, driver, [4, 5]) == []
    await footing.begin(driver, {PLACE})
    assert await follows(footing, driver, [4, 5]) == [(3, 4), (5, 5)]
    footing.forget([PLACE])
    assert await follows(footing, driver, [6]) == []


async def test_a_fetch_that_a_new_assignment_overtook_is_dropped() -> None:
    footing, driver = Footing(), Driver(3, 0)
    await footing.begin(driver, {PLACE})
    driver.meanwhile = lambda: footing._stands.update({PLACE: 1})
    assert await follows(footing, driver, [5]) == []
    assert await follows(footing, driver, [1, 2, 3]) == [(1, 1), (2, 2), (3, 3)]


async def test_a_fetch_of_several_partitions_is_measured_from_before_any_question() -> None:
    """A question about the first partition takes time, in which a new assignment may seek the second."""
    other = TopicPartition("t", 1)
    footing, driver = Footing(), Driver(3, 0)
    footing._stands, footing._epochs = {PLACE: 3, other: 100}, {PLACE: 1, other: 2}
    driver.meanwhile = lambda: footing._stands.update({other: 50})
    told = await footing.follow(driver, {PLACE: [SimpleNamespace(offset=5)], other: [SimpleNamespace(offset=100)]})
    assert {tp: [stood for stood, _ in fetch.records] for tp, fetch in told.items()} == {PLACE: [3]}


async def test_a_fetch_that_was_begun_anew_at_the_same_place_is_dropped() -> None:
    """It comes again, and follows what was read since only by chance."""
    footing, driver = Footing(), Driver(3, 0)
    await footing.begin(driver, {PLACE})
    before = footing._begun
    driver.meanwhile = lambda: footing._epochs.update({PLACE: before + 1})
    assert await follows(footing, driver, [5]) == []


async def test_every_beginning_of_a_partition_has_an_epoch_of_its_own() -> None:
    footing, driver = Footing(), Driver(3, 0)
    await footing.begin(driver, {PLACE})
    first = footing.epoch(PLACE)
    assert (await footing.follow(driver, {PLACE: [SimpleNamespace(offset=3)]}))[PLACE].epoch == first
    footing.forget({PLACE})
    assert footing.epoch(PLACE) is None
    await footing.begin(driver, {PLACE})
    assert footing.epoch(PLACE) not in (None, first)
