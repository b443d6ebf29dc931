"""`inferlog customers`: who is served, how fast, how much at once and for how much money."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from decimal import Decimal
from typing import Any, Final, TypeVar

import click

from api.operators.console import RATE, find_customer, in_postgres, require_models, say, table
from api.operators.customers import Customer, NameTaken, NoSuchCustomer, change_customer, create_customer, spend_cap_of
from api.operators.limit_options import LIMIT, LimitsChange, changes_limits, require_distinct, shown
from api.operators.rates import NoSuchLimit, all_limits
from api.spend.spend import shown as amount
from infra.actor import Author, authored
from infra.arguments import Parsed
from infra.postgres import Connection, queries
from infra.settings import operator_settings
from schemas.facts import CustomerChange, RateLimit, SpendCap

T = TypeVar("T")

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_NAME: Final = re.compile(r"[^\x00-\x1f{}]{1,100}")
_ID_BEGINS: Final = "cust_"
_AMOUNT: Final = re.compile(r"(\d{1,12})(?:\.(\d{1,6}))?", re.ASCII)


def _micros(text: str) -> int:
    """An amount of money in millionths. Raises ValueError."""
    if not _AMOUNT.fullmatch(text):
        raise ValueError(f"expected an amount like 250.00, with up to 6 decimals, found {text[:40]!r}")
    return int(Decimal(text) * 1_000_000)


def _currency(text: str) -> str:
    if not re.fullmatch(r"[a-z]{3}", text):
        raise ValueError(f"expected a currency's three letters in lower case, like usd, found {text[:40]!r}")
    return text


def money(cap: SpendCap | None) -> str:
    """A cap in words; nothing for none."""
    return "" if cap is None else f"{amount(cap.amount_micros)} {cap.currency}"


@click.group(epilog="Example:  inferlog customers create acme --requests-per-s 50 --burst 100")
def customers() -> None:
    """Create, limit, cap and list customers."""


@customers.command("create", epilog='Example:  inferlog customers create "Acme Ltd" --requests-per-s 50 --burst 100')
@click.argument("name")
@click.option("--requests-per-s", type=RATE, required=True, help="Rate of the customer's keys together.")
@click.option("--burst", type=RATE, required=True, help="Requests the customer may make at once.")
@click.option(
    "--limit", "limits", type=LIMIT, multiple=True, help="UNIT=AMOUNT/WINDOW[,burst=N][,model=NAME]; repeatable."
)
@click.option("--max-concurrent", type=RATE, help="Unfinished requests the customer may have at once.")
@authored()
@click.option("--json", "as_json", is_flag=True, help="Print the customer as one JSON object.")
def create(
    name: str,
    requests_per_s: int,
    burst: int,
    limits: tuple[RateLimit, ...],
    max_concurrent: int | None,
    by: Author,
    as_json: bool,
) -> None:
    """Create a customer. It can call once it has a key (inferlog keys create)."""
    if not _NAME.fullmatch(name):
        raise click.UsageError("NAME: expected 1 to 100 characters, none of them control characters or braces")
    if name != name.strip() or name.startswith(_ID_BEGINS):
        raise click.UsageError(
            f"NAME: expected no blanks at its edges, and not the form of an id ({_ID_BEGINS}…), which commands take too"
        )
    require_distinct(limits)
    customer_id = _ID_BEGINS + "".join(secrets.choice(_ALPHABET) for _ in range(12))

    async def insert(connection: Connection) -> Customer:
        await require_models(connection, "--limit", _models(limits))
        return await create_customer(
            connection,
            customer_id=customer_id,
            name=name,
            requests_per_s=requests_per_s,
            burst=burst,
            limits=limits,
            max_concurrent=max_concurrent,
            by=by,
        )

    made = _on_customers(insert)
    words = f"{made.customer_id}  {name}\nnext:  inferlog keys create {made.customer_id}"
    say(asdict(made), words, as_json=as_json)


@customers.command(
    "limits",
    epilog="Example:  inferlog customers limits acme --limit tokens=1000000/1h,model=minilm --max-concurrent 64",
)
@click.argument("customer")
@changes_limits
@authored()
@click.option("--json", "as_json", is_flag=True, help="Print the customer as one JSON object.")
def limits_(customer: str, change: LimitsChange, by: Author, as_json: bool) -> None:
    """Change the limits of CUSTOMER (id or name); every gateway follows within a second.

    What is not named stays. A limit with ,model=NAME counts the calls of that model alone, with ,burst=N that many
    units may come at once. Keys keep rates of their own: a key has what was the customer's when it was created.
    """

    async def work(connection: Connection) -> tuple[Customer, bool, list[str]]:
        await require_models(connection, "--limit", _models(change.put))
        found = await find_customer(connection, customer)
        after, is_other = await change_customer(
            connection, found["customer_id"], CustomerChange.LIMITED, change.applied, by=by
        )
        if not (change.requests_per_s or change.burst):
            return after, is_other, []
        rows = await connection.fetch(
            queries("api.operators")["slower_keys"], after.customer_id, after.requests_per_s, after.burst
        )
        return after, is_other, [row["key_id"] for row in rows]

    after, is_other, slower = _on_customers(work)
    _say_changed(after, is_other, as_json=as_json, slower_keys=slower)


@customers.command("cap", epilog="Example:  inferlog customers cap acme --per-month 250.00 --currency usd")
@click.argument("customer")
@click.option("--per-month", type=Parsed("amount", _micros), help="The most that is spent in a calendar month (UTC).")
@click.option("--currency", type=Parsed("currency", _currency), help="Three letters, that of the customer's prices.")
@click.option("--none", "none", is_flag=True, help="No cap.")
@authored()
@click.option("--json", "as_json", is_flag=True, help="Print the customer as one JSON object.")
def cap(customer: str, per_month: int | None, currency: str | None, none: bool, by: Author, as_json: bool) -> None:
    """Change what CUSTOMER (id or name) may spend in a month; every gateway follows within a second.

    After a first cap, calls are answered 503 from the next one on for some 15 s, until the ledger is past that one.
    """
    if none == (per_month is not None) or (per_month is None) != (currency is None):
        raise click.UsageError("expected --per-month and --currency, or --none")
    wanted = spend_cap_of(per_month, currency)
    was: list[SpendCap | None] = []

    def capped(found: Customer) -> Customer:
        was.append(found.spend_cap)
        return replace(found, spend_cap=wanted)

    async def work(connection: Connection) -> tuple[Customer, bool]:
        if currency is not None and not await connection.fetchval(queries("api.operators")["has_currency"], currency):
            click.echo(
                f"note: no price is in '{currency}', so nothing can be spent; see  inferlog prices list", err=True
            )
        found = await find_customer(connection, customer)
        return await change_customer(connection, found["customer_id"], CustomerChange.CAPPED, capped, by=by)

    after, is_other = _on_customers(work)
    _say_changed(after, is_other, as_json=as_json)
    if was == [None] and wanted is not None:
        click.echo(
            "note: unless this customer had a cap before, its calls are answered 503 spend_unknown from the next one "
            "on, for some 15 s, until the ledger is past that one",
            err=True,
        )


@customers.command("list", epilog="Example:  inferlog customers list --json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_customers(as_json: bool) -> None:
    """List customers, oldest first."""
    rows = in_postgres(operator_settings(), lambda c: _read(c, None))
    table([row if as_json else _in_a_line(row) for row in rows], as_json=as_json)


@customers.command("show", epilog="Example:  inferlog customers show acme --json")
@click.argument("customer")
@click.option("--json", "as_json", is_flag=True, help="Print the customer as one JSON object.")
def show(customer: str, as_json: bool) -> None:
    """Show one CUSTOMER (id or name): its limits, its cap, how many keys it has."""

    async def work(connection: Connection) -> dict[str, Any]:
        found = await find_customer(connection, customer)
        (row,) = await _read(connection, found["customer_id"])
        return row

    row = in_postgres(operator_settings(), work)
    lines = (f"{k:>15}  {'' if v is None else v}".rstrip() for k, v in _in_a_line(row).items())
    say(row, "\n".join(lines), as_json=as_json)


async def _read(connection: Connection, customer_id: str | None) -> list[dict[str, Any]]:
    rows = [dict(r) for r in await connection.fetch(queries("api.operators")["customers"], customer_id)]
    limits = await all_limits(connection, customer_id)
    for row in rows:
        row["spend_cap"] = spend_cap_of(row.pop("cap_micros"), row.pop("cap_currency"))
        row["limits"] = [asdict(limit) for limit in limits.get((row["customer_id"], None), [])]
    return rows


def _in_a_line(row: dict[str, Any]) -> dict[str, Any]:
    limits = shown([RateLimit(**limit) for limit in row["limits"]])
    return {**row, "limits": limits, "spend_cap": money(row["spend_cap"])}


def _models(limits: tuple[RateLimit, ...]) -> list[str]:
    return [limit.model for limit in limits if limit.model is not None]


def _on_customers(work: Callable[[Connection], Awaitable[T]]) -> T:
    try:
        return in_postgres(operator_settings(), work)
    except (NameTaken, NoSuchCustomer, NoSuchLimit) as error:
        raise click.ClickException(str(error)) from error


def _say_changed(
    customer: Customer, is_other: bool, *, as_json: bool, slower_keys: Sequence[str] | None = None
) -> None:
    words = "changed; every gateway follows within a second" if is_other else "is like that already"
    if slower_keys:
        words += "\nnote: these keys' own rates stay below the customer's; see  inferlog keys limits: " + " ".join(
            slower_keys
        )
    row = {**asdict(customer), "changed": is_other}
    if slower_keys is not None:
        row["slower_keys"] = list(slower_keys)
    say(row, f"{customer.customer_id}: {words}", as_json=as_json)
