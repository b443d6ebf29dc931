from __future__ import annotations

from dataclasses import replace

from infra.topic_plan import Drift, Growth, Layout, TopicPlan, plan_topics
from schemas.topics import RESULTS, SCHEMAS, USAGE, Topic, all_topics, requests_topic


def plan(*topics: Topic, **found: tuple[int, dict[str, str]]) -> TopicPlan:
    """`found` by the beginning of a topic's name: partitions, and settings that differ from the declared ones."""
    layouts = {
        t.name: Layout(partitions=found[key][0], config={**t.config(), **found[key][1]})
        for t in topics
        for key in found
        if t.name.startswith(f"inference.{key}.")
    }
    return plan_topics(topics, layouts, bootstrap="broker:9092")


def only(drift: list[Drift]) -> Drift:
    (found,) = drift
    return found


def test_what_is_missing_is_created_and_what_is_as_declared_is_left() -> None:
    topics = all_topics()
    assert plan_topics(topics, {}, bootstrap="").create == list(topics)
    layouts = {t.name: Layout(partitions=t.partitions, config=t.config()) for t in topics}
    assert plan_topics(topics, layouts, bootstrap="") == TopicPlan()


def test_only_topics_whose_key_allows_it_grow() -> None:
    wide = replace(requests_topic(), partitions=12)
    grown = plan(wide, requests=(8, {}))
    assert grown == TopicPlan(grow=[Growth(topic=wide.name, found=8, partitions=12)])
    assert [t.name for t in all_topics(("default", "gpu-a")) if t.may_grow] == [
        "inference.requests.default.v1",
        "inference.requests.gpu-a.v1",
    ]
    kept = only(plan(USAGE, usage=(4, {})).drift)
    assert (kept.declared, kept.found) == ("8", "4")
    assert "customer_id" in kept.why
    assert "delete it and provision again" in kept.remedy


def test_partitions_are_never_taken_away() -> None:
    for topic, key in ((requests_topic(), "requests"), (RESULTS, "results"), (SCHEMAS, "schemas")):
        found = plan(topic, **{key: (16, {})})
        assert not found.grow
        assert "cannot take partitions away" in only(found.drift).why
    assert "declare 16 partitions" in only(plan(requests_topic(), requests=(16, {})).drift).remedy


def test_another_retention_is_told_with_the_command_that_would_mend_it() -> None:
    found = only(plan(USAGE, usage=(8, {"retention.ms": "1000"})).drift)
    assert (found.setting, found.found) == ("retention.ms", "1000")
    assert "cannot be had back" in found.why
    assert found.remedy == (
        "kafka-configs.sh --bootstrap-server broker:9092 --alter --entity-type topics "
        f"--entity-name inference.usage.v1 --add-config 'retention.ms={USAGE.retention_ms}'"
    )


def test_every_difference_of_a_topic_is_told() -> None:
    found = plan(
        USAGE, usage=(9, {"cleanup.policy": "compact", "retention.ms": "", "max.message.bytes": "1048576"})
    ).drift
    assert [d.setting for d in found] == ["partitions", "cleanup.policy", "retention.ms", "max.message.bytes"]
    assert found[2].found == "nothing"
