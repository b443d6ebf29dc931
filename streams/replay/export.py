"""A topic, or a span of it, as the rows of a file: what is selected, what was written, what could not be read.

Ends are frozen before the first record is read and live offsets are never touched. Holds some thousand rows at a time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Set
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from enum import Enum
from typing import Any, cast

from infra.kafka_admin import open_admin
from infra.output import Output
from infra.postgres import open_connection, queries
from infra.settings import KafkaSettings, PostgresSettings
from schemas.codec import DecodeError, decode_at
from schemas.facts import Record
from schemas.lockfile import latest
from schemas.topics import Topic
from streams.log import LogRecord, Progress, Span, no_progress, open_log
from streams.replay.evidence import CLOCK_MARGIN
from streams.replay.rows import Csv, JsonLines, Row, RowWriter

#: Rows are handed to the writer when there are this many, or when their records have this many bytes.
_BATCH_ROWS = 2000
_BATCH_BYTES = 8 * 1024 * 1024
_PLACES_SHOWN = 10


class ExportError(ValueError):
    """What was asked for cannot be exported; the message says what can."""


class Format(str, Enum):
    """A format of files, which is also their suffix."""

    JSONL = "jsonl"
    CSV = "csv"
    AVRO = "avro"
    PARQUET = "parquet"

    @property
    def binary(self) -> bool:
        """Nothing for a terminal."""
        return self in (Format.AVRO, Format.PARQUET)


MakeWriter = Callable[[Output, type[Record]], RowWriter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which records: those that occurred in [since, until), of one partition or customer, and at most `limit`."""

    since: datetime | None = None
    until: datetime | None = None
    partition: int | None = None
    customer_id: str | None = None
    limit: int | None = None

    def spans(self, moment: datetime) -> bool:
        """Whether a moment lies in the span of time."""
        return (self.since is None or moment >= self.since) and (self.until is None or moment < self.until)

    def takes(self, record: Record) -> bool:
        """Whether a record is wanted."""
        if self.customer_id is not None and getattr(record, "customer_id", None) != self.customer_id:
            return False
        return self.spans(record.occurred_at)


@dataclass(slots=True, kw_only=True)
class Summary:
    """What an export holds: records written, offsets [begin, end) read per partition, and what did not decode.

    `written_off` counts the undecodable ones that somebody has discarded; they are in no other figure.
    """

    topic: str
    record: str
    schema_id: int
    records: int = 0
    size_bytes: int = 0
    spans: dict[int, Span] = field(default_factory=dict)
    undecodable: int = 0
    written_off: int = 0
    places: list[dict[str, object]] = field(default_factory=list)

    def note(self, error: DecodeError) -> None:
        """Count a record that is none, and keep the places of the first."""
        self.undecodable += 1
        if len(self.places) < _PLACES_SHOWN:
            self.places.append({"partition": error.partition, "offset": error.offset, "reason": error.reason})

    def plain(self) -> dict[str, Any]:
        """The summary in the values JSON has."""
        return {
            "topic": self.topic,
            "record": self.record,
            "schema_id": self.schema_id,
            "records": self.records,
            "size_bytes": self.size_bytes,
            "spans": [{"partition": p, **_without_first(asdict(s))} for p, s in sorted(self.spans.items())],
            "undecodable": {"count": self.undecodable, "first": self.places},
            "written_off": self.written_off,
        }


def _without_first(span: Mapping[str, int]) -> dict[str, int]:
    return {k: v for k, v in span.items() if k != "first"}


def require_customers(topic: Topic) -> None:
    """Raises ExportError when a topic's records are no customer's."""
    if "customer_id" not in {f.name for f in fields(cast("Any", topic.record))}:
        raise ExportError(f"{topic.record.__name__} has no customer_id, so --customer selects nothing from it")


def writer_for(form: Format) -> MakeWriter:
    """What writes files of this format. Raises ExportError when that needs a package that is not installed."""
    if form is Format.JSONL:
        return lambda out, kind: JsonLines(out.write, kind)
    if form is Format.CSV:
        return lambda out, kind: Csv(out.write, kind)
    if form is Format.AVRO:
        from streams.replay.avro_file import AvroFile

        return AvroFile
    try:
        from streams.replay.parquet_file import ParquetFile
    except ModuleNotFoundError as error:
        raise ExportError(
            f"Parquet files need the package '{error.name}', which is not installed here; install inferlog with the "
            "extra [export], or take --format avro"
        ) from error
    return ParquetFile


async def nothing_discarded(_topic: str) -> Set[tuple[int, int]]:
    """What is discarded where nobody can be asked."""
    return frozenset()


async def discarded_of(settings: PostgresSettings, topic: str) -> Set[tuple[int, int]]:
    """The places of a topic whose dead letters were discarded. Raises what infra.postgres raises when it is away."""
    async with open_connection(settings) as connection:
        rows = await connection.fetch(queries("streams.replay")["discarded_of"], topic)
    return {(r["partition"], r["offset"]) for r in rows}


async def export(
    settings: KafkaSettings,
    topic: Topic,
    selection: Selection,
    make_writer: MakeWriter,
    out: Output,
    *,
    discarded: Callable[[str], Awaitable[Set[tuple[int, int]]]] = nothing_discarded,
    progress: Progress = no_progress,
) -> Summary:
    """Write the selected records of a topic, in order of offset within each partition, and say what that was.

    Every record is resolved to the newest schema known here, whichever version it was written with. A record that does
    not decode has no time of its own: it counts when its time on the log lies in the span. `discarded` tells which
    (partition, offset) of a topic operators have discarded, and is asked at most once. Raises ExportError,
    BusUnavailable, KafkaError.
    """
    known: Set[tuple[int, int]] | None = None
    summary = Summary(topic=topic.name, record=topic.record.SCHEMA, schema_id=latest(topic.record.SCHEMA).id)
    async with open_admin(settings) as admin:
        partitions = (await admin.partitions([topic.name])).get(topic.name)
    if partitions is None:
        raise ExportError(f"topic {topic.name} does not exist on {settings.bootstrap}; see  inferlog provision")
    if selection.partition is not None and selection.partition >= partitions:
        raise ExportError(f"{topic.name} has partitions 0 to {partitions - 1}, asked was {selection.partition}")
    async with open_log(settings) as reader:
        since = None if selection.since is None else selection.since - CLOCK_MARGIN
        spans = await reader.freeze(topic.name, partitions, since=since)
        if selection.partition is not None:
            spans = {selection.partition: spans[selection.partition]}
        summary.spans = spans
        rows = Batches(make_writer(out, topic.record))
        async with aclosing(reader.read(topic.name, spans, progress=progress)) as entries:
            async for entry in entries:
                try:
                    record = decode_at(entry, topic.record)
                except DecodeError as error:
                    if selection.spans(entry.time):
                        known = await discarded(topic.name) if known is None else known
                        if (entry.partition, entry.offset) in known:
                            summary.written_off += 1
                        else:
                            summary.note(error)
                    continue
                if not selection.takes(record):
                    continue
                rows.add(entry, record)
                summary.records += 1
                if summary.records == selection.limit:
                    break
        rows.finish()
    summary.size_bytes = out.size_bytes
    return summary


async def customer_of(settings: PostgresSettings, name_or_id: str) -> str:
    """The customer's id. Raises ExportError when there is none, and what infra.postgres raises when it is away."""
    async with open_connection(settings) as connection:
        found: str | None = await connection.fetchval(queries("streams.replay")["customer"], name_or_id)
    if found is None:
        raise ExportError(
            f"there is no customer '{name_or_id}'; names and ids are those of  inferlog customers list, and without "
            "--customer the records of all are exported"
        )
    return found


class Batches:
    """Hands rows to their writer some at a time: a bounded number of them, and of bytes."""

    def __init__(self, writer: RowWriter) -> None:
        self._writer = writer
        self._held: list[Row] = []
        self._held_bytes = 0

    def add(self, entry: LogRecord, record: Record) -> None:
        """Take one row, and write those in hand when they are enough."""
        self._held.append(Row(entry, record))
        self._held_bytes += len(entry.value or b"")
        if len(self._held) >= _BATCH_ROWS or self._held_bytes >= _BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._writer.write(self._held)
        self._held, self._held_bytes = [], 0

    def finish(self) -> None:
        """Write the rest and end the file."""
        self._flush()
        self._writer.finish()
