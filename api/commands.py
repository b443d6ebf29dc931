"""`inferlog api`, `customers` and `keys`: run a gateway, and decide who may call it.

Writes go to Postgres, the model registry; the limiter's revoked set in Redis only makes a revocation faster.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

import click

from api.admission.keys import mint
from infra.postgres import Connection, connect, is_outage, is_unique_violation, queries
from infra.redis import RedisError, open_redis
from infra.settings import OperatorSettings, api_settings, operator_settings
from schemas.keys import RedisKeys

T = TypeVar("T")

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_NAME = re.compile(r"[^\x00-\x1f{}]{1,100}")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_rate = click.IntRange(1, 1_000_000)


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
@click.option("--requests-per-s", type=_rate, required=True, help="Rate of the customer's keys together.")
@click.option("--burst", type=_rate, required=True, help="Requests the customer may make at once.")
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

    made = _in_postgres(operator_settings(), insert)
    _print(made, as_json, f"{made['customer_id']}  {name}\nnext:  inferlog keys create {made['customer_id']}")


@customers.command("list", epilog="Example:  inferlog customers list --json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_customers(as_json: bool) -> None:
    """List customers, oldest first."""
    rows = _in_postgres(operator_settings(), lambda c: c.fetch(queries("api")["customers"]))
    _table([dict(r) for r in rows], as_json)


@click.group(epilog="Example:  inferlog keys create acme --label laptop")
def keys() -> None:
    """Create, list and revoke API keys."""


@keys.command(
    "create", epilog="Example:  inferlog keys create cust_4k7… --label ci --requests-per-s 5 --expires-in 90d"
)
@click.argument("customer")
@click.option("--label", default="", help="What the key is for; only shown in lists.")
@click.option("--requests-per-s", type=_rate, help="Rate of this key; the customer's when not given.")
@click.option("--burst", type=_rate, help="Requests this key may make at once; the customer's when not given.")
@click.option("--expires-in", help="Lifetime like 12h or 90d; without it the key does not expire.")
@click.option("--json", "as_json", is_flag=True, help="Print the key as one JSON object.")
def create_key(
    customer: str,
    label: str,
    requests_per_s: int | None,
    burst: int | None,
    expires_in: str | None,
    as_json: bool,
) -> None:
    """Create a key for CUSTOMER (id or name). The secret is shown once and not stored."""
    settings = operator_settings()
    lifetime = _lifetime(expires_in)
    minted = mint(settings.environment)

    async def insert(connection: Connection) -> dict[str, Any]:
        owner = await connection.fetchrow(queries("api")["customer"], customer)
        if owner is None:
            raise click.ClickException(f"there is no customer '{customer}'; see  inferlog customers list")
        limits = (requests_per_s or owner["requests_per_s"], burst or owner["burst"])
        row = await connection.fetchrow(
            queries("api")["insert_key"],
            minted.key_id,
            owner["customer_id"],
            minted.secret_sha256,
            label,
            *limits,
            lifetime,
        )
        return {
            "key_id": minted.key_id,
            "key": minted.secret,
            "customer_id": owner["customer_id"],
            "label": label,
            "requests_per_s": limits[0],
            "burst": limits[1],
            "created_at": row["created_at"],
            "expires_at": row["expires_at"],
        }

    made = _in_postgres(settings, insert)
    _print(made, as_json, f"{made['key']}\nKeep it: it is not stored and cannot be shown again (id {made['key_id']}).")


@keys.command("list", epilog="Example:  inferlog keys list cust_4k7… --json")
@click.argument("customer", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_keys(customer: str | None, as_json: bool) -> None:
    """List keys, of CUSTOMER (id or name) or of all. Secrets are not stored, so none is shown."""

    async def read(connection: Connection) -> list[dict[str, Any]]:
        customer_id = None
        if customer is not None:
            owner = await connection.fetchrow(queries("api")["customer"], customer)
            if owner is None:
                raise click.ClickException(f"there is no customer '{customer}'; see  inferlog customers list")
            customer_id = owner["customer_id"]
        return [dict(r) for r in await connection.fetch(queries("api")["keys"], customer_id)]

    _table(_in_postgres(operator_settings(), read), as_json)


@keys.command("revoke", epilog="Example:  inferlog keys revoke 4k7q0m2x9abc")
@click.argument("key_id")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as one JSON object.")
def revoke_key(key_id: str, as_json: bool) -> None:
    """Revoke a key for good; every gateway refuses it within a second. May be repeated."""
    settings = operator_settings()
    # Write order; each line says what dying right after it costs.
    # 1 Postgres: revoked_at   the key still works where it was looked up in the last 5 s, then nowhere; running the
    #                          command again finishes the work
    # 2 Redis: revoked set     nothing; every gateway refuses the key at its next call
    row = _in_postgres(settings, lambda c: c.fetchrow(queries("api")["revoke_key"], key_id))
    if row is None:
        raise click.ClickException(f"there is no key with the id '{key_id}'; see  inferlog keys list")
    try:
        asyncio.run(_add_revoked(settings, row["customer_id"], key_id))
    except RedisError as error:
        raise click.ClickException(
            f"key {key_id} is revoked, but Redis does not answer ({error}): gateways that looked it up go on for up to "
            "5 s; run the command again to be sure"
        ) from error
    done = {"key_id": key_id, "customer_id": row["customer_id"], "revoked_at": row["revoked_at"]}
    _print(done, as_json, f"{key_id} is revoked")


async def _add_revoked(settings: OperatorSettings, customer_id: str, key_id: str) -> None:
    async with open_redis(settings.redis, timeout_s=2.0) as client:
        name = RedisKeys(namespace=settings.redis.namespace).revoked_keys(customer_id)
        await client.sadd(name, key_id)


def _in_postgres(settings: OperatorSettings, work: Callable[[Connection], Awaitable[T]]) -> T:
    """Run `work` on one connection. An outage ends the command with one line."""

    async def run() -> T:
        connection = await connect(settings.postgres)
        try:
            return await work(connection)
        finally:
            await connection.close(timeout=5)

    try:
        return asyncio.run(run())
    except Exception as error:
        if is_outage(error):
            raise click.ClickException(f"Postgres does not answer: {type(error).__name__}: {error}") from error
        raise


def _lifetime(text: str | None) -> timedelta | None:
    if text is None:
        return None
    match = re.fullmatch(r"([1-9]\d{0,5})([smhd])", text)
    if match is None:
        raise click.UsageError(f"--expires-in: expected a number and s, m, h or d, like 12h or 90d, found '{text}'")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _plain(value: Any) -> Any:
    return value.astimezone(timezone.utc).isoformat() if isinstance(value, datetime) else value


def _print(made: dict[str, Any], as_json: bool, words: str) -> None:
    click.echo(json.dumps({k: _plain(v) for k, v in made.items()}) if as_json else words)


def _table(rows: list[dict[str, Any]], as_json: bool) -> None:
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
