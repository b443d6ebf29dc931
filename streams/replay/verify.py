"""The four promises judged from topics and tables only, nothing asked of any process.

The order of the reads makes a living system provable: what must already be there for a record to exist is read
after that record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from infra.kafka import BusUnavailable, KafkaError
from infra.postgres import Connection, open_connection, queries
from infra.settings import ReplaySettings
from schemas.keys import ledger_group
from schemas.records import InferenceFinished, InferenceRequested, UsageRecorded
from schemas.topics import USAGE
from streams.log import LogRecord, Progress, Span, no_progress, open_log
from streams.replay.conservation import RequestBook
from streams.replay.evidence import Reading, after, survey, trimmed
from streams.replay.limits import LimitProof
from streams.replay.proofs import DISCARDED, REDRIVEN, LedgerKey, LedgerProof, Verdict, hour_start

#: How long usage and result of one request may lie apart on the log: they are sent together, acknowledged apart.
SETTLE_S = 10.0
_SETTLE_PAUSE_S = 0.25


class NotCaughtUp(RuntimeError):
    """The ledger did not reach the end of the usage topic in time; the message says how far it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All verdicts, with I4's table per hour, the first open requests, and undecodable records per topic.

    `written_off` counts the undecodable ones that somebody has discarded, which are not among those; `open_letters`
    counts per topic the dead letters in the table that nobody has redriven or discarded.
    """

    verdicts: tuple[Verdict, ...]
    hours: list[dict[str, object]]
    open_ids: list[str]
    undecodable: Mapping[str, int]
    written_off: Mapping[str, int]
    open_letters: Mapping[str, int]

    @property
    def exit_code(self) -> int:
        """0 all hold, 1 one is violated, 2 one could not be checked."""
        if any(v.holds is False for v in self.verdicts):
            return 1
        return 2 if any(v.holds is None for v in self.verdicts) else 0


async def verify(
    settings: ReplaySettings, *, since: datetime | None = None, progress: Progress = no_progress
) -> Report:
    """Judge I1 to I4, for everything or for the hours from the one of `since` on.

    Raises BusUnavailable, and what infra.postgres raises, when a server cannot be reached.
    """
    since = None if since is None else hour_start(since)
    try:
        topics, committed = await survey(settings)
    except KafkaError as error:
        raise BusUnavailable(f"{settings.kafka.bootstrap}: {type(error).__name__}: {error}") from error
    async with open_log(settings.kafka) as reader:
        reading = Reading(reader, topics, progress)
        async with open_connection(settings.postgres, command_timeout_s=300) as connection:
            return await _judge(settings, reading, connection, committed, since)


async def _judge(
    settings: ReplaySettings,
    reading: Reading,
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
        letters = {(r["partition"], r["offset"]): r["state"] for r in await connection.fetch(sql["dead"], topics.usage)}
        settled = {place: state for place, state in letters.items() if state in (REDRIVEN, DISCARDED)}
        discarded = await connection.fetch(sql["discarded"])
        reading.discarded = {(r["topic"], r["partition"], r["offset"]) for r in discarded}
        open_letters = {r["topic"]: r["letters"] for r in await connection.fetch(sql["open_letters"])}
        next_offsets = {r["partition"]: r["next_offset"] for r in positions}
        first_id = await connection.fetchval(sql["first_id"])
        ledger = LedgerProof(
            next_offsets=next_offsets,
            dead=letters.keys(),
            settled=settled,
            since=since,
            first_id=None if first_id is None else UUID(int=first_id.int),
        )
        usage = await reading.freeze(topics.usage, since)
        results = await reading.freeze(topics.results, since)
        requests = {topic: await reading.freeze(topic, since) for topic in topics.requests}

        def use_usage(entry: LogRecord, record: UsageRecorded) -> None:
            ledger.add(entry.partition, entry.offset, record)
            state = letters.get((entry.partition, entry.offset), REDRIVEN)
            if state == REDRIVEN:
                book.add_usage(record)
            else:
                book.add_aside(record, written_off=state == DISCARDED)

        await reading.each(
            topics.usage, usage, UsageRecorded, use_usage, lambda e: ledger.add_undecodable(e.partition, e.offset)
        )
        rows: dict[LedgerKey, int] = {
            (r["customer_id"], r["hour"], r["model"], r["version"], r["price_id"], r["meter"]): r["quantity"]
            async for r in connection.cursor(sql["rows"], since, prefetch=5000)
        }
        outside = [
            f"{r['customer_id']} hour '{r['hour']}' {r['model']} {r['meter']}: {r['quantity']}"
            for r in await connection.fetch(sql["rows_outside"])
        ]
        processed = [
            UUID(int=r["request_id"].int) async for r in connection.cursor(sql["processed"], since, prefetch=20_000)
        ]
        billed = await connection.fetch(sql["billed"], list(ledger.aside))
    i1 = ledger.finish(
        rows=rows,
        processed=processed,
        aside_billed={UUID(int=r["request_id"].int) for r in billed},
        outside=outside,
        notes=trimmed(topics.usage, usage),
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
    notes = [note for topic, spans in {topics.results: results, **requests}.items() for note in trimmed(topic, spans)]
    if not notes:  # else halves are missing that will never come
        await _settle(reading, book, usage, results)
    i4, hours, open_ids = book.prove_conservation(committed=committed, notes=notes)
    return Report(
        verdicts=(i1, limits.finish(), book.prove_versions(), i4),
        hours=hours,
        open_ids=open_ids,
        undecodable=dict(reading.undecodable),
        written_off=dict(reading.written_off),
        open_letters=open_letters,
    )


async def _settle(reading: Reading, book: RequestBook, usage: Mapping[int, Span], results: Mapping[int, Span]) -> None:
    """Read on, for at most SETTLE_S, for the missing half of pairs that were on their way when the ends were frozen."""
    topics = reading.topics
    ends = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        wanted = book.unsettled()
        if not wanted or asyncio.get_running_loop().time() > ends:
            return
        await asyncio.sleep(_SETTLE_PAUSE_S)
        new_usage = after(usage, await reading.freeze(topics.usage, None))
        new_results = after(results, await reading.freeze(topics.results, None))

        def use_usage(_entry: LogRecord, record: UsageRecorded, wanted: set[UUID] = wanted) -> None:
            if record.request_id in wanted:
                book.add_usage(record)

        def use_result(entry: LogRecord, record: InferenceFinished, wanted: set[UUID] = wanted) -> None:
            if record.request_id in wanted:
                book.add_result((entry.topic, entry.partition, entry.offset), record)

        await reading.each(topics.usage, new_usage, UsageRecorded, use_usage)
        await reading.each(topics.results, new_results, InferenceFinished, use_result)
        usage, results = new_usage, new_results


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
    async with (
        open_connection(settings.postgres) as connection,
        open_log(settings.kafka, decodes=False) as reader,
    ):
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
                p: s for p, s in waiting.items() if await reader.first(topic, p, begin=s.begin, end=s.end) is not None
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
