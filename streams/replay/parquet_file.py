"""Records as a Parquet file, typed as their schema is: the only module that knows pyarrow.

UUIDs are text, because not every tool knows Parquet's type for them; times are microseconds in UTC, maps are maps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa
from pyarrow.parquet import ParquetWriter

from infra.output import Output
from schemas.facts import Record
from schemas.lockfile import latest
from streams.replay.columns import Column, Convert, Kind, columns_of, converter, exported_schema
from streams.replay.rows import PLACE_NAMES, Row

#: A row group is written once it has this many rows, or this many bytes of values.
_GROUP_ROWS = 128 * 1024
_GROUP_BYTES = 64 * 1024 * 1024

_LEAVES: Mapping[Kind, Convert] = {"uuid": str, "map": lambda value: list(value.items())}


class ParquetFile:
    """A file of one record type, compressed by zstd. Field docs and the Avro schema travel in its metadata."""

    def __init__(self, out: Output, kind: type[Record]) -> None:
        schema = exported_schema(kind.SCHEMA)
        columns = columns_of(schema)
        about = {"inferlog.schema_id": str(latest(kind.SCHEMA).id), "inferlog.schema": json.dumps(schema)}
        self._schema = pa.schema([_field(c) for c in columns], metadata=about)
        own = columns[: -len(PLACE_NAMES)]
        self._parts = [(attrgetter(c.name), converter(c, _LEAVES)) for c in own]
        self._writer = ParquetWriter(out, self._schema, compression="zstd")
        self._held: list[Any] = []

    def write(self, rows: Sequence[Row]) -> None:
        """Append the rows; they are held back in columns until a row group is full."""
        if not rows:
            return
        records = [row.record for row in rows]
        values: list[Sequence[Any]] = [
            [convert(get(r)) for r in records] if convert else [get(r) for r in records] for get, convert in self._parts
        ]
        values += zip(*(row.place for row in rows), strict=True)
        arrays = [pa.array(v, type=f.type) for v, f in zip(values, self._schema, strict=True)]
        self._held.append(pa.record_batch(arrays, schema=self._schema))
        if sum(b.num_rows for b in self._held) >= _GROUP_ROWS or sum(b.nbytes for b in self._held) >= _GROUP_BYTES:
            self._write_group()

    def finish(self) -> None:
        """Write the last row group and the footer."""
        self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        if self._held:
            table = pa.Table.from_batches(self._held, schema=self._schema)
            self._held = []
            self._writer.write_table(table, row_group_size=table.num_rows)


def _field(column: Column) -> Any:
    about = {"doc": column.doc} if column.doc else None
    return pa.field(column.name, _type(column), nullable=column.nullable, metadata=about)


def _type(column: Column) -> Any:
    """The Arrow type of a column."""
    match column.kind:
        case "text" | "uuid" | "enum":
            return pa.string()
        case "time":
            return pa.timestamp("us", tz="UTC")
        case "int":
            return pa.int32()
        case "long":
            return pa.int64()
        case "bytes":
            return pa.binary()
        case "record":
            return pa.struct([_field(f) for f in column.fields])
    items = [_field(one) for one in (column.items,) if one is not None]
    return pa.list_(*items) if column.kind == "list" else pa.map_(pa.string(), *items)
