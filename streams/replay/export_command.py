"""`inferlog export`: a topic, or a span of it, as a file that analysts' tools open.

Exits 0 when the file holds everything asked for, 1 when records did not decode and leaving them out was not allowed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Set
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from infra.arguments import Moment
from infra.away import unanswered
from infra.output import Output, whole_file
from infra.postgres import is_outage, is_unusable
from infra.settings import PostgresSettings, ReplaySettings, replay_settings
from schemas.topics import Topic, UnknownTopic, find_topic
from streams.log import Progress, no_progress
from streams.replay.export import (
    ExportError,
    Format,
    MakeWriter,
    Selection,
    Summary,
    customer_of,
    discarded_of,
    export,
    require_customers,
    writer_for,
)

_STDOUT = "-"


class LeftOut(RuntimeError):
    """Records did not decode, and nobody said that the rest will do; what was written goes."""

    def __init__(self, summary: Summary) -> None:
        super().__init__(f"{summary.undecodable} records do not decode")
        self.summary = summary


@click.command(epilog="Example:  inferlog export usage --since 2026-03-01 --until 2026-04-01 --output march.parquet")
@click.argument("topic")
@click.option(
    "--format",
    "form",
    type=click.Choice([f.value for f in Format]),
    help="Format of the file; without it, the suffix of its name.",
)
@click.option("--output", default=_STDOUT, show_default=True, help="File to write, or - for standard output.")
@click.option("--overwrite", is_flag=True, help="Replace the file when it exists.")
@click.option("--since", type=Moment(), help="Only what occurred at this time or later (ISO 8601, UTC unless it says).")
@click.option("--until", type=Moment(), help="Only what occurred before this time.")
@click.option("--partition", type=click.IntRange(min=0), help="Only this partition.")
@click.option("--customer", help="Only records of this customer (id or name).")
@click.option("--limit", type=click.IntRange(min=1), help="At most this many records.")
@click.option("--skip-undecodable", is_flag=True, help="Leave out what does not decode, instead of failing.")
@click.option("--json", "as_json", is_flag=True, help="Print a summary as one JSON object.")
def export_topic(
    topic: str,
    form: str | None,
    output: str,
    overwrite: bool,
    since: datetime | None,
    until: datetime | None,
    partition: int | None,
    customer: str | None,
    limit: int | None,
    skip_undecodable: bool,
    as_json: bool,
) -> None:
    """Write the records of TOPIC, up to its end as of now, as JSON lines, CSV, Avro or Parquet.

    TOPIC is usage, results, requests[.POOL], dead-letters, models, routes, keys, prices, adjustments, cancellations
    or schemas. Each row also says its place: _topic, _partition, _offset, _timestamp. A file appears under its name
    only when it is whole. The summary goes to standard error, and with --json to standard output unless the records do.
    """
    settings = replay_settings()
    try:
        found = find_topic(topic, namespace=settings.kafka.namespace)
    except UnknownTopic as error:
        raise click.BadParameter(str(error), param_hint="TOPIC") from error
    chosen = _format(form, output)
    if since is not None and until is not None and since >= until:
        raise click.UsageError(f"--until must lie after --since, found {until.isoformat()}")
    try:
        make_writer = writer_for(chosen)
        customer_id = None if customer is None else _customer_id(settings, found, customer)
        selection = Selection(since=since, until=until, partition=partition, customer_id=customer_id, limit=limit)
        summary = _export(settings, found, selection, make_writer, output, overwrite, skip_undecodable)
    except LeftOut as error:
        _say(error.summary, output, chosen, as_json=as_json, written=output == _STDOUT)
        raise SystemExit(1) from error
    except (ExportError, FileExistsError, FileNotFoundError) as error:
        raise click.ClickException(str(error)) from error
    _say(summary, output, chosen, as_json=as_json, written=True)


def _format(form: str | None, output: str) -> Format:
    """The format asked for, or that of the file's suffix. Raises click.UsageError."""
    if form is None:
        suffix = Path(output).suffix.removeprefix(".")
        if suffix not in {f.value for f in Format}:
            raise click.UsageError("give --format, or a file whose name ends in .jsonl, .csv, .avro or .parquet")
        form = suffix
    if Format(form).binary and output == _STDOUT and sys.stdout.isatty():
        raise click.UsageError(f"{form} is nothing for a terminal; give --output FILE, or pipe it on")
    return Format(form)


def _customer_id(settings: ReplaySettings, topic: Topic, customer: str) -> str:
    """Records name their customer by its id alone. Raises ExportError."""
    require_customers(topic)
    try:
        return asyncio.run(customer_of(settings.postgres, customer))
    except Exception as error:
        if not is_outage(error):
            raise
        raise ExportError(unanswered("Postgres", error, but=", where --customer is looked up")) from error


async def _discarded(settings: PostgresSettings, topic: str) -> Set[tuple[int, int]]:
    """The places that were discarded; none where Postgres cannot be asked, since the records come from Kafka alone."""
    try:
        return await discarded_of(settings, topic)
    except Exception as error:
        if not (is_outage(error) or is_unusable(error)):
            raise
        click.echo(unanswered("Postgres", error, but=", so what was discarded is not known"), err=True)
        return frozenset()


def _export(
    settings: ReplaySettings,
    topic: Topic,
    selection: Selection,
    make_writer: MakeWriter,
    output: str,
    overwrite: bool,
    skip_undecodable: bool,
) -> Summary:
    with _target(output, overwrite=overwrite) as out, _progress(output) as progress:
        ask = partial(_discarded, settings.postgres)
        exporting = export(settings.kafka, topic, selection, make_writer, out, discarded=ask, progress=progress)
        summary = asyncio.run(exporting)
        out.flush()
        if summary.undecodable and not skip_undecodable:
            raise LeftOut(summary)
    return summary


@contextmanager
def _target(output: str, *, overwrite: bool) -> Iterator[Output]:
    if output == _STDOUT:
        yield Output(sys.stdout.buffer)
        return
    with whole_file(Path(output), overwrite=overwrite) as out:
        yield out


@contextmanager
def _progress(output: str) -> Iterator[Progress]:
    """A bar on standard error when somebody sits there, and the records do not go to the same terminal."""
    if not sys.stderr.isatty() or (output == _STDOUT and sys.stdout.isatty()):
        yield no_progress
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with ProgressBar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(topic: str, done: int, total: int) -> None:
            bar.update(task, description=topic, completed=done, total=total)

        yield show


def _say(summary: Summary, output: str, form: Format, *, as_json: bool, written: bool) -> None:
    """The summary as JSON or in words; what was left out is always said on standard error."""
    where = "standard output" if output == _STDOUT else output
    if as_json:
        about = {"output": output, "format": form.value, "written": written, **summary.plain()}
        click.echo(json.dumps(about), err=output == _STDOUT)
    elif written:
        click.echo(f"{summary.topic}: {summary.records} records to {where}", err=True)
    if summary.written_off:
        click.echo(
            f"{summary.topic}: {summary.written_off} discarded records that do not decode are not in it", err=True
        )
    if not summary.undecodable:
        return
    click.echo(f"{summary.topic}: {summary.undecodable} records do not decode and were left out:", err=True)
    for place in summary.places:
        click.echo("    partition {partition} offset {offset}: {reason}".format(**place), err=True)
    if summary.undecodable > len(summary.places):
        click.echo(f"    … and {summary.undecodable - len(summary.places)} more", err=True)
    if not written:
        click.echo(f"{where} was not written; --skip-undecodable writes it without them", err=True)
