"""Lines of usage as CSV, as one JSON object and as a table, each written a piece at a time.

Names come from whoever may write to the log, so what a terminal would take for an order is shown as its number.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Final, Protocol
from zoneinfo import ZoneInfo

from rich.cells import cell_len

from infra.periods import FIRST, LAST, shown
from streams.usage.lines import COLUMNS, UsageLine

_SHORT_VERSION: Final = 12
_HEADS: Final = {"start": "since", "customer": "customer", "model": "model", "version": "version", "price_id": "price"}


class Writer(Protocol):
    """Takes the lines of one answer, and then what is to be said of all of them."""

    def add(self, lines: Sequence[UsageLine]) -> None:
        """The next lines."""

    def end(self, totals: Mapping[str, int], said: Mapping[str, Any], remarks: Sequence[str]) -> None:
        """The sums per meter; what is said beside them, for machines and for people."""


class CsvWriter:
    """RFC 4180, UTF-8: always the same columns, empty where they were not asked for; lines alone."""

    def __init__(self, out: BinaryIO, zone: ZoneInfo) -> None:
        self._out = out
        self._zone = zone
        self._write([COLUMNS])

    def _write(self, rows: Sequence[Sequence[object]]) -> None:
        text = io.StringIO()
        csv.writer(text).writerows(rows)
        self._out.write(text.getvalue().encode())

    def add(self, lines: Sequence[UsageLine]) -> None:
        """A row per line."""
        self._write([list(line.plain(self._zone).values()) for line in lines])

    def end(self, totals: Mapping[str, int], said: Mapping[str, Any], remarks: Sequence[str]) -> None:
        """Nothing: a row of totals would be taken for one of usage."""


class JsonWriter:
    """One JSON object on one line: `lines` first, then what is beside them. A line has what was asked for alone."""

    def __init__(self, out: BinaryIO, zone: ZoneInfo, by: Sequence[str]) -> None:
        self._out = out
        self._zone = zone
        asked = {"start", "end", "meter", "quantity", *by} | ({"customer_id"} if "customer" in by else set())
        self._columns = [name for name in COLUMNS if name in asked]
        self._comma = ""
        self._out.write(b'{"lines": [')

    def add(self, lines: Sequence[UsageLine]) -> None:
        """Their objects."""
        plain = [line.plain(self._zone) for line in lines]
        texts = [json.dumps({name: values[name] for name in self._columns}) for values in plain]
        self._out.write((self._comma + ", ".join(texts)).encode())
        self._comma = ", "

    def end(self, totals: Mapping[str, int], said: Mapping[str, Any], remarks: Sequence[str]) -> None:
        """The rest of the object."""
        self._out.write(("], " + json.dumps({"totals": totals, **said})[1:] + "\n").encode())


class TableWriter:
    """Columns for people. Each piece is as wide as it and those before it need."""

    def __init__(self, out: BinaryIO, encoding: str, *, interval: str, zone: ZoneInfo, by: Sequence[str]) -> None:
        self._out = out
        self._encoding = encoding
        self._interval = interval
        self._zone = zone
        self._columns = [name for name in _HEADS if name == "start" or name in by]
        self._widths = [0] * (len(self._columns) + 2)
        self._empty = True

    def add(self, lines: Sequence[UsageLine]) -> None:
        """A row per line, after the head in front of the first."""
        head = [[*(_HEADS[name] for name in self._columns), "meter", "quantity"]] if self._empty else []
        self._rows(head + [self._cells(line) for line in lines])
        self._empty = False

    def _cells(self, line: UsageLine) -> list[str]:
        values = {
            "start": period_label(line, self._interval, self._zone),
            "customer": visible(line.customer or line.customer_id),
            "model": visible(line.model),
            "version": visible(line.version[:_SHORT_VERSION]),
            "price_id": visible(line.price_id),
        }
        return [*(values[name] for name in self._columns), visible(line.meter), f"{line.quantity:,}"]

    def _rows(self, rows: Sequence[Sequence[str]]) -> None:
        for row in rows:
            self._widths = [max(width, cell_len(cell)) for width, cell in zip(self._widths, row, strict=True)]
        for row in rows:
            gaps = [" " * (width - cell_len(cell)) for width, cell in zip(self._widths, row, strict=True)]
            cells = [cell + gap for cell, gap in zip(row[:-1], gaps[:-1], strict=True)]
            self._say("  ".join([*cells, gaps[-1] + row[-1]]))

    def _say(self, text: str) -> None:
        self._out.write(as_shown(text + "\n", self._encoding))

    def end(self, totals: Mapping[str, int], said: Mapping[str, Any], remarks: Sequence[str]) -> None:
        """The totals as rows, and the remarks."""
        if self._empty:
            self._say("no usage")
        between = [""] * (len(self._columns) - 1)
        self._rows([["total", *between, visible(meter), f"{total:,}"] for meter, total in totals.items()])
        for remark in remarks:
            self._say(remark)


def period_label(line: UsageLine, interval: str, zone: ZoneInfo) -> str:
    """A period as people call it: its day, its month, or when its first hour begins."""
    if line.start is None:
        return f"before {FIRST:%Y}"
    if line.end is None:
        return f"from {LAST:%Y} on"
    plain = shown(line.start, zone)
    return {"day": plain[:10], "month": plain[:7], "total": "in all"}.get(interval, plain)


def visible(text: str) -> str:
    """Text on one line of a terminal: what is no printable character as its escape."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def as_shown(text: str, encoding: str) -> bytes:
    """Text for a terminal or pipe of this encoding; what it does not have as its number."""
    return text.encode(encoding, errors="backslashreplace")
