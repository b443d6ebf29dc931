from __future__ import annotations

from collections import Counter

import pytest

from schemas.topics import (
    ADJUSTMENTS,
    DEAD_LETTERS,
    USAGE,
    Topic,
    UnknownTopic,
    all_topics,
    find_topic,
    partition_for,
    partitions_for_version,
    requests_topic,
    short_name,
)


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


@pytest.mark.parametrize(
    ("name", "topic"),
    [
        ("usage", USAGE),
        ("inference.usage.v1", USAGE),
        ("dead-letters", DEAD_LETTERS),
        ("adjustments", ADJUSTMENTS),
        ("requests", requests_topic()),
        ("requests.big-gpus", requests_topic("big-gpus")),
        ("inference.requests.default.v1", requests_topic()),
    ],
)
def test_a_topic_is_found_by_its_short_and_its_full_name(name: str, topic: Topic) -> None:
    assert find_topic(name) == topic
    assert find_topic(name, namespace="mine") == topic.in_namespace("mine")
    assert find_topic(f"mine.{name}", namespace="mine") == topic.in_namespace("mine")


def test_every_topic_has_a_short_name() -> None:
    for topic in all_topics():
        assert find_topic(short_name(topic.name)) == topic
        assert short_name(topic.in_namespace("mine").name, namespace="mine") == short_name(topic.name)
    assert short_name(USAGE.name) == "usage"


@pytest.mark.parametrize("name", ["", "use", "requests.", "requests.Big", "mine.usage"])
def test_an_unknown_topic_is_told_what_there_is(name: str) -> None:
    with pytest.raises(UnknownTopic, match=r"expected one of usage, results, requests\[.POOL\], adjustments"):
        find_topic(name)
