"""`inferlog billing adjust|adjustments`: correct what an hour is billed, and list the corrections. Needs no Stripe."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any, TypeVar

import click

from infra.actor import Author, authored
from infra.arguments import Parsed
from infra.postgres import Connection, on_connection
from infra.settings import operator_settings
from streams.billing.adjustments import (
    Adjusted,
    Adjustment,
    AdjustmentRefused,
    adjust,
    adjustments,
    customer_of,
    whole_hour,
)
from streams.billing.intents import HourKey

T = TypeVar("T")


@click.command(
    "adjust",
    epilog="Example:  inferlog billing adjust acme --meter items --hour 2026-11-29T20 --units -40 --reason refund",
)
@click.argument("customer")
@click.option("--meter", required=True, help="Meter to correct: requests, items, tokens or another that is priced.")
@click.option(
    "--hour",
    type=Parsed("UTC hour", whole_hour),
    required=True,
    help="Start of the UTC hour to correct, like 2026-11-29T20.",
)
@click.option("--units", type=int, required=True, help="Units to add to what the hour is billed; negative takes away.")
@click.option("--carried", is_flag=True, help="For an hour older than Stripe takes: you bill it by an invoice item.")
@authored(reason_required=True)
@click.option("--json", "as_json", is_flag=True, help="Print the correction as one JSON object.")
def adjust_command(
    customer: str, meter: str, hour: datetime, units: int, carried: bool, by: Author, as_json: bool
) -> None:
    """Correct what CUSTOMER (id or name) is billed for an hour; usage itself stays as it was counted.

    The next pass of the reporter tells Stripe, unless it is carried. Nothing is removed: a correction is corrected by
    another one.
    """

    async def work(connection: Connection) -> Adjusted:
        key = HourKey(customer_id=await customer_of(connection, customer), meter=meter, hour=hour)
        return await adjust(connection, key, units, by=by, now=datetime.now(timezone.utc), carried=carried)

    done = _run(work)
    if as_json:
        row = {**_row(done.adjustment), "billable_units": done.billable_units, "carried": done.is_carried}
        click.echo(json.dumps(row))
        return
    made = done.adjustment
    click.echo(
        f"{made.customer_id}: {made.units:+d} {made.meter} in {made.hour:%Y-%m-%dT%H}:00Z, which is billed "
        f"{done.billable_units} now"
    )
    if done.is_carried:
        click.echo("carried: the hour is older than Stripe takes by event; bill the difference by an invoice item")


@click.command("adjustments", epilog="Example:  inferlog billing adjustments acme --json")
@click.argument("customer", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def adjustments_command(customer: str | None, as_json: bool) -> None:
    """List corrections, of CUSTOMER (id or name) or of all, oldest first."""

    async def work(connection: Connection) -> list[Adjustment]:
        return await adjustments(connection, None if customer is None else await customer_of(connection, customer))

    found = _run(work)
    if as_json:
        click.echo(json.dumps([_row(a) for a in found]))
        return
    for a in found:
        what = f"{a.customer_id}  {a.hour:%Y-%m-%dT%H}:00Z  {a.units:>+12d} {a.meter:<10}"
        click.echo(f"{a.created_at:%Y-%m-%dT%H:%M:%SZ}  {what}  {a.actor}: {a.reason}")
    if not found:
        click.echo("no corrections")


def _row(made: Adjustment) -> dict[str, Any]:
    times = {"hour": made.hour.isoformat(), "created_at": made.created_at.isoformat()}
    return {**asdict(made), "adjustment_id": str(made.adjustment_id), **times}


def _run(work: Callable[[Connection], Awaitable[T]]) -> T:
    try:
        return on_connection(operator_settings().postgres, work)
    except AdjustmentRefused as error:
        raise click.ClickException(str(error)) from error
