"""Any record of any type comes out of a file as it went in, in every format."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import datetime, timezone
from io import BytesIO, StringIO
from typing import Any

import fastavro
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.output import Output
from schemas.facts import RECORD_TYPES
from schemas.lockfile import latest
from schemas.plain import to_plain
from streams.log import LogRecord
from streams.replay.export import Format, writer_for
from streams.replay.rows import PLACE_NAMES, Row
from tests.strategies import records_of

TIMES = st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(timezone.utc))  # noqa: DTZ001


def written(form: Format, rows: list[Row], kind: type[Any]) -> bytes:
    out = BytesIO()
    writer = writer_for(form)(Output(out), kind)
    half = len(rows) // 2
    writer.write(rows[:half])
    writer.write(rows[half:])
    writer.finish()
    return out.getvalue()


def from_jsonl(data: bytes, _kind: type[Any]) -> list[Any]:
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def from_avro(data: bytes, _kind: type[Any]) -> list[Any]:
    return [to_plain(one) for one in fastavro.reader(BytesIO(data))]


def from_parquet(data: bytes, _kind: type[Any]) -> list[Any]:
    table = pyarrow.parquet.read_table(BytesIO(data))
    return [{k: _from_arrow(v) for k, v in row.items()} for row in table.to_pylist()]


def _from_arrow(value: Any) -> Any:
    """Arrow's map is a list of pairs; the rest is as `to_plain` makes it."""
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return dict(value)
    if isinstance(value, list):
        return [_from_arrow(one) for one in value]
    if isinstance(value, Mapping):
        return {k: _from_arrow(v) for k, v in value.items()}
    return to_plain(value)


READERS: dict[Format, Callable[[bytes, type[Any]], list[Any]]] = {
    Format.JSONL: from_jsonl,
    Format.AVRO: from_avro,
    Format.PARQUET: from_parquet,
}


def rows_of(kind: type[Any]) -> st.SearchStrategy[list[Row]]:
    entries = st.builds(
        LogRecord,
        topic=st.just("inference.some.v1"),
        partition=st.integers(0, 2**31 - 1),
        offset=st.integers(0, 2**63 - 1),
        time=TIMES,
        key=st.none(),
        value=st.just(b"-"),
    )
    return st.lists(st.builds(Row, entries, records_of(kind)), max_size=5)


def plain(row: Row) -> dict[str, Any]:
    return {**to_plain(row.record), **dict(zip(PLACE_NAMES, to_plain(row.place), strict=True))}


def without_empty_maps(value: Any) -> Any:
    """An empty map and an empty list look the same in what Arrow hands to Python."""
    if isinstance(value, Mapping):
        return {k: without_empty_maps(v) for k, v in value.items()} or []
    return [without_empty_maps(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", RECORD_TYPES, ids=lambda k: k.__name__)
@pytest.mark.parametrize("form", READERS)
def test_what_is_read_is_what_was_written(form: Format, kind: type[Any]) -> None:
    @settings(deadline=None, max_examples=40)  # the first call imports and compiles
    @given(rows_of(kind))
    def check(rows: list[Row]) -> None:
        found = READERS[form](written(form, rows, kind), kind)
        expected = [plain(row) for row in rows]
        if form is Format.PARQUET:
            found, expected = without_empty_maps(found), without_empty_maps(expected)
        assert found == expected

    check()


@pytest.mark.parametrize("kind", RECORD_TYPES, ids=lambda k: k.__name__)
def test_an_avro_file_is_read_with_the_published_schema_too(kind: type[Any]) -> None:
    @settings(deadline=None, max_examples=40)  # the first call imports and compiles
    @given(rows_of(kind))
    def check(rows: list[Row]) -> None:
        schema = fastavro.parse_schema(latest(kind.SCHEMA).definition(), named_schemas={})
        data = written(Format.AVRO, rows, kind)
        assert [to_plain(one) for one in fastavro.reader(BytesIO(data), schema)] == [to_plain(r.record) for r in rows]

    check()


@pytest.mark.parametrize("kind", RECORD_TYPES, ids=lambda k: k.__name__)
def test_a_csv_file_holds_the_same_values_as_text(kind: type[Any]) -> None:
    @settings(deadline=None, max_examples=40)  # the first call imports and compiles
    @given(rows_of(kind))
    def check(rows: list[Row]) -> None:
        text = written(Format.CSV, rows, kind).decode()
        if "\x00" in text:
            return  # Python's reader of CSV took no NUL before 3.11
        header, *lines = csv.reader(StringIO(text, newline=""))
        assert header == [*(f.name for f in fields(kind)), *PLACE_NAMES]
        assert len(lines) == len(rows)
        for row, line in zip(rows, lines, strict=True):
            for name, value in plain(row).items():
                found = line[header.index(name)]
                assert not isinstance(value, str) or not found.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
                assert _cell(value, found) == value

    check()


def _cell(value: Any, found: str) -> Any:
    """A cell as the type its value has: what the page for analysts says of CSV, done."""
    if value is None:
        return found or None
    if isinstance(value, str):
        return found.removeprefix("'")
    return json.loads(found)
