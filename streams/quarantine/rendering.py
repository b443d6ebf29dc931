"""Letters as lines for people and as values for JSON.

Pure. Records are strangers' bytes: whatever a terminal would obey in them is shown, never sent.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any, Final

from schemas.codec import DecodeError, decode
from schemas.facts import RECORD_TYPES, Record
from schemas.plain import to_plain
from streams.quarantine.letters import Evidence, Letter
from streams.quarantine.settling import Outcome, Settled
from streams.quarantine.shelf import Action, Sort

_REASON_CHARS: Final = 100
_ROW_BYTES: Final = 16


def shown(text: str) -> str:
    """The text with everything that does not print as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def stamp(moment: datetime) -> str:
    """ISO 8601 in UTC, to the second."""
    return f"{moment.astimezone(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def size(size_bytes: int | None) -> str:
    """A length for people; `-` when there is none."""
    if size_bytes is None:
        return "-"
    if size_bytes < 10_000:
        return f"{size_bytes} B"
    return f"{size_bytes / 1000:.0f} kB" if size_bytes < 1_000_000 else f"{size_bytes / 1_000_000:.1f} MB"


def letter_lines(letters: Sequence[Letter], *, namespace: str, with_state: bool) -> list[str]:
    """A table, one letter a line, reasons cut."""
    names = ["set aside at", "place", *(["state"] if with_state else []), "kind", "size", "reason"]
    rows = [
        [
            stamp(x.seen_at),
            x.place.short(namespace=namespace),
            *([x.state.value] if with_state else []),
            x.kind or "-",
            size(x.size_bytes),
            _cut(x.reason),
        ]
        for x in letters
    ]
    return columns([names, *rows])


def sort_lines(sorts: Sequence[Sort], *, with_state: bool) -> list[str]:
    """A table of how many letters there are of each sort."""
    names = ["letters", "topic", *(["state"] if with_state else []), "kind", "first", "last", "reason"]
    rows = [
        [
            f"{s.letters}",
            s.topic,
            *([s.state.value] if with_state else []),
            s.kind or "-",
            stamp(s.first_seen_at),
            stamp(s.last_seen_at),
            _cut(s.reason),
        ]
        for s in sorts
    ]
    return columns([names, *rows])


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of one length, aligned; the last column is as wide as it is."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return ["  ".join([*(c.ljust(w) for c, w in zip(row[:-1], widths, strict=True)), row[-1]]) for row in rows]


def _cut(reason: str) -> str:
    text = shown(reason)
    return text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 1] + "…"


def hex_lines(data: bytes, *, limit: int) -> list[str]:
    """The first `limit` bytes, 16 a line, with what of them is text; then how many are left."""
    lines = []
    for at in range(0, min(len(data), limit), _ROW_BYTES):
        row = data[at : min(at + _ROW_BYTES, limit)]
        text = "".join(chr(b) if 0x20 <= b < 0x7F else "." for b in row)
        lines.append(f"{at:08x}  {row.hex(' '):<{_ROW_BYTES * 3 - 1}}  {text}")
    if len(data) > limit:
        lines.append(f"… and {len(data) - limit} more bytes")
    return lines


def decoded(value: bytes | None, *, expected: type[Record]) -> tuple[Record | None, str | None]:
    """What the bytes say, and why they are no record of the expected kind; another kind of record is shown too."""
    why: str | None = None
    for kind in (expected, *(k for k in RECORD_TYPES if k is not expected)):
        try:
            return decode(value, kind), why
        except DecodeError as error:
            why = why or error.reason
    return None, why


def record_lines(record: Record) -> list[str]:
    """The record's fields, as JSON of several lines."""
    text = json.dumps(to_plain(record), indent=2, ensure_ascii=False)
    return [type(record).__name__, *(shown(line) for line in text.splitlines())]


def action_line(action: Action) -> str:
    """Who did what, when and why."""
    how = "" if action.outcome == action.action else f" ({action.outcome.replace('_', ' ')})"
    over = f", overruling '{action.accepted}'" if action.accepted else ""
    said = f"{shown(action.actor)}: {shown(action.reason)}"
    return f"{action.action}{how} at {stamp(action.acted_at)}{over} by {said}"


def plain_letter(letter: Letter, *, namespace: str) -> dict[str, Any]:
    """A letter in the values JSON has."""
    return {
        "place": letter.place.short(namespace=namespace),
        **asdict(letter.place),
        "kind": letter.kind,
        "state": letter.state.value,
        "reason": letter.reason,
        "seen_at": to_plain(letter.seen_at),
        "size_bytes": letter.size_bytes,
    }


def plain_evidence(evidence: Evidence, *, namespace: str) -> dict[str, Any]:
    """A letter with its bytes in base64."""
    return {
        **plain_letter(evidence.letter, namespace=namespace),
        "key": _base64(evidence.key),
        "value": _base64(evidence.value),
        "value_sha256": evidence.value_sha256,
    }


def plain(one: Sort | Action) -> dict[str, Any]:
    """A line of a summary or an action."""
    return {name: to_plain(value) for name, value in asdict(one).items()}


def plain_settled(settled: Settled, *, namespace: str) -> dict[str, Any]:
    """What came of a letter."""
    return {
        "place": settled.place.short(namespace=namespace),
        "outcome": settled.outcome.value,
        "accepted": to_plain(settled.accepted),
        "why": settled.why,
    }


#: What is said of so many letters.
OUTCOME_WORDS: Final[Mapping[Outcome, str]] = {
    Outcome.COUNTED: "counted",
    Outcome.ALREADY_COUNTED: "already counted",
    Outcome.DISCARDED: "discarded",
    Outcome.SETTLED_BEFORE: "settled before",
    Outcome.REFUSED: "refused",
}


def outcome_line(counts: Mapping[Outcome, int], *, dry: bool) -> str:
    """How many letters came to what."""
    parts = [f"{counts[o]} {words}" for o, words in OUTCOME_WORDS.items() if counts.get(o)]
    return f"{'would be: ' if dry else ''}{', '.join(parts) or 'no letters'}"


def _base64(data: bytes | None) -> str | None:
    return None if data is None else b64encode(data).decode()
