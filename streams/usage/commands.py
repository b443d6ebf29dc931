"""`inferlog usage`: what was used, in periods of any zone, as a table, a chart, CSV or JSON, and how complete that is.

Everything is read before anything is shown, so that no half answer is taken for a whole one, and so that whoever pages
through it keeps nothing open in Postgres.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final, TypeVar
from zoneinfo import ZoneInfo

import click

from infra.away import unanswered
from infra.output import whole_file
from infra.periods import INTERVALS, RULE, UnknownZone, day_in, moment_in, month_in, next_hour, zone_named
from infra.postgres import is_outage
from infra.settings import ReplaySettings, replay_settings
from streams.usage.chart import ChartWriter, TooManyBars, gap_lines
from streams.usage.completeness import remarks, said_of
from streams.usage.lines import GROUPS, PATIENCE_S, Completeness, NobodyOfThatName, Reading, Wanted, open_reading
from streams.usage.lines import waiting_records as count_waiting
from streams.usage.writers import CsvWriter, JsonWriter, TableWriter, Writer

T = TypeVar("T")

_STDOUT: Final = "-"
_IN_MEMORY_BYTES: Final = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the answer looks: `form` is table, chart, csv or json; width in characters."""

    form: str
    encoding: str
    width: int
    plain: bool


class Groups(click.ParamType):
    """Names of what lines are told apart by, with commas between; none at all may be asked for by ''."""

    name = "names"

    def convert(self, value: str | tuple[str, ...], param: click.Parameter | None, ctx: click.Context | None) -> object:
        """The names in the order of the columns, or click's own error naming the option."""
        if not isinstance(value, str):
            return value
        asked = [name.strip() for name in value.split(",") if name.strip()]
        for name in asked:
            if name in INTERVALS:
                self.fail(f"{name} is an interval; write --interval {name}", param, ctx)
            if name not in (*GROUPS, "meter"):
                self.fail(f"expected names of {', '.join(GROUPS)} with commas between, found {name[:40]!r}", param, ctx)
        return tuple(name for name in GROUPS if name in asked)


@click.command(epilog="Example:  inferlog usage --month 2026-03 --interval day --zone Asia/Kolkata --by customer --csv")
@click.option("--customer", help="Only this customer, by id or name.")
@click.option("--from", "start", help="Only hours that begin at this time or later: a date or ISO 8601, in --zone.")
@click.option("--to", "end", help="Only hours that begin before this time.")
@click.option("--month", help="Only this month of the zone, like 2026-03.")
@click.option("--day", help="Only this day of the zone, like 2026-03-01.")
@click.option(
    "--interval", type=click.Choice(INTERVALS), help="What a line sums over.  [default: hour; of a chart: day]"
)
@click.option("--zone", default="UTC", show_default=True, help="IANA zone whose days, months and clocks are meant.")
@click.option(
    "--by",
    type=Groups(),
    help="What lines tell apart beside the meter: customer,model,version,price_id.  "
    "[default: customer,model; of a chart: nothing]",
)
@click.option("--model", help="Only this model.")
@click.option("--version", help="Only versions that begin with these digits.")
@click.option("--price-id", help="Only what this price was in force for.")
@click.option("--meter", help="Only this meter (requests, items, tokens).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: lines, totals, complete_until.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV (RFC 4180), always with the same columns.")
@click.option("--chart", is_flag=True, help="Draw bars, as wide as the terminal.")
@click.option("--ascii", "plain", is_flag=True, help="Draw them without any character beyond ASCII.")
@click.option("--output", default=_STDOUT, show_default=True, help="File to write to; - is standard output.")
@click.option("--overwrite", is_flag=True, help="Replace the file when it exists.")
def usage(
    customer: str | None,
    start: str | None,
    end: str | None,
    month: str | None,
    day: str | None,
    interval: str | None,
    zone: str,
    by: tuple[str, ...] | None,
    model: str | None,
    version: str | None,
    price_id: str | None,
    meter: str | None,
    as_json: bool,
    as_csv: bool,
    chart: bool,
    plain: bool,
    output: str,
    overwrite: bool,
) -> None:
    """Show what the ledger counted. What is still on its way to it is said, never guessed.

    The ledger sums by UTC hour. An hour is never divided: in zones whose clocks are not on the full hour it belongs to
    the day and month in which it begins. So days add up to hours, and months to days, in every zone.

    This is usage alone; corrections of the bill are listed by  inferlog billing adjustments.
    """
    forms = [name for name, asked in (("json", as_json), ("csv", as_csv), ("chart", chart)) if asked]
    if len(forms) > 1:
        raise click.UsageError(f"--{forms[0]} and --{forms[1]} exclude each other")
    form = forms[0] if forms else "table"
    known = _parsed("--zone", zone_named, zone)
    since, until = _range(known, start=start, end=end, month=month, day=day)
    wanted = Wanted(
        since=since,
        until=until,
        interval=interval or ("day" if chart else "hour"),
        zone=known,
        by=by if by is not None else () if chart else ("customer", "model"),
        customer=customer,
        model=model,
        version=version,
        price_id=price_id,
        meter=meter,
    )
    encoding = (sys.stdout.encoding or "ascii") if output == _STDOUT else "utf-8"
    shape = Shape(form=form, encoding=encoding, width=shutil.get_terminal_size().columns, plain=plain)
    settings = replay_settings()
    try:
        with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as spool:
            asyncio.run(_write(settings, wanted, shape, spool))  # type: ignore[arg-type]  # it has all of BinaryIO
            spool.seek(0)
            with _target(output, overwrite=overwrite) as out:
                shutil.copyfileobj(spool, out)
    except (NobodyOfThatName, TooManyBars, FileExistsError, FileNotFoundError) as error:
        raise click.ClickException(str(error)) from error


def _parsed(option: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except (UnknownZone, ValueError) as error:
        raise click.BadParameter(str(error), param_hint=option) from error


def _range(
    zone: ZoneInfo, *, start: str | None, end: str | None, month: str | None, day: str | None
) -> tuple[datetime | None, datetime | None]:
    """[since, until), full UTC hours; None where the range is open."""
    if sum((start is not None or end is not None, month is not None, day is not None)) > 1:
        raise click.UsageError("give --month, --day, or --from and --to: they exclude each other")
    if month is not None:
        return _parsed("--month", lambda text: month_in(text, zone), month)
    if day is not None:
        return _parsed("--day", lambda text: day_in(text, zone), day)
    since = None if start is None else next_hour(_parsed("--from", lambda text: moment_in(text, zone), start))
    until = None if end is None else next_hour(_parsed("--to", lambda text: moment_in(text, zone), end))
    if since is not None and until is not None and since >= until:
        raise click.UsageError("--to must lie at least one full UTC hour after --from")
    return since, until


async def _write(settings: ReplaySettings, wanted: Wanted, shape: Shape, out: BinaryIO) -> None:
    """The whole answer. Raises NobodyOfThatName, TooManyBars, click.ClickException when Postgres does not answer."""
    totals: dict[str, int] = {}
    try:
        async with open_reading(settings, wanted) as reading:
            complete = await reading.completeness()
            writer = _writer(wanted, shape, reading, complete, out)
            async for lines in reading.lines():
                writer.add(lines)
                for line in lines:
                    totals[line.meter] = totals.get(line.meter, 0) + line.quantity
    except Exception as error:
        if not is_outage(error):
            raise
        but = f", or not within {PATIENCE_S} s, which a shorter range may mend"
        raise click.ClickException(unanswered("Postgres", error, but=but)) from error
    waiting = None if shape.form == "csv" else await count_waiting(settings, complete.positions)
    said = {"interval": wanted.interval, "zone": wanted.zone.key, "by": [*wanted.by, "meter"], "rule": RULE}
    said |= said_of(complete, wanted.zone, waiting=waiting)
    writer.end(dict(sorted(totals.items())), said, remarks(complete, wanted.zone, waiting=waiting))


def _writer(wanted: Wanted, shape: Shape, reading: Reading, complete: Completeness, out: BinaryIO) -> Writer:
    if shape.form == "csv":
        return CsvWriter(out, wanted.zone)
    if shape.form == "json":
        return JsonWriter(out, wanted.zone, wanted.by)
    if shape.form == "table":
        return TableWriter(out, shape.encoding, interval=wanted.interval, zone=wanted.zone, by=wanted.by)
    return ChartWriter(
        out,
        shape.encoding,
        interval=wanted.interval,
        zone=wanted.zone,
        by=wanted.by,
        width=shape.width,
        plain=shape.plain,
        whole_until=complete.until,
        gaps=gap_lines(reading.starts, reading.end_of, wanted, now=complete.as_of),
    )


@contextmanager
def _target(output: str, *, overwrite: bool) -> Iterator[BinaryIO]:
    """Where the bytes go; a file is there under its name once it is whole."""
    if output == _STDOUT:
        yield click.get_binary_stream("stdout")
        return
    with whole_file(Path(output), overwrite=overwrite) as file:
        yield file  # type: ignore[misc]  # it has all of BinaryIO that is used
