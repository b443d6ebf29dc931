"""`inferlog prices`: publish an entry of the price list, and list what is published. Needs no Stripe."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click

from infra.actor import Author, authored
from infra.postgres import Connection, on_connection
from infra.settings import operator_settings
from streams.billing.prices import Price, PriceConflict, price, prices, publish_price, shown

T = TypeVar("T")


@click.group("prices", epilog="Example:  inferlog prices list")
def price_list() -> None:
    """Publish and list what a unit of each meter costs."""


@price_list.command(
    epilog="Example:  inferlog prices publish standard-v2 --meter requests=0 --meter items=80 --currency usd"
)
@click.argument("price_id")
@click.option(
    "--meter",
    "meters",
    multiple=True,
    required=True,
    help="requests, items or tokens, '=', and what one costs in millionths of the currency's main unit; once for each.",
)
@click.option("--currency", required=True, help="Three-letter code in small letters, like usd.")
@authored()
@click.option("--json", "as_json", is_flag=True, help="Print the entry as one JSON object.")
def publish(price_id: str, meters: tuple[str, ...], currency: str, by: Author, as_json: bool) -> None:
    """Publish the price list entry PRICE_ID. An entry never changes; the same entry again changes nothing.

    No model is billed by it before a route names it (inferlog models route … --price PRICE_ID).
    """
    try:
        wanted = price(price_id, meters, currency)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    done = _in_postgres(lambda c: publish_price(c, wanted, by=by))
    if as_json:
        click.echo(json.dumps({**_row(wanted), "created": done.created}))
    else:
        click.echo(f"{price_id}: {'published' if done.created else 'already published'}, {shown(wanted)}")
    if done.new_currency:
        slip = "an entry never changes, so if that is a slip, publish another and route to that"
        click.echo(f"note: no other price is in '{currency}'; {slip}", err=True)


@price_list.command("list", epilog="Example:  inferlog prices list --json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_prices(as_json: bool) -> None:
    """List the price list's entries, oldest first."""
    found = _in_postgres(prices)
    if as_json:
        click.echo(json.dumps([{**_row(p), "created_at": p.created_at and p.created_at.isoformat()} for p in found]))
        return
    width = max((len(p.price_id) for p in found), default=0)
    for p in found:
        click.echo(f"{p.price_id:<{width}}  {p.created_at:%Y-%m-%dT%H:%MZ}  {shown(p)}")


def _row(entry: Price) -> dict[str, Any]:
    return {
        "price_id": entry.price_id,
        "currency": entry.currency,
        "amounts_micros": dict(sorted(entry.amounts_micros.items())),
    }


def _in_postgres(work: Callable[[Connection], Awaitable[T]]) -> T:
    try:
        return on_connection(operator_settings().postgres, work)
    except PriceConflict as error:
        raise click.ClickException(str(error)) from error
