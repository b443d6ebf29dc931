"""`inferlog api` and `customers`: run a gateway, and keep who is served by it."""

from __future__ import annotations

import re
import secrets
from typing import Any

import click

from api.console import RATE, in_postgres, say, table
from infra.postgres import Connection, is_unique_violation, queries
from infra.settings import api_settings, operator_settings

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_NAME = re.compile(r"[^\x00-\x1f{}]{1,100}")


@click.command(epilog="Example:  inferlog api --check && inferlog api")
@click.option("--check", is_flag=True, help="Check the settings, say where it would listen, and exit.")
def api(check: bool) -> None:
    """Run the API gateway in the foreground."""
    if check:
        settings = api_settings()
        click.echo(f"settings are fine; would listen on http://{settings.host}:{settings.port}")
        return
    from api.__main__ import main

    raise SystemExit(main())


@click.group(epilog="Example:  inferlog customers create acme --requests-per-s 50 --burst 100")
def customers() -> None:
    """Create and list customers."""


@customers.command("create", epilog='Example:  inferlog customers create "Acme Ltd" --requests-per-s 50 --burst 100')
@click.argument("name")
@click.option("--requests-per-s", type=RATE, required=True, help="Rate of the customer's keys together.")
@click.option("--burst", type=RATE, required=True, help="Requests the customer may make at once.")
@click.option("--json", "as_json", is_flag=True, help="Print the customer as one JSON object.")
def create_customer(name: str, requests_per_s: int, burst: int, as_json: bool) -> None:
    """Create a customer. It can call once it has a key (inferlog keys create)."""
    if not _NAME.fullmatch(name):
        raise click.UsageError("NAME: expected 1 to 100 characters, none of them control characters or braces")
    customer_id = "cust_" + "".join(secrets.choice(_ALPHABET) for _ in range(12))

    async def insert(connection: Connection) -> dict[str, Any]:
        try:
            created_at = await connection.fetchval(
                queries("api")["insert_customer"], customer_id, name, requests_per_s, burst
            )
        except Exception as error:
            if is_unique_violation(error):
                raise click.ClickException(f"there is a customer named '{name}' already") from error
            raise
        return {
            "customer_id": customer_id,
            "name": name,
            "requests_per_s": requests_per_s,
            "burst": burst,
            "created_at": created_at,
        }

    made = in_postgres(operator_settings(), insert)
    say(made, f"{made['customer_id']}  {name}\nnext:  inferlog keys create {made['customer_id']}", as_json=as_json)


@customers.command("list", epilog="Example:  inferlog customers list --json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_customers(as_json: bool) -> None:
    """List customers, oldest first."""
    rows = in_postgres(operator_settings(), lambda c: c.fetch(queries("api")["customers"]))
    table([dict(r) for r in rows], as_json=as_json)
