"""The parts of a storm that decide: its plan, its stream, and what its books say when something is wrong."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta, timezone
from itertools import islice

import pytest

from tests.storms.books import weigh
from tests.storms.faults import FULL, FULL_S, Kind, in_lanes, outage_s, plan
from tests.storms.usage_stream import HourKey, Mix, UsageStream

NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)


def test_a_full_storm_has_everything_that_was_promised_of_it() -> None:
    assert Counter(f.kind for f in plan(7, FULL_S)) == {
        Kind.KILL_WORKER: 20,
        Kind.STOP_WORKER: 10,
        Kind.RESTART_POSTGRES: 3,
        Kind.POSTGRES_OUTAGE: 2,
        Kind.RESTART_KAFKA: 1,
        Kind.JOIN: 3,
        Kind.LEAVE: 3,
    }
    assert outage_s(FULL_S) == 20


@pytest.mark.parametrize("seconds", [20.0, 60.0, 300.0, 600.0, 3600.0])
@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_a_plan_follows_from_its_seed_and_leaves_nothing_out(seed: int, seconds: float) -> None:
    faults = plan(seed, seconds)
    assert faults == plan(seed, seconds) != plan(seed + 1, seconds)
    assert {f.kind for f in faults} == set(FULL)
    assert all(0.1 * seconds <= f.at_s <= 0.9 * seconds for f in faults)
    assert sorted((f for lane in in_lanes(faults) for f in lane), key=lambda f: f.at_s) == faults
    more = fewest = 0
    for fault in faults:
        more += {Kind.JOIN: 1, Kind.LEAVE: -1}.get(fault.kind, 0)
        fewest = min(fewest, more)
    assert (fewest, more) == (0, 0), "a worker leaves only after one has joined"


def test_a_stream_is_what_its_seed_says_and_repeats_a_twentieth() -> None:
    streams = [UsageStream(7, Mix(events=20_000), began=NOON) for _ in range(2)]
    first, second = (list(s.records()) for s in streams)
    assert first == second
    assert len({r.request_id for r in first}) == streams[0].unique == 20_000
    assert len(first) - 20_000 == streams[0].repeats
    assert 800 < streams[0].repeats < 1200
    ages = [NOON + timedelta(seconds=20_000 * streams[0].mix.apart_s) - r.occurred_at for r in first]
    assert timedelta(0) <= min(ages)
    assert timedelta(minutes=110) < max(ages) < timedelta(hours=2, minutes=1)
    assert ages != sorted(ages, reverse=True), "they come out of order"


def test_a_stream_that_is_left_early_has_the_sums_of_what_was_taken() -> None:
    stream = UsageStream(7, Mix(events=10**9, hot=True, customers=4), began=NOON)
    taken = {r.request_id: r for r in islice(stream.records(), 5_000)}
    assert stream.unique == len(taken)
    assert [stream.event(n).request_id for n in range(stream.unique)] == list(taken)
    assert sum(n for key, n in stream.sums.items() if key[-1] == "items") == sum(
        r.quantities["items"] for r in taken.values()
    )


def key(customer: str, meter: str = "requests") -> HourKey:
    return (customer, NOON, "digits", "0" * 64, "standard-v1", meter)


SENT = {key("a"): 3, key("a", "items"): 12, key("b"): 2, key("b", "items"): 8}


@pytest.mark.parametrize(
    ("billed", "absent", "strangers", "dead", "expected"),
    [
        (SENT, 0, 0, 0, (0, 0, 0, 0)),
        (SENT | {key("a"): 2, key("a", "items"): 8}, 1, 0, 0, (1, 0, 2, 0)),
        (SENT | {key("a"): 2, key("a", "items"): 8}, 0, 0, 0, (1, 0, 2, 0)),  # noted as counted, and not added
        (SENT | {key("b"): 3, key("b", "items"): 12}, 0, 0, 0, (0, 1, 2, 0)),
        (SENT | {key("a"): 2, key("b"): 3}, 0, 0, 0, (1, 1, 2, 0)),  # one too few here, one too many there
        (SENT | {key("b", "items"): 9}, 0, 0, 0, (0, 0, 1, 0)),
        (SENT | {key("c"): 1}, 0, 1, 0, (0, 1, 1, 0)),
        ({}, 5, 0, 0, (5, 0, 4, 0)),
        (SENT, 0, 0, 1, (0, 0, 0, 1)),
    ],
)
def test_the_books_see_what_is_wrong(
    billed: dict[HourKey, int], absent: int, strangers: int, dead: int, expected: tuple[int, int, int, int]
) -> None:
    found = weigh(SENT, billed, absent=absent, strangers=strangers, dead_letters=dead)
    assert (found.missing, found.double, found.wrong_sums, found.dead_letters) == expected
    assert found.even is (expected == (0, 0, 0, 0))
    assert len(found.examples) == found.wrong_sums
