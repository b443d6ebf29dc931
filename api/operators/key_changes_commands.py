"""`inferlog keys scope`, `limits` and `expire`: what a key may do, how fast, and for how long."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from datetime import datetime
from typing import Final

import click

from api.admission.caller import OPERATIONS
from api.operators.console import duration, in_postgres, require_models, say
from api.operators.keyring import ApiKey, NoSuchKey, NotChangeable, change_key
from api.operators.limit_options import LimitsChange, changes_limits, require_of_a_key
from api.operators.rates import NoSuchLimit
from infra.actor import Author, authored
from infra.arguments import KeyId, Moment, Parsed
from infra.postgres import Connection
from infra.settings import operator_settings
from schemas.facts import KeyChange

_MODEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def _models(text: str) -> tuple[str, ...]:
    """Names with commas between them, in order and each once. Raises ValueError."""
    names = tuple(sorted(set(text.split(","))))
    for name in names:
        if not _MODEL.fullmatch(name):
            raise ValueError(f"expected names of models with commas between them, found {text[:80]!r}")
    return names


def _operations(text: str) -> tuple[str, ...]:
    names = tuple(sorted(set(text.split(","))))
    if not set(names) <= set(OPERATIONS):
        raise ValueError(f"expected some of {', '.join(OPERATIONS)}, with commas between them, found {text[:80]!r}")
    return names


MODELS: Final = Parsed("models", _models)
OPERATION_NAMES: Final = Parsed("operations", _operations)


@click.command("scope", epilog="Example:  inferlog keys scope 4k7q0m2x9abc --models minilm,digits --operations infer")
@click.argument("key_id", type=KeyId())
@click.option("--models", type=MODELS, help="Names with commas between them; the key may call no others.")
@click.option("--all-models", is_flag=True, help="The key may call every model.")
@click.option("--operations", type=OPERATION_NAMES, help=f"Some of {', '.join(OPERATIONS)}; the key may do no others.")
@click.option("--all-operations", is_flag=True, help="The key may do everything.")
@authored()
@click.option("--json", "as_json", is_flag=True, help="Print the key as one JSON object.")
def scope(
    key_id: str,
    models: tuple[str, ...] | None,
    all_models: bool,
    operations: tuple[str, ...] | None,
    all_operations: bool,
    by: Author,
    as_json: bool,
) -> None:
    """Change what a key may call and do; every gateway follows within a second. What is not named stays."""
    if not (models or all_models or operations or all_operations):
        raise click.UsageError("nothing to change; say --models, --all-models, --operations or --all-operations")
    if (models and all_models) or (operations and all_operations):
        raise click.UsageError("expected names or all of them (--models or --all-models, and the same of operations)")

    def changed(key: ApiKey, _now: datetime) -> ApiKey:
        return replace(
            key,
            models=() if all_models else (models or key.models),
            operations=() if all_operations else (operations or key.operations),
        )

    async def work(connection: Connection) -> tuple[ApiKey, bool]:
        await require_models(connection, "--models", models or ())
        return await change_key(connection, key_id, KeyChange.SCOPED, changed, by=by)

    _run(work, as_json=as_json)


@click.command("limits", epilog="Example:  inferlog keys limits 4k7q0m2x9abc --limit items=1000/1m,burst=200")
@click.argument("key_id", type=KeyId())
@changes_limits
@authored()
@click.option("--json", "as_json", is_flag=True, help="Print the key as one JSON object.")
def limits(key_id: str, change: LimitsChange, by: Author, as_json: bool) -> None:
    """Change a key's limits; every gateway follows within a second. What is not named stays."""
    require_of_a_key(change.put)
    _change(key_id, KeyChange.LIMITED, lambda key, _now: change.applied(key), by=by, as_json=as_json)


@click.command("expire", epilog="Example:  inferlog keys expire 4k7q0m2x9abc --in 30d --reason 'end of the trial'")
@click.argument("key_id", type=KeyId())
@click.option("--in", "within", help="How long from now, like 12h or 90d.")
@click.option("--at", "at", type=Moment(), help="When: an ISO 8601 date or time, UTC without a zone.")
@click.option("--never", is_flag=True, help="The key does not expire.")
@authored()
@click.option("--json", "as_json", is_flag=True, help="Print the key as one JSON object.")
def expire(key_id: str, within: str | None, at: datetime | None, never: bool, by: Author, as_json: bool) -> None:
    """Change when a key ends, if ever; every gateway follows within a second. To end it now, revoke it."""
    if (within is not None) + (at is not None) + never != 1:
        raise click.UsageError("expected one of --in, --at and --never")
    length = None if within is None else duration("--in", within)

    def changed(key: ApiKey, now: datetime) -> ApiKey:
        ends = at if length is None else now + length
        if ends is not None and ends <= now:
            raise NotChangeable(
                f"--at: {ends:%Y-%m-%dT%H:%M:%SZ} is over; to end the key now, use  inferlog keys revoke {key_id}"
            )
        return replace(key, expires_at=ends)

    _change(key_id, KeyChange.EXPIRY_CHANGED, changed, by=by, as_json=as_json)


def _change(
    key_id: str, kind: KeyChange, changed: Callable[[ApiKey, datetime], ApiKey], *, by: Author, as_json: bool
) -> None:
    _run(lambda connection: change_key(connection, key_id, kind, changed, by=by), as_json=as_json)


def _run(work: Callable[[Connection], Awaitable[tuple[ApiKey, bool]]], *, as_json: bool) -> None:
    try:
        key, is_other = in_postgres(operator_settings(), work)
    except (NoSuchKey, NoSuchLimit, NotChangeable) as error:
        raise click.ClickException(str(error)) from error
    words = "changed; every gateway follows within a second" if is_other else "is like that already"
    say({**asdict(key), "changed": is_other}, f"{key.key_id}: {words}", as_json=as_json)
