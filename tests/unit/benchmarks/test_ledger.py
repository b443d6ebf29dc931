"""What the ledger's benchmark draws, measures and compares; that its servers run is for the benchmark itself."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.ledger.events import DUPLICATES, LATE, Generated, differences
from benchmarks.ledger.kafka_streams import VARIANTS, read_samples
from benchmarks.ledger.latency import latencies_s
from benchmarks.ledger.pace import Sample, pace
from benchmarks.percentiles import percentiles_ms
from schemas.codec import decode
from schemas.records import UsageRecorded
from tests.factories import NOON


def test_the_expected_sums_are_those_of_the_records() -> None:
    generated = Generated(events=5000, seed=7, begins=NOON)
    written = list(generated.records())
    records = [decode(value, UsageRecorded) for _, value in written]
    assert [r.customer_id.encode() for r in records] == [key for key, _ in written]
    once, read = Counter(), Counter()
    seen = set()
    for r in records:
        hour = int(r.occurred_at.replace(minute=0, second=0, microsecond=0).timestamp())
        for meter, quantity in r.quantities.items():
            read[r.customer_id, hour, meter] += quantity
            once[r.customer_id, hour, meter] += 0 if r.request_id in seen else quantity
        seen.add(r.request_id)
    assert (generated.once, generated.read) == (once, read)
    assert DUPLICATES / 2 < 1 - len(seen) / len(records) < 2 * DUPLICATES
    order = [r.occurred_at for r in records]
    late = sum(at < before for before, at in pairwise(order))
    assert LATE / 2 < late / len(records) < 2 * (LATE + DUPLICATES)


def test_a_seed_draws_the_same_records_again() -> None:
    assert list(Generated(events=200, seed=3, begins=NOON).records()) == list(
        Generated(events=200, seed=3, begins=NOON).records()
    )
    assert list(Generated(events=200, seed=3, begins=NOON).records()) != list(
        Generated(events=200, seed=4, begins=NOON).records()
    )


def test_sums_that_differ_are_named_and_counted() -> None:
    expected = Counter({("a", 0, "items"): 3, ("b", 0, "items"): 4})
    assert differences(expected, Counter(expected)) == []
    assert differences(expected, Counter({("a", 0, "items"): 3, ("b", 0, "items"): 5})) == [
        "b, hour 0, items: expected 4, found 5",
        "1 sums differ",
    ]
    assert differences(expected, Counter({("a", 0, "items"): 3}))[-1] == "1 sums differ"
    assert differences(expected, expected + Counter({("c", 0, "items"): 1}))[-1] == "1 sums differ"


def sample(at_s: float, records: int, own: float) -> Sample:
    return Sample(at_s=at_s, records=records, cpu_s={"own": own, "kafka": own / 10})


def test_the_pace_leaves_out_how_a_run_begins_and_ends() -> None:
    run = [sample(0, 0, 5.0), sample(10, 100, 9.0), sample(12, 500, 9.4), sample(14, 960, 9.8), sample(60, 1000, 20.0)]
    found = pace(run, total=1000)
    assert (found.records, found.records_per_s) == (860, 215)
    assert found.cpu_us == pytest.approx({"own": 0.8e6 / 860, "kafka": 0.08e6 / 860})


@pytest.mark.parametrize("records", [[0, 1000], [0, 100, 940], [0]])
def test_a_run_too_short_for_two_samples_has_no_pace(records: list[int]) -> None:
    with pytest.raises(ValueError, match="use more events"):
        pace([sample(at, count, at) for at, count in enumerate(records)], total=1000)


def test_a_record_is_visible_with_the_first_look_past_its_offset() -> None:
    due = {(0, 0): 1.0, (0, 1): 1.1, (1, 7): 1.2, (2, 0): 1.3}
    looks = [(1.05, {}), (1.5, {0: 1}), (2.0, {0: 1, 1: 7}), (2.5, {0: 2, 1: 8})]
    assert latencies_s(due, looks) == pytest.approx([0.5, 1.3, 1.4])  # partition 2 was never seen


def test_percentiles_are_of_the_records_and_in_milliseconds() -> None:
    found = percentiles_ms([n / 1000 for n in range(1, 201)])
    assert found == {"p50_ms": 101, "p95_ms": 191, "p99_ms": 199, "max_ms": 200}


def test_samples_of_kafka_streams_are_read_by_variant() -> None:
    text = "some log line\nAT alos 2000000000 10 500000000\nAT eos 1 0 0\nAT alos 3000000000 20 750000000\nDONE alos\n"
    found = read_samples(text)
    assert [(s.at_s, s.records, s.cpu_s["own"]) for s in found["alos"]] == [(2.0, 10, 0.5), (3.0, 20, 0.75)]
    assert list(found) == ["alos", "eos"]
    assert len({v.name for v in VARIANTS}) == len(VARIANTS)
