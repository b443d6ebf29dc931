"""The letters in the table, read by selection and in pages: nothing here holds more than one page.

Everything is in the order in which the records were set aside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from infra.postgres import Connection, Record, queries
from streams.quarantine.letters import Evidence, Letter, Place, Selection, State

#: Rows of a summary; past these come kinds of reasons that hardly any letter has.
SUMMARY_ROWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sort:
    """Letters of one topic, state and kind whose reasons are equal but for ids and numbers, which are `#`."""

    topic: str
    state: State
    kind: str | None
    reason: str
    letters: int
    first_seen_at: datetime
    last_seen_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What somebody did with a letter; `accepted` is the kind of the objection that was overruled, if one was."""

    action: str
    outcome: str
    accepted: str | None
    actor: str
    reason: str
    acted_at: datetime


async def page(connection: Connection, selection: Selection, *, after: Place | None, limit: int) -> list[Letter]:
    """The first `limit` letters of the selection that come after the one at `after`, which must be a letter."""
    rows = await connection.fetch(queries("streams.quarantine")["page"], *selection.values(), *_place(after), limit)
    return [_letter(r) for r in rows]


async def evidence(
    connection: Connection, selection: Selection, *, after: Place | None, rows: int, size_bytes: int
) -> list[Evidence]:
    """The same with what is kept of the records: at most `size_bytes` of values, unless the first has more."""
    sql = queries("streams.quarantine")["evidence"]
    found = await connection.fetch(sql, *selection.values(), *_place(after), rows, size_bytes)
    return [_evidence(r) for r in found]


async def count(connection: Connection, selection: Selection) -> int:
    """How many letters a selection has."""
    found: int = await connection.fetchval(queries("streams.quarantine")["counted"], *selection.values())
    return found


async def summary(connection: Connection, selection: Selection) -> list[Sort]:
    """What sorts of letters there are, the most frequent first; at most SUMMARY_ROWS."""
    rows = await connection.fetch(queries("streams.quarantine")["summary"], *selection.values(), SUMMARY_ROWS)
    return [Sort(**{**dict(r), "state": State(r["state"])}) for r in rows]


async def find(connection: Connection, place: Place) -> Evidence | None:
    """The letter of a place; None when there is none."""
    row = await connection.fetchrow(queries("streams.quarantine")["letter"], *_place(place))
    return None if row is None else _evidence(row)


async def actions(connection: Connection, place: Place) -> list[Action]:
    """What was done with a letter, oldest first."""
    rows = await connection.fetch(queries("streams.quarantine")["actions"], *_place(place))
    return [Action(**dict(r)) for r in rows]


def _place(place: Place | None) -> tuple[str | None, int | None, int | None]:
    return (None, None, None) if place is None else (place.topic, place.partition, place.offset)


def _letter(r: Mapping[str, Any] | Record) -> Letter:
    return Letter(
        place=Place(topic=r["topic"], partition=r["partition"], offset=r["offset"]),
        kind=r["kind"],
        state=State(r["state"]),
        reason=r["reason"],
        seen_at=r["seen_at"],
        size_bytes=r["size_bytes"],
    )


def _evidence(r: Mapping[str, Any] | Record) -> Evidence:
    return Evidence(letter=_letter(r), key=r["key"], value=r["value"], value_sha256=r["value_sha256"])
