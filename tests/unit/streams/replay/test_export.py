"""What an export selects and how its columns follow from the schemas; what cannot be had is said in words."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from infra.output import Output
from schemas.facts import RECORD_TYPES
from schemas.lockfile import latest
from schemas.records import InferenceFinished
from streams.log import LogRecord
from streams.replay.columns import PLACE, UnknownType, columns_of, exported_schema
from streams.replay.export import Batches, ExportError, Format, Selection, writer_for
from streams.replay.export_command import export_topic
from tests.factories import NOON, usage

PARQUET: dict[str, Any] = {
    "event_id": pa.string(),
    "occurred_at": pa.timestamp("us", tz="UTC"),
    "outcome": pa.string(),
    "quantities": pa.map_(pa.string(), pa.field("item", pa.int64(), nullable=False)),
    "batch_items": pa.int32(),
    "queue_us": pa.int64(),
    "_topic": pa.string(),
    "_partition": pa.int32(),
    "_offset": pa.int64(),
    "_timestamp": pa.timestamp("us", tz="UTC"),
}


def test_a_span_of_time_holds_its_beginning_and_not_its_end() -> None:
    selection = Selection(since=NOON, until=NOON + timedelta(hours=1), customer_id="cus_acme")
    assert selection.takes(usage(occurred_at=NOON))
    assert selection.takes(usage(occurred_at=NOON + timedelta(minutes=59)))
    assert not selection.takes(usage(occurred_at=NOON + timedelta(hours=1)))
    assert not selection.takes(usage(occurred_at=NOON - timedelta(microseconds=1)))
    assert not selection.takes(usage(occurred_at=NOON, customer_id="cus_other"))


def test_rows_in_hand_are_bounded_by_number_and_by_bytes() -> None:
    class Sizes(list[int]):
        def write(self, rows: Any) -> None:
            self.append(len(rows))

        def finish(self) -> None:
            pass

    def batches(count: int, size_bytes: int) -> list[int]:
        writer = Sizes()
        batches = Batches(writer)
        for n in range(count):
            value = bytes(size_bytes)
            batches.add(LogRecord(topic="t", partition=0, offset=n, time=NOON, key=None, value=value), usage())
        batches.finish()
        return list(writer)

    assert batches(5000, 1) == [2000, 2000, 1000]
    assert batches(5, 5 * 1024 * 1024) == [2, 2, 1]


@pytest.mark.parametrize("kind", RECORD_TYPES, ids=lambda k: k.__name__)
def test_every_field_of_every_record_is_a_column_with_its_doc(kind: Any) -> None:
    schema = exported_schema(kind.SCHEMA)
    columns = columns_of(schema)
    assert [c.name for c in columns] == [f["name"] for f in latest(kind.SCHEMA).definition()["fields"]] + [
        f["name"] for f in PLACE
    ]
    assert all(c.doc for c in columns)


@pytest.mark.parametrize("type_", ["double", ["string", "long"], {"type": "long", "logicalType": "timestamp-millis"}])
def test_a_type_without_a_column_is_named(type_: Any) -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "a", "type": {"type": "array", "items": type_}}]}
    with pytest.raises(UnknownType, match=r"R\.a\[\]"):
        columns_of(schema)


def test_a_type_that_is_referred_to_by_name_is_the_type_of_that_name() -> None:
    inner = {"type": "record", "name": "I", "fields": [{"name": "x", "type": "long"}]}
    fields = [{"name": "a", "type": inner}, {"name": "b", "type": ["null", "I"]}]
    first, second = columns_of({"type": "record", "name": "R", "fields": fields})
    assert (first.fields, first.nullable) == (second.fields, not second.nullable)


def test_parquet_has_the_types_of_the_schema() -> None:
    from streams.replay.parquet_file import ParquetFile

    class Sink(Output):
        def __init__(self) -> None:
            self.size_bytes = 0

        def write(self, data: bytes) -> int:  # type: ignore[override]
            self.size_bytes += len(data)
            return len(data)

        def flush(self) -> None:
            pass

    file = ParquetFile(Sink(), InferenceFinished)
    found = {field.name: field for field in file._schema}
    assert {name: found[name].type for name in PARQUET} == PARQUET
    assert found["error_code"].nullable
    assert not found["request_id"].nullable
    blob = found["outputs"].type.value_type.field("blob")
    assert (blob.nullable, blob.type.field("size_bytes").type) == (True, pa.int64())
    assert found["outputs"].type.value_type.field("data").type == pa.binary()


def test_without_pyarrow_only_parquet_is_refused_and_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "streams.replay.parquet_file", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for form in set(Format) - {Format.PARQUET}:
        writer_for(form)
    with pytest.raises(ExportError, match=r"'pyarrow'.*\[export\]"):
        writer_for(Format.PARQUET)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("usage",), "give --format, or a file whose name ends in .jsonl, .csv, .avro or .parquet"),
        (("usage", "--output", "usage.xlsx"), "give --format"),
        (("usage", "--format", "csv", "--since", "2026-03-02", "--until", "2026-03-02"), "--until must lie after"),
        (("use", "--format", "csv"), "there is no topic 'use'"),
        (("usag",), "TOPIC: there is no topic 'usag'; expected one of usage, results, requests[.POOL], adjustments"),
        (("usage", "--output", "/nope/x.csv"), "/nope/x.csv: there is no folder /nope; make it, or give another name"),
        (("usage", "--format", "csv", "--customer", "acme"), "where --customer is looked up"),
        (("models", "--format", "csv", "--customer", "acme"), "ModelPublished has no customer_id"),
    ],
)
def test_a_call_that_cannot_be_meant_is_refused_before_anything_is_read(arguments: tuple[str, ...], words: str) -> None:
    env = {"INFERLOG_KAFKA_BOOTSTRAP": "127.0.0.1:1", "INFERLOG_POSTGRES_DSN": "postgresql://x:y@127.0.0.1:1/x"}
    done = CliRunner().invoke(export_topic, arguments, env=env)
    assert done.exit_code in (1, 2)
    assert words in " ".join(done.stderr.split())
