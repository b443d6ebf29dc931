"""`inferlog keys`: who may call. Keys are made, changed, rotated with an overlap and revoked in Postgres, each
change with its fact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import datetime
from typing import Any, TypeVar

import click

from api.access.key_shape import mint
from api.admission.caller import OPERATIONS
from api.operators.console import RATE, duration, find_customer, in_postgres, require_models, say, table
from api.operators.key_changes_commands import MODELS, OPERATION_NAMES, expire, limits, scope
from api.operators.keyring import ApiKey, NoSuchKey, NotChangeable, NotRotatable, create_key, revoke_key, rotate_key
from api.operators.limit_options import LIMIT, require_distinct, require_of_a_key, shown
from api.operators.rates import all_limits
from infra.actor import Author, authored
from infra.arguments import KeyId, Moment
from infra.postgres import Connection, queries
from infra.redis import RedisError, open_redis
from infra.settings import OperatorSettings, operator_settings
from schemas.facts import RateLimit
from schemas.keys import RedisKeys

T = TypeVar("T")

# As long as a customer's name may be.
_LONGEST_LABEL = 100
_LISTED = (
    "key_id", "customer_id", "customer", "label", "requests_per_s", "burst", "created_at", "expires_at", "revoked_at",
    "replaces_key_id",
)  # fmt: skip


@click.group(epilog="Example:  inferlog keys create acme --label laptop")
def keys() -> None:
    """Create, list, scope, limit, rotate and revoke API keys."""


keys.add_command(scope)
keys.add_command(limits)
keys.add_command(expire)


@keys.command(
    "create", epilog="Example:  inferlog keys create cust_4k7… --label ci --requests-per-s 5 --expires-in 90d"
)
@click.argument("customer")
@click.option("--label", default="", help="What the key is for; shown in lists and kept in its facts.")
@click.option("--requests-per-s", type=RATE, help="Rate of this key; copied from the customer's now when not given.")
@click.option(
    "--burst", type=RATE, help="Requests this key may make at once; copied from the customer's now when not given."
)
@click.option("--models", type=MODELS, default=(), help="Models it may call, with commas; all when not given.")
@click.option(
    "--operations", type=OPERATION_NAMES, default=(), help=f"Some of {', '.join(OPERATIONS)}; all if not given."
)
@click.option("--limit", "limits_", type=LIMIT, multiple=True, help="UNIT=AMOUNT/WINDOW[,burst=N]; repeatable.")
@click.option("--max-concurrent", type=RATE, help="Unfinished requests it may have at once.")
@click.option("--expires-in", help="Lifetime like 12h or 90d; without it and --expires-at the key does not expire.")
@click.option("--expires-at", type=Moment(), help="Its end: an ISO 8601 date or time, UTC without a zone.")
@authored()
@click.option("--json", "as_json", is_flag=True, help="Print the key as one JSON object.")
def create(
    customer: str,
    label: str,
    requests_per_s: int | None,
    burst: int | None,
    models: tuple[str, ...],
    operations: tuple[str, ...],
    limits_: tuple[RateLimit, ...],
    max_concurrent: int | None,
    expires_in: str | None,
    expires_at: datetime | None,
    by: Author,
    as_json: bool,
) -> None:
    """Create a key for CUSTOMER (id or name). The secret is shown once and not stored.

    A rate that is left out is copied from the customer's now; the key keeps it when the customer's is changed.
    """
    if len(label) > _LONGEST_LABEL or not label.isprintable():
        raise click.UsageError(
            f"--label: expected at most {_LONGEST_LABEL} characters, none of them a control character or a line end"
        )
    require_distinct(limits_)
    require_of_a_key(limits_)
    if expires_in is not None and expires_at is not None:
        raise click.UsageError("expected at most one of --expires-in and --expires-at")
    settings = operator_settings()
    lifetime = None if expires_in is None else duration("--expires-in", expires_in)
    minted = mint(settings.environment)

    async def insert(connection: Connection) -> ApiKey:
        owner = await find_customer(connection, customer)
        await require_models(connection, "--models", models)
        return await create_key(
            connection,
            minted,
            customer_id=owner["customer_id"],
            label=label,
            requests_per_s=requests_per_s or owner["requests_per_s"],
            burst=burst or owner["burst"],
            lifetime=lifetime,
            expires_at=expires_at,
            models=models,
            operations=operations,
            limits=limits_,
            max_concurrent=max_concurrent,
            by=by,
        )

    made = _change(settings, insert)
    say(_shown_once(made, minted.secret), f"{minted.secret}\n{_keep(made)}", as_json=as_json)


@keys.command("list", epilog="Example:  inferlog keys list cust_4k7… --json")
@click.argument("customer", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_keys(customer: str | None, as_json: bool) -> None:
    """List keys, of CUSTOMER (id or name) or of all. Secrets are not stored, so none is shown."""

    async def read(connection: Connection) -> list[dict[str, Any]]:
        customer_id = None if customer is None else (await find_customer(connection, customer))["customer_id"]
        return await _read(connection, customer_id, None)

    rows = in_postgres(operator_settings(), read)
    table([row if as_json else {name: row[name] for name in _LISTED} for row in rows], as_json=as_json)


@keys.command("show", epilog="Example:  inferlog keys show 4k7q0m2x9abc --json")
@click.argument("key_id", type=KeyId())
@click.option("--json", "as_json", is_flag=True, help="Print the key as one JSON object.")
def show(key_id: str, as_json: bool) -> None:
    """Show one key: whose it is, what it may do, its limits and its end. Its secret is not stored."""
    rows = in_postgres(operator_settings(), lambda c: _read(c, None, key_id))
    if not rows:
        raise click.ClickException(f"there is no key with the id '{key_id}'; see  inferlog keys list")
    words = {
        **rows[0],
        "models": ", ".join(rows[0]["models"]) or "all",
        "operations": ", ".join(rows[0]["operations"]) or "all",
        "limits": shown([RateLimit(**limit) for limit in rows[0]["limits"]]),
    }
    lines = (f"{name:>15}  {'' if value is None else value}".rstrip() for name, value in words.items())
    say(rows[0], "\n".join(lines), as_json=as_json)


@keys.command("rotate", epilog="Example:  inferlog keys rotate 4k7q0m2x9abc --overlap 24h --reason 'yearly change'")
@click.argument("key_id", type=KeyId())
@click.option("--overlap", default="24h", show_default=True, help="How long the old key goes on working, like 12h.")
@authored()
@click.option("--json", "as_json", is_flag=True, help="Print the successor as one JSON object.")
def rotate(key_id: str, overlap: str, by: Author, as_json: bool) -> None:
    """Make a successor of a key, with its label, scope, limits and lifetime; the old key ends after the overlap.

    The successor's secret is shown once. For a key that has leaked, create another and revoke it instead.
    """
    settings = operator_settings()
    minted = mint(settings.environment)
    lasts = duration("--overlap", overlap)
    old, made = _change(settings, lambda c: rotate_key(c, key_id, minted, overlap=lasts, by=by))
    words = (
        f"{minted.secret}\n{_keep(made)}\nKey {old.key_id} goes on working until {old.expires_at:%Y-%m-%dT%H:%M:%SZ}."
    )
    answer = {**_shown_once(made, minted.secret), "replaced_key_expires_at": old.expires_at}
    say(answer, words, as_json=as_json)


@keys.command("revoke", epilog="Example:  inferlog keys revoke 4k7q0m2x9abc --reason 'found in a public repository'")
@click.argument("key_id", type=KeyId())
@authored()
@click.option("--json", "as_json", is_flag=True, help="Print what was done as one JSON object.")
def revoke(key_id: str, by: Author, as_json: bool) -> None:
    """Revoke a key for good; every gateway refuses it within a second. May be repeated."""
    settings = operator_settings()
    # Write order; each line says what dying right after it costs.
    # 1 Postgres: revoked_at and its fact   nothing; every gateway reads it within a second, refuses the key, and puts
    #                                       it into the set
    # 2 Redis: revoked set                  nothing; every gateway refuses the key at its next call, also one that does
    #                                       not hear from Postgres

    async def work(connection: Connection) -> tuple[ApiKey, str | None]:
        done = await revoke_key(connection, key_id, by=by)
        return done, await connection.fetchval(queries("api.operators")["living_successor"], key_id)

    revoked, successor = _change(settings, work)
    try:
        asyncio.run(_add_revoked(settings, revoked.customer_id, key_id))
    except RedisError as error:
        raise click.ClickException(
            f"key {key_id} is revoked, but Redis does not answer ({error}): gateways that hear from Postgres refuse it "
            "within a second, others may admit it for 30 s; run the command again to be sure"
        ) from error
    done = {"key_id": key_id, "customer_id": revoked.customer_id, "revoked_at": revoked.revoked_at}
    words = f"{key_id} is revoked"
    if successor is not None:
        words += f"\nnote: it was rotated, and its successor {successor} still works"
    say({**done, "living_successor": successor}, words, as_json=as_json)


def _change(settings: OperatorSettings, work: Callable[[Connection], Awaitable[T]]) -> T:
    try:
        return in_postgres(settings, work)
    except (NoSuchKey, NotChangeable, NotRotatable) as error:
        raise click.ClickException(str(error)) from error


def _shown_once(made: ApiKey, secret: str) -> dict[str, Any]:
    described = asdict(made)
    del described["revoked_at"]
    return {"key_id": described.pop("key_id"), "key": secret, **described}


def _keep(made: ApiKey) -> str:
    return f"Keep it: it is not stored and cannot be shown again (id {made.key_id})."


async def _read(connection: Connection, customer_id: str | None, key_id: str | None) -> list[dict[str, Any]]:
    rows = [dict(r) for r in await connection.fetch(queries("api.operators")["keys"], customer_id, key_id)]
    limits_ = await all_limits(connection, rows[0]["customer_id"] if key_id is not None and rows else customer_id)
    for row in rows:
        row["limits"] = [asdict(limit) for limit in limits_.get((row["customer_id"], row["key_id"]), [])]
    return rows


async def _add_revoked(settings: OperatorSettings, customer_id: str, key_id: str) -> None:
    async with open_redis(settings.redis, timeout_s=2.0) as client:
        name = RedisKeys(namespace=settings.redis.namespace).revoked_keys(customer_id)
        await client.sadd(name, key_id)
