"""What a customer used: its own hours from the ledger, in periods of any zone, and up to which time they are complete.

A page of lines comes with the totals of the whole range, both of one moment, as JSON or CSV.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any, Final

import orjson
from aiohttp import web

from api.errors import Unavailable
from api.services import GATE, LEDGER, SETTINGS
from api.surfaces.http import json_answer
from api.usage_question import FILTERS, GROUPS, Place, Question, question
from infra.kafka import partition_of_key
from infra.periods import RULE, shown
from infra.postgres import DatabaseUnavailable, Pool, fetch_within, queries
from schemas.keys import ledger_group
from schemas.topics import USAGE

#: A statement that takes longer is ended at the server, too.
_WITHIN_S: Final = 1.5
_COLUMNS: Final = ("start", "end", *GROUPS, "meter", "quantity")
_LARGEST: Final = 2**63 - 1
#: What is complete moves on by itself, so an answer is worth nothing a moment later; and it is nobody else's.
_HEADERS: Final = {"Cache-Control": "private, no-store"}


async def usage(request: web.Request) -> web.Response:
    """`GET /v1/usage`; the query string is described in `api.usage_question` and docs/usage.md."""
    caller = await request.app[GATE].caller(request.headers.get("Authorization"), "usage")
    asked = question(request.query, now=datetime.now(timezone.utc))
    try:
        # The watermark first: rows written after it may be in the answer, but none before it is missing.
        place = ledger_place(request.app[SETTINGS].kafka.namespace, caller.customer_id)
        (mark,) = await fetch_within(request.app[LEDGER], _WITHIN_S, queries("api.surfaces")["usage_watermark"], *place)
        rows = await _rows(request.app[LEDGER], caller.customer_id, asked)
    except DatabaseUnavailable as error:
        words = "usage cannot be read now: the ledger does not answer in time; a shorter range takes less"
        raise Unavailable(words, code="ledger_away") from error
    totals = {row["meter"]: row["quantity"] for row in rows if row["period"] == 0}
    lines = [row for row in rows if row["period"] > 0]
    more = len(lines) > asked.limit
    lines = lines[: asked.limit]
    following = f"{request.path}?{asked.page_after(_place(lines[-1], asked))}" if more else None
    if asked.format == "csv":
        return _csv(asked, lines, mark, following)
    head = {"object": "usage", "customer": caller.customer_id, **_said(asked), **_completeness(asked, mark)}
    data = [_line(row, asked) for row in lines]
    sums = {meter: _number(quantity) for meter, quantity in totals.items()}
    return json_answer({**head, "data": data, "totals": sums, "next": following}, headers=_HEADERS)


async def _rows(pool: Pool, customer_id: str, asked: Question) -> list[Any]:
    """The lines of the page and one more if there is one, and the totals as lines of period 0."""
    after = ("", "", "", "") if asked.after is None else asked.after.values
    return await fetch_within(
        pool,
        _WITHIN_S,
        queries("api.surfaces")["usage"],
        customer_id,
        asked.starts,
        asked.until,
        asked.by,
        *(asked.filters[name] for name in FILTERS),
        asked.first_period() + 1,  # Postgres counts periods from 1
        *after,
        asked.limit + 1,
    )


def ledger_place(namespace: str, customer_id: str) -> tuple[str, str, int]:
    """Where the ledger notes how far this customer's usage is complete: consumer group, topic, partition."""
    topic = USAGE.in_namespace(namespace)
    return ledger_group(namespace), topic.name, partition_of_key(customer_id.encode(), topic.partitions)


def _place(row: Mapping[str, Any], asked: Question) -> Place:
    values = (row["model"], row["version"], row["price_id"], row["meter"])
    return Place(start=asked.starts[row["period"] - 1], values=values)


def _said(asked: Question) -> dict[str, Any]:
    """The question as it was understood, and the rule by which hours belong to periods."""
    return {
        "from": shown(asked.since, asked.zone),
        "to": shown(asked.until, asked.zone),
        "interval": asked.interval,
        "zone": asked.zone.key,
        "by": [*asked.by, "meter"],
        "rule": RULE,
    }


def _completeness(asked: Question, mark: Mapping[str, Any]) -> dict[str, str | None]:
    """`complete_until`: null when no ledger has said; `ledger_seen_at`: when one last did; `as_of`: now."""
    names = {"complete_until": "complete_until", "ledger_seen_at": "seen_at", "as_of": "as_of"}
    return {name: None if (at := mark[key]) is None else shown(at, asked.zone) for name, key in names.items()}


def _line(row: Mapping[str, Any], asked: Question) -> dict[str, Any]:
    period = row["period"] - 1
    span = {"start": shown(asked.starts[period], asked.zone), "end": shown(asked.end_of(period), asked.zone)}
    groups = {name: row[name] for name in asked.by}
    return {**span, **groups, "meter": row["meter"], "quantity": _number(row["quantity"])}


def _number(quantity: Decimal) -> int | orjson.Fragment:
    """A sum as JSON's number, whatever its size."""
    return int(quantity) if quantity <= _LARGEST else orjson.Fragment(str(int(quantity)))


def _csv(asked: Question, lines: Sequence[Any], mark: Mapping[str, Any], following: str | None) -> web.Response:
    """RFC 4180: always the same columns, empty where not asked for; what is beside the lines is in headers."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(_COLUMNS)
    for row in lines:
        period = row["period"] - 1
        span = (shown(asked.starts[period], asked.zone), shown(asked.end_of(period), asked.zone))
        writer.writerow([*span, *(row[name] for name in GROUPS), row["meter"], int(row["quantity"])])
    headers = {f"x-{name.replace('_', '-')}": at or "unknown" for name, at in _completeness(asked, mark).items()}
    if following is not None:
        headers["Link"] = f'<{following}>; rel="next"'
    return web.Response(
        body=out.getvalue().encode(),
        headers={**_HEADERS, **headers, "Content-Type": "text/csv; charset=utf-8; header=present"},
    )
