"""A record with its place on the log, and the two formats that are text: JSON lines and CSV.

Both show values as `schemas.plain.to_plain` does; what each field needs for that is found out once per file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import orjson

from schemas.facts import Record
from schemas.plain import to_plain
from streams.log import LogRecord
from streams.replay.columns import PLACE, Column, Convert, Kind, columns_of, converter, exported_schema

PLACE_NAMES = tuple(str(f["name"]) for f in PLACE)

#: Beginnings of text that a spreadsheet may take for a formula, and the apostrophe that marks them.
_MARKED = re.compile(r"[=+\-@\t\r\n']")
_PLAIN: Mapping[Kind, Convert] = {"uuid": str, "time": to_plain, "bytes": to_plain}


class Row(NamedTuple):
    """One row of an export."""

    entry: LogRecord
    record: Record

    @property
    def place(self) -> tuple[str, int, int, datetime]:
        """The values of the columns PLACE_NAMES."""
        return (self.entry.topic, self.entry.partition, self.entry.offset, self.entry.time)


class RowWriter(Protocol):
    """Writes the rows of one file, in order."""

    def write(self, rows: Sequence[Row]) -> None:
        """Take these rows; some may be held back."""

    def finish(self) -> None:
        """Write what was held back and what ends a file of this format."""


Write = Callable[[bytes], object]


class JsonLines:
    """One JSON object per line: the record's fields, then its place."""

    def __init__(self, write: Write, kind: type[Record]) -> None:
        self._write = write
        columns = columns_of(exported_schema(kind.SCHEMA))[: -len(PLACE_NAMES)]
        self._parts = [(c.name, attrgetter(c.name), converter(c, _PLAIN)) for c in columns]

    def write(self, rows: Sequence[Row]) -> None:
        """A line for each."""
        self._write(b"".join([self._line(row) for row in rows]))

    def _line(self, row: Row) -> bytes:
        plain = {n: convert(get(row.record)) if convert else get(row.record) for n, get, convert in self._parts}
        plain.update(zip(PLACE_NAMES, row.place, strict=True))
        plain["_timestamp"] = to_plain(plain["_timestamp"])
        return orjson.dumps(plain, option=orjson.OPT_APPEND_NEWLINE)

    def finish(self) -> None:
        """Nothing is held back."""


class Csv:
    """A header, then one line per record; what is nested is JSON text in one cell (RFC 4180 quoting, UTF-8).

    Null is an empty cell, empty text a quoted one. Text that a spreadsheet could run gets an apostrophe before it.
    """

    def __init__(self, write: Write, kind: type[Record]) -> None:
        self._write = write
        columns = columns_of(exported_schema(kind.SCHEMA))
        self._own = [(attrgetter(c.name), _cell_of(c)) for c in columns[: -len(PLACE_NAMES)]]
        self._place = [_cell_of(c) for c in columns[-len(PLACE_NAMES) :]]
        self._write((",".join(c.name for c in columns) + "\n").encode())

    def write(self, rows: Sequence[Row]) -> None:
        """A line for each."""
        self._write("".join([self._line(row) for row in rows]).encode())

    def _line(self, row: Row) -> str:
        cells = [cell(get(row.record)) for get, cell in self._own]
        cells += [cell(value) for cell, value in zip(self._place, row.place, strict=True)]
        return ",".join(cells) + "\n"

    def finish(self) -> None:
        """Nothing is held back."""


def marked(text: str) -> str:
    """Text as a CSV cell; the beginnings = + - @ ' tab and line end are marked by one apostrophe.

    The apostrophe itself is marked too, so that taking one leading apostrophe away always gives the text back.
    """
    return _quoted(f"'{text}" if _MARKED.match(text) else text)


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _cell_of(column: Column) -> Callable[[Any], str]:
    """How a value of this column becomes a cell."""
    cell = _filled_cell_of(column)
    return (lambda value: "" if value is None else cell(value)) if column.nullable else cell


def _filled_cell_of(column: Column) -> Callable[[Any], str]:
    match column.kind:
        case "int" | "long" | "uuid":
            return str
        case "time":
            return to_plain
        case "enum":
            return attrgetter("value")
        case "text":
            return marked
        case "bytes":
            return lambda value: marked(to_plain(value))
    convert = converter(column, _PLAIN) or (lambda value: value)
    return lambda value: _quoted(orjson.dumps(convert(value)).decode())
