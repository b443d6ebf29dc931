"""What is to be done about topics, given how they are declared and how the broker has them. Pure.

A missing topic is created and a short one grows, where its key allows that; every other difference is drift, told
with its reason and the command for an operator, because whatever mends it may delete or reorder records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from schemas.topics import Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A topic as the broker has it: number of partitions, and settings by name."""

    partitions: int
    config: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A topic that gets more partitions."""

    topic: str
    found: int
    partitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A topic that exists otherwise than declared: which setting, why it is left alone, what an operator can do."""

    topic: str
    setting: str
    declared: str
    found: str
    why: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPlan:
    """What reconciling comes to."""

    create: list[Topic] = field(default_factory=list)
    grow: list[Growth] = field(default_factory=list)
    drift: list[Drift] = field(default_factory=list)


def plan_topics(topics: Sequence[Topic], found: Mapping[str, Layout], *, bootstrap: str) -> TopicPlan:
    """Compare topics as declared with those the broker has, by name; `bootstrap` goes into the operator's commands."""
    plan = TopicPlan()
    for topic in topics:
        layout = found.get(topic.name)
        if layout is None:
            plan.create.append(topic)
            continue
        if topic.may_grow and layout.partitions < topic.partitions:
            plan.grow.append(Growth(topic=topic.name, found=layout.partitions, partitions=topic.partitions))
        elif layout.partitions != topic.partitions:
            plan.drift.append(_partitions(topic, layout.partitions))
        for setting, declared in topic.config().items():
            actual = layout.config.get(setting, "")
            if actual != declared:
                plan.drift.append(_setting(topic, setting, declared, actual, bootstrap))
    return plan


def _partitions(topic: Topic, found: int) -> Drift:
    if topic.may_grow:
        why = "Kafka cannot take partitions away"
        remedy = f"declare {found} partitions in schemas/topics.py"
    elif found > topic.partitions:
        why = f"Kafka cannot take partitions away, and the topic is meant to have {topic.partitions}: {topic.why}"
        remedy = _ANEW
    else:
        why = f"the key ({topic.key}) picks the partition: with more, records of one key would lie on two, out of order"
        remedy = _ANEW
    return Drift(
        topic=topic.name,
        setting="partitions",
        declared=str(topic.partitions),
        found=str(found),
        why=why,
        remedy=remedy,
    )


def _setting(topic: Topic, setting: str, declared: str, found: str, bootstrap: str) -> Drift:
    return Drift(
        topic=topic.name,
        setting=setting,
        declared=declared,
        found=found or "nothing",
        why=_WHY.get(setting, "it may have been set on purpose"),
        remedy=f"kafka-configs.sh --bootstrap-server {bootstrap} --alter --entity-type topics "
        f"--entity-name {topic.name} --add-config '{setting}={declared}'",
    )


_ANEW = (
    "no command mends it in place; while the topic is empty, delete it and provision again, "
    "else move to a topic of another name"
)
_WHY = {
    "retention.ms": "a shorter retention deletes records at once, and they cannot be had back",
    "cleanup.policy": "compaction keeps one record per key, deletion removes old ones; neither can be undone",
    "max.message.bytes": "records between the two sizes would be refused, or taken, from one moment to the next",
}
