"""`inferlog models route|routes|rollback|unschedule|alias`: which version answers, whom, and from when on."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import click

from gpu_worker import publish as publishing
from gpu_worker import registry
from gpu_worker.aliases import Realiased, set_alias
from gpu_worker.console import (
    check_name,
    plain,
    rerouted_row,
    rerouted_words,
    revision_words,
    to_the_end,
    utc,
    version_name,
)
from gpu_worker.history import read_history
from gpu_worker.route_table import lines_of, read_routes
from gpu_worker.routing import Rerouted, RouteWish, call_off, reroute, roll_back, rollback_target, wanted
from infra.actor import Author, authored
from infra.arguments import Moment, Parsed
from infra.postgres import open_connection
from infra.settings import OperatorSettings, operator_settings
from schemas.routes import Revision

_AHEAD: Final = re.compile(r"([1-9]\d{0,5})([smhd])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_PERCENT: Final = re.compile(r"([^=]+)=(\d{1,3})%?")


def _ahead(text: str) -> timedelta:
    match = _AHEAD.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a number above 0 and s, m, h or d, like 2h or 3d, found '{text[:40]}'")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def _canary(text: str) -> tuple[str, int]:
    match = _PERCENT.fullmatch(text)
    if match is None or not 1 <= int(match[2]) <= 100:
        raise ValueError(f"expected VERSION=PERCENT with 1 to 100 %, like 3fa1b2=5%, found '{text[:40]}'")
    return version_name(match[1]), int(match[2])


def _pin(text: str) -> tuple[str, str]:
    customer, _, version = text.rpartition("=")
    if not customer:
        raise ValueError(f"expected CUSTOMER=VERSION, found '{text[:40]}'")
    return customer, version_name(version)


@click.command(epilog="Example:  inferlog models route digits 3fa1b2 --canary 77c0de=5% --in 2h")
@click.argument("name")
@click.argument("version", required=False, type=Parsed("version", version_name))
@click.option("--pool", default=None, help="Worker pool that serves it; unchanged when left out.")
@click.option("--spread", default=None, type=click.IntRange(1, 8), help="Partitions it uses; unchanged when left out.")
@click.option("--price", default=None, help="Price list entry its requests are billed by; unchanged when left out.")
@click.option(
    "--canary",
    "canaries",
    multiple=True,
    type=Parsed("version=percent", _canary),
    help="A version for some of the customers, as 77c0de=5%; again for each there is to be. Left out they stay and end "
    "when VERSION is another one.",
)
@click.option("--no-canary", is_flag=True, help="End all canaries.")
@click.option(
    "--pin",
    "pins",
    multiple=True,
    type=Parsed("customer=version", _pin),
    help="A customer (id or name) that gets a version of its own, as acme=77c0de; again for each. Others stay.",
)
@click.option("--unpin", "unpins", multiple=True, help="A customer that gets what the route says again.")
@click.option("--at", type=Moment(), help="When, as 2026-12-01T06:00Z; at once when left out.")
@click.option("--in", "ahead", type=Parsed("length of time", _ahead), help="In how long, as 2h; at once when left out.")
@authored()
@click.option("--json", "as_json", is_flag=True, help="Print the route as one JSON object.")
def route(
    name: str,
    version: str | None,
    pool: str | None,
    spread: int | None,
    price: str | None,
    canaries: Sequence[tuple[str, int]],
    no_canary: bool,
    pins: Sequence[tuple[str, str]],
    unpins: Sequence[str],
    at: datetime | None,
    ahead: timedelta | None,
    by: Author,
    as_json: bool,
) -> None:
    """Send model NAME's new requests to VERSION (its hash or the first digits of it, or an alias), from some time on.

    Without VERSION the route keeps its own. Requests already admitted keep the version they were admitted with. A route
    that changes, or will, is a fact on the log.
    """
    check_name(name, pool)
    if canaries and no_canary:
        raise click.UsageError("--canary says which there are to be, --no-canary that there are none; give one of them")
    if at is not None and ahead is not None:
        raise click.UsageError("--at and --in both say when; give one of them")
    if len({v for v, _ in canaries}) < len(canaries):
        raise click.UsageError("--canary: a version is given twice")
    pinned = [customer for customer, _ in pins]
    if both := sorted(set(pinned) & set(unpins)):
        raise click.UsageError(f"--pin and --unpin: expected one of them for customer '{both[0]}', found both")
    if len(set(pinned)) < len(pinned):
        raise click.UsageError("--pin: a customer is given twice")
    wish = RouteWish(
        pool=pool,
        spread=spread,
        price_id=price,
        canaries=dict(canaries) if canaries or no_canary else None,
        pins={**dict(pins), **dict.fromkeys(unpins)},
        at=at or ahead,
    )
    done = to_the_end(_route(operator_settings(), name, version, wish, by))
    when = f"from {utc(done.effective_at)} on " if wish.at is not None and done.effective_at is not None else ""
    _say(rerouted_row(done), f"{when}{rerouted_words(done)}", name, as_json=as_json)


@click.command(epilog="Example:  inferlog models routes digits --json")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array, an object for each model.")
def routes(name: str | None, as_json: bool) -> None:
    """Show what holds now, what is scheduled, and the aliases; of model NAME also every revision there was."""
    if name is not None:
        check_name(name)
    found = to_the_end(read_routes(operator_settings(), name))
    if as_json:
        click.echo(json.dumps([routes.plain() for routes in found]))
        return
    for line in lines_of(found, with_history=name is not None):
        click.echo(line)
    if not found:
        click.echo("no model is published yet; try 'inferlog models publish NAME FOLDER'")


@click.command(epilog='Example:  inferlog models rollback digits --reason "more wrong answers"')
@click.argument("name")
@authored()
@click.option("--json", "as_json", is_flag=True, help="Print the route as one JSON object.")
def rollback(name: str, by: Author, as_json: bool) -> None:
    """Make model NAME's route at once what it was before the last change; done again, it goes back further."""
    check_name(name)
    done = to_the_end(_rollback(operator_settings(), name, by))
    _say(rerouted_row(done), f"back to revision {done.restores}: {rerouted_words(done)}", name, as_json=as_json)


@click.command(epilog="Example:  inferlog models unschedule digits --revision 4")
@click.argument("name")
@click.option("--revision", default=None, type=click.IntRange(min=1), help="The one to take back; all when left out.")
@authored()
@click.option("--json", "as_json", is_flag=True, help="Print what was taken back as one JSON object.")
def unschedule(name: str, revision: int | None, by: Author, as_json: bool) -> None:
    """Take back the changes of model NAME's route that are scheduled."""
    check_name(name)
    done = to_the_end(_unschedule(operator_settings(), name, revision, by))
    row = {"unscheduled": [{"revision": r.number, "effective_at": utc(r.effective_at), **plain(r.route)} for r in done]}
    words = "; ".join(f"revision {r.number} of {utc(r.effective_at)} ({revision_words(r)})" for r in done)
    _say(row, f"no longer scheduled: {words}", name, as_json=as_json)


@click.command(epilog="Example:  inferlog models alias digits stable 3fa1b2")
@click.argument("name")
@click.argument("alias_name", metavar="ALIAS")
@click.argument("version", required=False, type=Parsed("version", version_name))
@click.option("--remove", is_flag=True, help="The alias means nothing any more.")
@authored()
@click.option("--json", "as_json", is_flag=True, help="Print the alias as one JSON object.")
def alias(name: str, alias_name: str, version: str | None, remove: bool, by: Author, as_json: bool) -> None:
    """Let ALIAS mean VERSION of model NAME, so that callers may ask for NAME@ALIAS."""
    check_name(name)
    if remove == (version is not None):
        raise click.UsageError("expected either a VERSION that the alias means, or --remove")
    done = to_the_end(_alias(operator_settings(), name, alias_name, version, by))
    words = f"@{alias_name} means " + ("nothing" if done.version is None else f"version {done.version}")
    if not done.changed:
        words += ", as before"
    elif done.before is not None:
        words += f" (was version {done.before})"
    row = {
        "alias": alias_name,
        "version": done.version,
        "previous_version": done.before,
        "alias_changed": done.changed,
    }
    _say(row, words, name, as_json=as_json)


async def _route(settings: OperatorSettings, name: str, named: str | None, typed: RouteWish, by: Author) -> Rerouted:
    async with open_connection(settings.postgres) as connection:
        version = None if named is None else await registry.find_version(connection, name, named)
        wish = await registry.understood(connection, name, typed)
        # Asked before the lock is taken. Should the route move meanwhile, whoever moved it has asked for its pool.
        await publishing.require_pool(settings.kafka, (await wanted(connection, name, version, wish)).pool)
        return await reroute(connection, name, version, wish, by=by)


async def _rollback(settings: OperatorSettings, name: str, by: Author) -> Rerouted:
    async with open_connection(settings.postgres) as connection:
        history = await read_history(connection, name)
        await publishing.require_pool(settings.kafka, rollback_target(history).route.pool)
        return await roll_back(connection, name, expected=history.held_number, by=by)


async def _unschedule(settings: OperatorSettings, name: str, number: int | None, by: Author) -> Sequence[Revision]:
    async with open_connection(settings.postgres) as connection:
        return await call_off(connection, name, number, by=by)


async def _alias(settings: OperatorSettings, name: str, alias_name: str, named: str | None, by: Author) -> Realiased:
    async with open_connection(settings.postgres) as connection:
        version = None if named is None else await registry.find_version(connection, name, named)
        return await set_alias(connection, name, alias_name, version, by=by)


def _say(row: dict[str, Any], words: str, name: str, *, as_json: bool) -> None:
    click.echo(json.dumps({"model": name, **row}) if as_json else f"{name}: {words}")
