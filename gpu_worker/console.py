"""What the commands about models share: names as they may be, one line per failure, and a route in words."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from datetime import datetime, timezone
from typing import Any, Final, TypeVar

import click

from gpu_worker.bundle import BundleError
from gpu_worker.routing import PublishConflict, Rerouted
from infra.away import unanswered
from infra.kafka import BusUnavailable
from infra.postgres import is_outage
from infra.s3 import StoreUnavailable
from schemas.routes import Revision, Route, is_alias
from schemas.topics import require_pool_name

T = TypeVar("T")

_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DIGITS: Final = re.compile(r"[0-9a-fA-F]{4,64}")


def check_name(name: str, pool: str | None = None) -> None:
    """Raises BadParameter unless these can be the names of a model and of a pool."""
    if not _MODEL_NAME.fullmatch(name):
        raise click.BadParameter("expected 1 to 100 letters, digits, '.', '_' and '-'", param_hint="NAME")
    if pool is not None:
        try:
            require_pool_name(pool)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--pool") from error


def version_name(text: str) -> str:
    """A version as operators name it. Raises ValueError unless it can be one."""
    if _DIGITS.fullmatch(text) is None and not is_alias(text):
        raise ValueError(f"expected 4 to 64 hex digits, the start of a version, or an alias; found '{text[:40]}'")
    return text


def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; expected failures become one line instead of a traceback."""
    try:
        return asyncio.run(work)
    except (BundleError, PublishConflict, StoreUnavailable) as error:
        raise click.ClickException(str(error)) from error
    except BusUnavailable as error:
        raise click.ClickException(unanswered("Kafka", error)) from error
    except Exception as error:
        if is_outage(error):
            raise click.ClickException(unanswered("Postgres", error)) from error
        raise


def plain(route: Route) -> dict[str, Any]:
    """A route as JSON has it: canaries as percents."""
    return {
        "version": route.version,
        "pool": route.pool,
        "spread": route.spread,
        "price_id": route.price_id,
        "canaries": route.percents,
        "pins": dict(route.pins),
    }


def rerouted_row(done: Rerouted) -> dict[str, Any]:
    """What a change of a route did, as JSON has it."""
    return {
        **plain(done.route),
        "route_changed": done.changed,
        "previous_route": None if done.before is None else plain(done.before),
        "revision": done.number,
        "effective_at": None if done.effective_at is None else utc(done.effective_at),
        "restores": done.restores,
        "scheduled": [r.number for r in done.planned],
    }


def rerouted_words(done: Rerouted) -> str:
    """The route, of the one before what is otherwise now, and what is still to come."""
    now, before = terms(done.route), {} if done.before is None else terms(done.before)
    words = f"routed to {', '.join(now.values())}"
    if not done.changed:
        words = f"already {words}"
    elif was := [text for term, text in before.items() if text != now.get(term)]:
        words += f" (was {', '.join(was)})"
    return words + planned_words(done.planned)


def planned_words(planned: Any) -> str:
    """What is still to come, as the end of a sentence; nothing when nothing is."""
    if not planned:
        return ""
    revisions = ", ".join(f"revision {r.number} at {utc(r.effective_at)}" for r in planned)
    return f"; still scheduled: {revisions}"


def terms(route: Route) -> dict[str, str]:
    """Each term of a route in words."""
    words = {
        "version": f"version {route.version}",
        "pool": f"pool '{route.pool}'",
        "spread": f"spread {route.spread}",
        "price": f"price '{route.price_id}'",
    }
    if route.canaries:
        words["canaries"] = "canaries " + " ".join(f"{v[:12]}={percent}%" for v, percent in route.percents.items())
    if route.pins:
        words["pins"] = f"{len(route.pins)} pinned: " + " ".join(f"{c}={v[:12]}" for c, v in sorted(route.pins.items()))
    return words


def revision_words(revision: Revision) -> str:
    """One revision's terms, on one line, its versions short."""
    route = revision.route
    return ", ".join({**terms(route), "version": f"version {route.version[:12]}"}.values())


def utc(moment: datetime) -> str:
    """A time as it is printed."""
    return moment.astimezone(timezone.utc).isoformat()
