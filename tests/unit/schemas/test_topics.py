from __future__ import annotations

from collections import Counter

import pytest

from schemas.topics import all_topics, partition_for, partitions_for_version


def test_topic_names_are_spelled_once_and_take_the_namespace() -> None:
    names = [t.name for t in all_topics(("default", "gpu-a"))]
    assert len(names) == len(set(names)) == 13
    assert all_topics()[0].in_namespace("t1").name == "t1.inference.requests.default.v1"


def test_requests_of_a_version_stay_on_its_partitions() -> None:
    chosen = set(partitions_for_version("a" * 64, partitions=8, spread=2))
    assert {partition_for("a" * 64, n, partitions=8, spread=2) for n in range(100)} == chosen
    assert len(chosen) == 2


def test_raising_the_spread_only_adds_partitions() -> None:
    for version in (f"{n:064x}" for n in range(50)):
        narrow = partitions_for_version(version, partitions=8, spread=2)
        assert partitions_for_version(version, partitions=8, spread=5)[:2] == narrow


def test_more_partitions_move_few_versions() -> None:
    moved = sum(
        partitions_for_version(v, partitions=8, spread=1) != partitions_for_version(v, partitions=9, spread=1)
        for v in (f"{n:064x}" for n in range(900))
    )
    assert moved < 200  # one in nine is expected


def test_versions_spread_over_all_partitions() -> None:
    counts = Counter(partitions_for_version(f"{n:064x}", partitions=8, spread=1)[0] for n in range(4000))
    assert set(counts) == set(range(8))
    assert max(counts.values()) < 2 * min(counts.values())


def test_a_spread_beyond_the_topic_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 to 8"):
        partitions_for_version("a", partitions=8, spread=9)
