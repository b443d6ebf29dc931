"""Gathers the evidence for the four promises and has it judged: topics and tables only, nothing asked of any process.

The order of the reads makes a living system provable: what must already be there for a record to exist is read
after that record.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeVar
from uuid import UUID

from infra.kafka import BusUnavailable, KafkaError
from infra.kafka_admin import open_admin
from infra.postgres import Connection, connect, queries
from infra.settings import ReplaySettings
from schemas.codec import DecodeError, decode_at
from schemas.keys import ledger_group, worker_group
from schemas.records import InferenceFinished, InferenceRequested, UsageRecorded
from schemas.topics import RESULTS, USAGE, requests_topic
from streams.replay.conservation import RequestBook
from streams.replay.log import LogReader, LogRecord, Progress, Span, no_progress, open_log
from streams.replay.proofs import LedgerKey, LedgerProof, LimitProof, Verdict, hour_start

log = logging.getLogger(__name__)

#: Clocks of the hosts that stamp admission and of those that write to the log may differ by this much.
CLOCK_MARGIN = timedelta(minutes=10)
#: How long usage and result of one request may lie apart on the log: they are sent together, acknowledged apart.
SETTLE_S = 10.0
_SETTLE_PAUSE_S = 0.25

R = TypeVar("R", InferenceRequested, InferenceFinished, UsageRecorded)


class NotCaughtUp(RuntimeError):
    """The ledger did not reach the end of the usage topic in time; the message says how far it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All verdicts, with I4's table per hour, the first open requests, and undecodable records per topic."""

    verdicts: tuple[Verdict, ...]
    hours: list[dict[str, object]]
    open_ids: list[str]
    undecodable: Mapping[str, int]

    @property
    def exit_code(self) -> int:
        """0 all hold, 1 one is violated, 2 one could not be checked."""
        if any(v.holds is False for v in self.verdicts):
            return 1
        return 2 if any(v.holds is None for v in self.verdicts) else 0


@dataclass(slots=True, kw_only=True)
class _Topics:
    usage: str
    results: str
    requests: list[str]
    partitions: Mapping[str, int]


@dataclass(slots=True)
class _Reading:
    reader: LogReader
    topics: _Topics
    progress: Progress
    undecodable: dict[str, int] = field(default_factory=dict)

    async def freeze(self, topic: str, since: datetime | None) -> dict[int, Span]:
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
        async for entry in self.reader.read(topic, spans, progress=self.progress):
            try:
                record = decode_at(entry, kind)
            except DecodeError:
                self.undecodable[topic] = self.undecodable.get(topic, 0) + 1
                broken(entry)
            else:
                use(entry, record)


async def verify(
    settings: ReplaySettings, *, since: datetime | None = None, progress: Progress = no_progress
) -> Report:
    """Judge I1 to I4, for everything or for the hours from the one of `since` on.

    Raises BusUnavailable, and what infra.postgres raises, when a server cannot be reached.
    """
    since = None if since is None else hour_start(since)
    try:
        topics, committed = await _survey(settings)
    except KafkaError as error:
        raise BusUnavailable(f"{settings.kafka.bootstrap}: {type(error).__name__}: {error}") from error
    async with open_log(settings.kafka) as reader:
        reading = _Reading(reader, topics, progress)
        connection = await connect(settings.postgres, command_timeout_s=300)
        try:
            return await _judge(settings, reading, connection, committed, since)
        finally:
            await connection.close(timeout=5)


async def _survey(settings: ReplaySettings) -> tuple[_Topics, dict[tuple[str, int], int]]:
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
    topics = _Topics(
        usage=USAGE.in_namespace(ns).name,
        results=RESULTS.in_namespace(ns).name,
        requests=requests,
        partitions=partitions,
    )
    absent = [t for t in (topics.usage, topics.results) if t not in partitions]
    if absent or not requests:
        raise BusUnavailable(f"topics are missing ({', '.join(absent) or any_pool}); run 'inferlog provision'")
    return topics, committed


async def _judge(
    settings: ReplaySettings,
    reading: _Reading,
    connection: Connection,
    committed: Mapping[tuple[str, int], int],
    since: datetime | None,
) -> Report:
    # 1  (done) the workers' commits, before results: below them every result is on the log
    # 2  one snapshot of the tables, before usage: all it counted is on the log
    # 3  ends of usage, then results, then requests: whatever a record refers to is read after it
    # 4  the tails of usage and results, for pairs that were being written meanwhile
    topics = reading.topics
    group = ledger_group(settings.kafka.namespace)
    sql = queries("streams.replay")
    book = RequestBook(since=since)
    limits = LimitProof(since=since)
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        positions = await connection.fetch(sql["positions"], group, topics.usage)
        dead = {(r["partition"], r["offset"]) for r in await connection.fetch(sql["dead"], topics.usage)}
        next_offsets = {r["partition"]: r["next_offset"] for r in positions}
        ledger = LedgerProof(next_offsets=next_offsets, dead=dead, since=since)
        usage = await reading.freeze(topics.usage, since)
        results = await reading.freeze(topics.results, since)
        requests = {topic: await reading.freeze(topic, since) for topic in topics.requests}

        def use_usage(entry: LogRecord, record: UsageRecorded) -> None:
            ledger.add(entry.partition, entry.offset, record)
            (book.add_aside if (entry.partition, entry.offset) in dead else book.add_usage)(record)

        await reading.each(
            topics.usage, usage, UsageRecorded, use_usage, lambda e: ledger.add_undecodable(e.partition, e.offset)
        )
        rows: dict[LedgerKey, int] = {
            (r["customer_id"], r["hour"], r["model"], r["version"], r["price_id"], r["meter"]): r["quantity"]
            async for r in connection.cursor(sql["rows"], since, prefetch=5000)
        }
        processed = [
            UUID(int=r["request_id"].int) async for r in connection.cursor(sql["processed"], since, prefetch=20_000)
        ]
        billed = await connection.fetch(sql["billed"], list(ledger.aside))
    i1 = ledger.finish(
        rows=rows,
        processed=processed,
        aside_billed={UUID(int=r["request_id"].int) for r in billed},
        notes=_trimmed(topics.usage, usage),
    )
    await reading.each(
        topics.results,
        results,
        InferenceFinished,
        lambda e, r: book.add_result((e.topic, e.partition, e.offset), r),
    )

    def use_request(entry: LogRecord, record: InferenceRequested) -> None:
        book.add_request((entry.topic, entry.partition, entry.offset), record)
        limits.add(record)

    for topic, spans in requests.items():
        await reading.each(topic, spans, InferenceRequested, use_request)
    notes = [note for topic, spans in {topics.results: results, **requests}.items() for note in _trimmed(topic, spans)]
    if not notes:  # else halves are missing that will never come
        await _settle(reading, book, usage, results)
    i4, hours, open_ids = book.prove_conservation(committed=committed, notes=notes)
    return Report(
        verdicts=(i1, limits.finish(), book.prove_versions(), i4),
        hours=hours,
        open_ids=open_ids,
        undecodable=dict(reading.undecodable),
    )


async def _settle(reading: _Reading, book: RequestBook, usage: Mapping[int, Span], results: Mapping[int, Span]) -> None:
    """Read on, for at most SETTLE_S, for the missing half of pairs that were on their way when the ends were frozen."""
    topics = reading.topics
    ends = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        wanted = book.unsettled()
        if not wanted or asyncio.get_running_loop().time() > ends:
            return
        await asyncio.sleep(_SETTLE_PAUSE_S)
        new_usage = _after(usage, await reading.freeze(topics.usage, None))
        new_results = _after(results, await reading.freeze(topics.results, None))

        def use_usage(_entry: LogRecord, record: UsageRecorded, wanted: set[UUID] = wanted) -> None:
            if record.request_id in wanted:
                book.add_usage(record)

        def use_result(entry: LogRecord, record: InferenceFinished, wanted: set[UUID] = wanted) -> None:
            if record.request_id in wanted:
                book.add_result((entry.topic, entry.partition, entry.offset), record)

        await reading.each(topics.usage, new_usage, UsageRecorded, use_usage)
        await reading.each(topics.results, new_results, InferenceFinished, use_result)
        usage, results = new_usage, new_results


def _after(old: Mapping[int, Span], new: Mapping[int, Span]) -> dict[int, Span]:
    return {p: Span(first=s.first, begin=old[p].end, end=s.end) for p, s in new.items()}


def _trimmed(topic: str, spans: Mapping[int, Span]) -> list[str]:
    gone = [f"{p} (begins at {s.first})" for p, s in sorted(spans.items()) if s.trimmed]
    if not gone:
        return []
    reason = f"{topic}: retention has removed records from partition {', '.join(gone)}"
    return [f"{reason}; give --since with a time after which everything is still kept"]


async def wait_for_ledger(
    settings: ReplaySettings, *, timeout_s: float, progress: Callable[[int], None] = lambda _lag: None
) -> None:
    """Return when the ledger has passed every usage record that was on the log at the time of the call.

    Raises NotCaughtUp after `timeout_s`, BusUnavailable, and what infra.postgres raises.
    """
    topic = USAGE.in_namespace(settings.kafka.namespace).name
    group = ledger_group(settings.kafka.namespace)
    clock = asyncio.get_running_loop().time
    ends_at = clock() + timeout_s
    connection = await connect(settings.postgres)
    try:
        async with open_log(settings.kafka) as reader:
            spans = await reader.freeze(topic, USAGE.partitions)
            while True:
                found = await connection.fetch(queries("streams.replay")["positions"], group, topic)
                positions = {r["partition"]: r["next_offset"] for r in found}
                waiting = {
                    p: Span(first=s.first, begin=max(positions.get(p, 0), s.first), end=s.end)
                    for p, s in spans.items()
                    if max(positions.get(p, 0), s.first) < s.end
                }
                # What lies ahead may be transaction markers, which nobody reads and the ledger never passes.
                spans = {
                    p: s
                    for p, s in waiting.items()
                    if await reader.first(topic, p, begin=s.begin, end=s.end) is not None
                }
                progress(sum(s.end - s.begin for s in spans.values()))
                if not spans:
                    return
                if clock() > ends_at:
                    raise NotCaughtUp(
                        f"{topic}: the ledger has not caught up within {timeout_s:g} s: "
                        + ", ".join(f"partition {p} at {s.begin} of {s.end}" for p, s in sorted(spans.items()))
                    )
                await asyncio.sleep(0.2)
    finally:
        await connection.close(timeout=5)
