"""Records as an Avro object container file: the schema once at its head, then compressed blocks of records.

Unlike a record on the wire it needs no table of schema ids to be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import IO, cast

from fastavro.schema import parse_schema
from fastavro.write import Writer

from infra.output import Output
from schemas.facts import Record
from streams.replay.columns import columns_of, converter, exported_schema
from streams.replay.rows import PLACE_NAMES, Row

_BLOCK_BYTES = 64 * 1024
_COMPRESSION_LEVEL = 6


class AvroFile:
    """A container file of one record type, compressed by deflate, which every reader of Avro knows."""

    def __init__(self, out: Output, kind: type[Record]) -> None:
        schema = exported_schema(kind.SCHEMA)
        columns = columns_of(schema)[: -len(PLACE_NAMES)]
        # Times and UUIDs are right as they are: fastavro knows these logical types.
        self._parts = [(c.name, attrgetter(c.name), converter(c, {})) for c in columns]
        self._writer = Writer(
            cast("IO[bytes]", out),  # it has what the writer uses
            parse_schema(schema, named_schemas={}),
            codec="deflate",
            sync_interval=_BLOCK_BYTES,
            compression_level=_COMPRESSION_LEVEL,
        )

    def write(self, rows: Sequence[Row]) -> None:
        """Append the rows; the last block may stay open."""
        for row in rows:
            datum = {n: convert(get(row.record)) if convert else get(row.record) for n, get, convert in self._parts}
            datum.update(zip(PLACE_NAMES, row.place, strict=True))
            self._writer.write(datum)

    def finish(self) -> None:
        """Write the last block."""
        self._writer.flush()
