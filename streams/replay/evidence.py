"""The evidence of the four promises, as it is read: which topics there are, and their records up to frozen ends.

What does not decode is counted and shown to whoever wants its place; what to make of it is for `verify` to say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeVar

from infra.kafka import BusUnavailable
from infra.kafka_admin import open_admin
from infra.settings import ReplaySettings
from schemas.codec import DecodeError, decode_at
from schemas.keys import worker_group
from schemas.records import InferenceFinished, InferenceRequested, UsageRecorded
from schemas.topics import RESULTS, USAGE, requests_topic
from streams.log import LogReader, LogRecord, Progress, Span

#: Clocks of the hosts that stamp admission and of those that write to the log may differ by this much.
CLOCK_MARGIN = timedelta(minutes=10)

R = TypeVar("R", InferenceRequested, InferenceFinished, UsageRecorded)


class TopicsMissing(BusUnavailable):
    """Kafka answers, and has no topics of this namespace."""


@dataclass(slots=True, kw_only=True)
class Topics:
    """The topics of one namespace by name: those of all pools' requests, and how many partitions each has."""

    usage: str
    results: str
    requests: list[str]
    partitions: Mapping[str, int]


@dataclass(slots=True)
class Reading:
    """Reads typed records; `undecodable` counts per topic the others, but for those that somebody has discarded.

    `discarded` are the places (topic, partition, offset) of these; `written_off` counts those that do not decode.
    """

    reader: LogReader
    topics: Topics
    progress: Progress
    discarded: Set[tuple[str, int, int]] = frozenset()
    undecodable: Counter[str] = field(default_factory=Counter)
    written_off: Counter[str] = field(default_factory=Counter)

    async def freeze(self, topic: str, since: datetime | None) -> dict[int, Span]:
        """The spans of a topic as of now, beginning a margin before `since`."""
        start = None if since is None else since - CLOCK_MARGIN
        return await self.reader.freeze(topic, self.topics.partitions[topic], since=start)

    async def each(
        self,
        topic: str,
        spans: Mapping[int, Span],
        kind: type[R],
        use: Callable[[LogRecord, R], None],
        broken: Callable[[LogRecord], None] = lambda _r: None,
    ) -> None:
        """Hand every record of these spans to `use`, and what is no record of this kind to `broken`."""
        async for entry in self.reader.read(topic, spans, progress=self.progress):
            try:
                record = decode_at(entry, kind)
            except DecodeError:
                is_written_off = (topic, entry.partition, entry.offset) in self.discarded
                (self.written_off if is_written_off else self.undecodable)[topic] += 1
                broken(entry)
            else:
                use(entry, record)


async def survey(settings: ReplaySettings) -> tuple[Topics, dict[tuple[str, int], int]]:
    """The topics of this namespace, and how far the workers of each pool have let go of requests."""
    ns = settings.kafka.namespace
    any_pool = requests_topic("*").in_namespace(ns).name
    pattern = re.compile(re.escape(any_pool).replace(r"\*", "(.+)"))
    committed: dict[tuple[str, int], int] = {}
    async with open_admin(settings.kafka) as admin:
        partitions = await admin.partition_counts()
        requests = sorted(t for t in partitions if pattern.fullmatch(t))
        for topic in requests:
            found = pattern.fullmatch(topic)
            pool = found.group(1) if found else ""
            for place, offset in (await admin.committed(worker_group(ns, pool))).items():
                committed[place.topic, place.partition] = offset
    topics = Topics(
        usage=USAGE.in_namespace(ns).name,
        results=RESULTS.in_namespace(ns).name,
        requests=requests,
        partitions=partitions,
    )
    absent = [t for t in (topics.usage, topics.results) if t not in partitions]
    if absent or not requests:
        raise TopicsMissing(f"topics are missing ({', '.join(absent) or any_pool}); run 'inferlog provision'")
    return topics, committed


def after(old: Mapping[int, Span], new: Mapping[int, Span]) -> dict[int, Span]:
    """What was written between two freezings."""
    return {p: Span(first=s.first, begin=old[p].end, end=s.end) for p, s in new.items()}


def trimmed(topic: str, spans: Mapping[int, Span]) -> list[str]:
    """A note when retention has removed records that these spans would begin with; else nothing."""
    gone = [f"{p} (begins at {s.first})" for p, s in sorted(spans.items()) if s.trimmed]
    if not gone:
        return []
    reason = f"{topic}: retention has removed records from partition {', '.join(gone)}"
    return [f"{reason}; give --since with a time after which everything is still kept"]
