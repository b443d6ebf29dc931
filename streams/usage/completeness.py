"""What is said of how complete sums are: to machines as times, to people in sentences. Pure."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

from infra.periods import shown
from streams.usage.lines import Completeness

#: A ledger that runs says so every other second.
_SILENT: Final = timedelta(seconds=30)


def said_of(complete: Completeness, zone: ZoneInfo, *, waiting: int | None) -> dict[str, Any]:
    """Times as the zone's clocks show them; null is not known. `waiting_records` are on the log and not counted."""
    return {
        "complete_until": None if complete.until is None else shown(complete.until, zone),
        "ledger_seen_at": None if complete.seen_at is None else shown(complete.seen_at, zone),
        "as_of": shown(complete.as_of, zone),
        "waiting_records": waiting,
    }


def remarks(complete: Completeness, zone: ZoneInfo, *, waiting: int | None) -> list[str]:
    """Up to when the sums are complete, who says so, and what may still come."""
    found = []
    if complete.until is None or complete.seen_at is None:
        found.append("complete up to: unknown, no ledger has told it yet; see  inferlog status")
    else:
        age = complete.as_of - complete.seen_at
        found.append(f"complete up to {shown(complete.until, zone)}, by the ledger's word of {_words(age)} ago")
        if age > _SILENT:
            found.append("the ledger says nothing since: it does not run, or a server is away; see  inferlog status")
    if waiting is None:
        found.append("how many usage records wait to be counted is not known: the log cannot be reached")
    elif waiting:
        found.append(f"{waiting} usage records are waiting to be counted")
    return found


def _words(age: timedelta) -> str:
    seconds = max(0, int(age.total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
