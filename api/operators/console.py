"""What the operator's commands of the gateway share: one connection, one line per failure, answers as words or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

import click

from infra.away import unanswered
from infra.postgres import Connection, Record, is_outage, on_connection, queries
from infra.settings import OperatorSettings
from schemas.ranges import MOMENTS

T = TypeVar("T")

#: A rate or a burst, as the limiter can hold it.
RATE = click.IntRange(1, 1_000_000)
#: Clocks of two machines differ, and the server is asked later.
_MARGIN = timedelta(days=1)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def in_postgres(settings: OperatorSettings, work: Callable[[Connection], Awaitable[T]]) -> T:
    """Run `work` on one connection. An outage ends the command with one line."""
    try:
        return on_connection(settings.postgres, work)
    except Exception as error:
        if is_outage(error):
            raise click.ClickException(unanswered("Postgres", error)) from error
        raise


async def find_customer(connection: Connection, name_or_id: str) -> Record:
    """The customer's row. Raises ClickException when there is none."""
    found = await connection.fetchrow(queries("api.operators")["customer"], name_or_id)
    if found is None:
        raise click.ClickException(f"there is no customer '{name_or_id}'; see  inferlog customers list")
    return found


def duration(option: str, text: str) -> timedelta:
    """A length of time like 12h or 90d, from now to a time that a record can carry. Raises UsageError naming the
    option."""
    match = re.fullmatch(r"([1-9]\d{0,5})([smhd])", text)
    if match is None:
        raise click.UsageError(f"{option}: expected a number above 0 and s, m, h or d, like 12h or 90d, found '{text}'")
    length = timedelta(**{_UNITS[match[2]]: int(match[1])})
    if length > MOMENTS.high - datetime.now(timezone.utc) - _MARGIN:
        raise click.UsageError(f"{option}: expected an end before the year 2200, found '{text}'")
    return length


async def require_models(connection: Connection, option: str, models: Sequence[str]) -> None:
    """Raise ClickException naming the option when one of these was never published."""
    missing = [r["name"] for r in await connection.fetch(queries("api.operators")["models_missing"], list(models))]
    if missing:
        raise click.ClickException(f"{option}: there is no model '{missing[0]}'; see  inferlog models list")


def say(made: Mapping[str, Any], words: str, *, as_json: bool) -> None:
    """Print what was made as one JSON object, or these words about it."""
    click.echo(json.dumps({k: _plain(v) for k, v in made.items()}) if as_json else words)


def table(rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print rows as one JSON array, or in columns."""
    plain = [{k: _plain(v) for k, v in row.items()} for row in rows]
    if as_json:
        click.echo(json.dumps(plain))
        return
    if not plain:
        click.echo("none")
        return
    cells = [list(plain[0]), *([("" if v is None else str(v)) for v in row.values()] for row in plain)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        click.echo("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
