"""What a customer used: its own hours from the ledger, by hour or by day, with totals that equal their sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from aiohttp import web

from api.errors import BadInput, Unavailable
from api.services import GATE, LEDGER, SETTINGS
from api.surfaces.http import json_answer
from infra.kafka import partition_of_key
from infra.postgres import DatabaseUnavailable, fetch_within, queries
from schemas.keys import ledger_group
from schemas.topics import USAGE

_WITHIN_S = 1.5
_LONGEST = {"hour": timedelta(days=31), "day": timedelta(days=366)}
_DEFAULT = {"hour": timedelta(days=1), "day": timedelta(days=30)}
_FIRST_YEAR, _LAST_YEAR = 2000, 2999
_KNOWN = ("from", "to", "group", "model", "meter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Hours that start in [since, until), UTC, grouped by "hour" or "day"; None asks for all models or meters."""

    since: datetime
    until: datetime
    group: str
    model: str | None
    meter: str | None


def question(query: Mapping[str, str], *, now: datetime) -> Question:
    """The query string as a question. Raises BadInput naming the parameter at fault."""
    for name in query:
        if name not in _KNOWN:
            raise BadInput(f"{name}: unknown parameter; known are {', '.join(_KNOWN)}", param=name)
    group = query.get("group", "hour")
    if group not in _LONGEST:
        raise BadInput("group: expected 'hour' or 'day'", param="group")
    next_hour = now.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    until = _moment("to", query["to"]) if "to" in query else next_hour
    since = _moment("from", query["from"]) if "from" in query else until - _DEFAULT[group]
    if since >= until:
        raise BadInput(f"from: expected a time before 'to' ({_iso(until)}), found {_iso(since)}", param="from")
    if until - since > _LONGEST[group]:
        raise BadInput(f"from: at most {_LONGEST[group].days} days can be asked for by {group}", param="from")
    for name in ("model", "meter"):
        if "\0" in query.get(name, ""):
            raise BadInput(f"{name}: expected a name, found a NUL character", param=name)
    return Question(since=since, until=until, group=group, model=query.get("model"), meter=query.get("meter"))


def _moment(name: str, text: str) -> datetime:
    try:
        # A '+' that was not escaped arrives as a space.
        moment = datetime.fromisoformat(text.strip().replace(" ", "+").replace("Z", "+00:00"))
    except ValueError:
        moment = None
    if moment is not None and len(text) == len("2026-01-31"):
        moment = moment.replace(tzinfo=timezone.utc)
    if moment is None or moment.tzinfo is None or not _FIRST_YEAR <= moment.year <= _LAST_YEAR:
        raise BadInput(
            f"{name}: expected a date or an ISO 8601 time with its zone, like 2026-01-31 or 2026-01-31T13:00:00Z, "
            f"found '{text[:40]}'",
            param=name,
        )
    return moment.astimezone(timezone.utc)


async def usage(request: web.Request) -> web.Response:
    """`GET /v1/usage?from=&to=&group=hour|day&model=&meter=`."""
    caller = await request.app[GATE].caller(request.headers.get("Authorization"))
    asked = question(request.query, now=datetime.now(timezone.utc))
    pool, statements = request.app[LEDGER], queries("api")
    try:
        # The moment first: rows written after it may be in the answer, but none before it is missing.
        place = ledger_place(request.app[SETTINGS].kafka.namespace, caller.customer_id)
        moved = await fetch_within(pool, _WITHIN_S, statements["ledger_moved_at"], *place)
        rows = await fetch_within(
            pool,
            _WITHIN_S,
            statements[f"usage_by_{asked.group}"],
            caller.customer_id,
            asked.since,
            asked.until,
            asked.model,
            asked.meter,
        )
    except DatabaseUnavailable as error:
        raise Unavailable("usage cannot be read now: the ledger does not answer", code="ledger_away") from error
    totals: dict[str, int] = defaultdict(int)
    for row in rows:
        totals[row["meter"]] += row["quantity"]
    moved_at = moved[0]["at"] if moved else None
    return json_answer(_document(caller.customer_id, asked, rows, totals, moved_at))


def ledger_place(namespace: str, customer_id: str) -> tuple[str, str, int]:
    """Where the ledger notes how far it has read this customer's usage: consumer group, topic, partition."""
    topic = USAGE.in_namespace(namespace)
    return ledger_group(namespace), topic.name, partition_of_key(customer_id.encode(), topic.partitions)


def _document(
    customer_id: str, asked: Question, rows: list[Any], totals: Mapping[str, int], moved_at: datetime | None
) -> dict[str, Any]:
    return {
        "object": "usage",
        "customer": customer_id,
        "from": _iso(asked.since),
        "to": _iso(asked.until),
        "group": asked.group,
        # When the ledger last took in usage from where this customer's lies; null when it never did.
        "ledger_moved_at": _iso(moved_at) if moved_at is not None else None,
        "data": [
            {"start": _iso(r["start"]), "model": r["model"], "meter": r["meter"], "quantity": r["quantity"]}
            for r in rows
        ],
        "totals": dict(sorted(totals.items())),
    }


def _iso(moment: datetime) -> str:
    return moment.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
