"""`inferlog usage`: what was used, by customer, hour or day, model and meter, and up to when that is complete."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import click

from infra.kafka import BusUnavailable
from infra.postgres import connect, is_outage, queries
from infra.settings import ReplaySettings, replay_settings
from schemas.keys import ledger_group
from schemas.topics import USAGE
from streams.replay.commands import Moment
from streams.replay.log import open_log

_COLUMNS = ("since", "customer_id", "customer", "model", "meter", "quantity")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLine:
    """A sum of the ledger: `since` is the start of the UTC hour or day, `quantity` in the meter's smallest unit."""

    since: datetime
    customer_id: str
    customer: str
    model: str
    meter: str
    quantity: int

    def plain(self) -> dict[str, str | int]:
        """The line with its time as ISO 8601 text."""
        return {name: getattr(self, name) for name in _COLUMNS} | {"since": stamp(self.since)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Completeness:
    """Usage written to the log before `until` is in the ledger; `waiting` records are not. None: the log is away."""

    until: datetime | None
    waiting: int | None


def stamp(moment: datetime) -> str:
    """ISO 8601 in UTC, to the second."""
    return f"{moment.astimezone(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def totals(lines: Sequence[UsageLine]) -> dict[str, int]:
    """Sum per meter."""
    sums: dict[str, int] = {}
    for line in lines:
        sums[line.meter] = sums.get(line.meter, 0) + line.quantity
    return dict(sorted(sums.items()))


@click.command(epilog="Example:  inferlog usage --customer acme --from 2026-03-01 --by day --meter items --json")
@click.option("--customer", help="Only this customer, by id or name.")
@click.option("--from", "start", type=Moment(), help="Only from this hour on (ISO 8601, UTC unless it says otherwise).")
@click.option("--to", "end", type=Moment(), help="Only hours that begin before this moment.")
@click.option("--by", type=click.Choice(["hour", "day"]), default="hour", show_default=True, help="UTC hours or days.")
@click.option("--model", help="Only this model.")
@click.option("--meter", help="Only this meter (requests, items, tokens).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with lines, totals and complete_until.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the lines as CSV with a header.")
def usage(
    customer: str | None,
    start: datetime | None,
    end: datetime | None,
    by: str,
    model: str | None,
    meter: str | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Show what the ledger counted. What is still on its way to it is said, never guessed.

    This is usage alone; corrections of the bill are listed by  inferlog billing adjustments.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other")
    settings = replay_settings()
    try:
        lines, complete = asyncio.run(_read(settings, by, customer, start, end, model, meter))
    except Exception as error:
        if not is_outage(error):
            raise
        raise click.ClickException(f"Postgres cannot be reached: {type(error).__name__}: {error}") from error
    until = None if complete.until is None else stamp(complete.until)
    if as_json:
        body = {"lines": [line.plain() for line in lines], "totals": totals(lines)}
        click.echo(json.dumps({**body, "complete_until": until, "waiting_records": complete.waiting}))
    elif as_csv:
        click.echo(_csv(lines), nl=False)
    else:
        click.echo(_table(lines))
        click.echo(_completeness(complete))


async def _read(
    settings: ReplaySettings,
    by: str,
    customer: str | None,
    start: datetime | None,
    end: datetime | None,
    model: str | None,
    meter: str | None,
) -> tuple[list[UsageLine], Completeness]:
    sql = queries("streams")
    topic = USAGE.in_namespace(settings.kafka.namespace).name
    group = ledger_group(settings.kafka.namespace)
    connection = await connect(settings.postgres)
    try:
        # One snapshot, so that the lines are exactly those of the position beside them.
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            rows = await connection.fetch(sql["usage"], by, customer, start, end, model, meter)
            # Only finding nothing needs an explanation; for a name that nobody has, the look-up reads the whole table.
            known = None if rows else await connection.fetchrow(sql["known_names"], customer, model)
            found = await connection.fetch(sql["positions"], group, topic)
    finally:
        await connection.close(timeout=5)
    if known is not None:
        _require_known(customer, model, known)
    lines = [
        UsageLine(
            since=r["since"],
            customer_id=r["customer_id"],
            customer=r["customer"],
            model=r["model"],
            meter=r["meter"],
            quantity=int(r["quantity"]),
        )
        for r in rows
    ]
    return lines, await _complete(settings, topic, {r["partition"]: r["next_offset"] for r in found})


def _require_known(customer: str | None, model: str | None, known: Mapping[str, bool]) -> None:
    """Nothing was found: say so of a name that nobody has, rather than that it used nothing."""
    if customer is not None and not known["customer"]:
        raise click.ClickException(f"there is no customer '{customer}'; see  inferlog customers list")
    if model is not None and not known["model"]:
        raise click.ClickException(f"there is no model '{model}'; see  inferlog models list")


async def _complete(settings: ReplaySettings, topic: str, positions: dict[int, int]) -> Completeness:
    """Up to when the ledger holds everything: now, or the broker's time of the first record it has not read."""
    until = datetime.now(timezone.utc)
    waiting = 0
    try:
        async with open_log(settings.kafka) as reader:
            for partition, span in (await reader.freeze(topic, USAGE.partitions)).items():
                begin = max(positions.get(partition, 0), span.first)
                if begin >= span.end:
                    continue
                first = await reader.first(topic, partition, begin=begin, end=span.end)
                if first is not None:  # else only transaction markers lie ahead
                    waiting += span.end - first.offset
                    until = min(until, first.time)
    except BusUnavailable:
        return Completeness(until=None, waiting=None)
    return Completeness(until=until, waiting=waiting)


def _completeness(complete: Completeness) -> str:
    if complete.until is None:
        return "complete up to: unknown, the log cannot be reached"
    behind = f", {complete.waiting} usage records are waiting to be counted" if complete.waiting else ""
    return f"complete up to {stamp(complete.until)}{behind}"


def _csv(lines: Sequence[UsageLine]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(line.plain() for line in lines)
    return out.getvalue()


def _table(lines: Sequence[UsageLine]) -> str:
    if not lines:
        return "no usage"
    names = ("since", "customer", "model", "meter", "quantity")
    cells = [(stamp(x.since), x.customer or x.customer_id, x.model, x.meter, f"{x.quantity:,}") for x in lines]
    cells += [("total", "", "", meter, f"{quantity:,}") for meter, quantity in totals(lines).items()]
    widths = [max(len(row[i]) for row in [names, *cells]) for i in range(len(names))]
    layout = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row[:-1], widths, strict=False)), row[-1].rjust(widths[-1])])
        for row in [names, *cells]
    ]
    return "\n".join(layout)
