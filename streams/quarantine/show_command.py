"""`inferlog dead-letters show`: one letter with all that is known of its record, or any other record of the log."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import click

from infra.away import unanswered
from infra.kafka import BusUnavailable
from infra.settings import ReplaySettings, replay_settings
from schemas.facts import Record
from schemas.plain import to_plain
from streams.log import LogRecord
from streams.quarantine import shelf
from streams.quarantine.desk import open_desk
from streams.quarantine.letters import Evidence, Place, topic_named
from streams.quarantine.options import place_of
from streams.quarantine.rendering import (
    action_line,
    decoded,
    hex_lines,
    plain,
    plain_evidence,
    record_lines,
    shown,
    size,
    stamp,
)
from streams.quarantine.shelf import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is known of a place: its letter, what was done with it, and the record that the log has there now.

    `away` says why the log could not be asked.
    """

    place: Place
    namespace: str
    evidence: Evidence | None
    actions: list[Action]
    entry: LogRecord | None
    away: str | None

    @property
    def value(self) -> bytes | None:
        """The record's bytes: the letter's, or the log's where the letter left them out or there is no letter."""
        if self.evidence is not None and self.evidence.value_sha256 is None:
            return self.evidence.value
        return None if self.entry is None else self.entry.value

    @property
    def key(self) -> bytes | None:
        """The record's key."""
        if self.evidence is not None:
            return self.evidence.key
        return None if self.entry is None else self.entry.key

    def decoded(self) -> tuple[Record | None, str | None]:
        """What it says, and why it is not what its topic holds."""
        expected = topic_named(self.place.topic, namespace=self.namespace).record
        return decoded(self.value, expected=expected)


@click.command("show", epilog="Example:  inferlog dead-letters show usage/3/41 --bytes 1024")
@click.argument("place")
@click.option(
    "--bytes", "limit_bytes", type=click.IntRange(0, 2**25), default=256, show_default=True, help="How many to show."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; bytes are whole, in base64.")
def show_command(place: str, limit_bytes: int, as_json: bool) -> None:
    """Show the letter of PLACE with its record; without a letter, the record that the log has there.

    Exits 1 when there is neither.
    """
    settings = replay_settings()
    found = asyncio.run(_find(settings, place_of(place, settings)))
    if found.evidence is None and found.entry is None:
        why = f": {unanswered('Kafka', found.away)}" if found.away else ""
        raise click.ClickException(f"{place}: there is no dead letter, and no record on the log{why}")
    click.echo(json.dumps(_plain(found)) if as_json else "\n".join(_lines(found, limit_bytes)))


async def _find(settings: ReplaySettings, place: Place) -> Found:
    async with open_desk(settings) as desk:
        entry: LogRecord | None = None
        away = desk.away
        try:
            entry = await desk.read(place)
        except BusUnavailable as error:
            away = str(error)
        return Found(
            place=place,
            namespace=desk.namespace,
            evidence=await shelf.find(desk.connection, place),
            actions=await shelf.actions(desk.connection, place),
            entry=entry,
            away=away,
        )


def _on_log(found: Found) -> str:
    if found.away:
        return f"unknown, {unanswered('Kafka', found.away)}"
    if found.entry is None:
        return "no longer there"
    return f"still there, written at {stamp(found.entry.time)}"


def _plain(found: Found) -> dict[str, Any]:
    record, why = found.decoded()
    entry = found.entry
    return {
        "letter": None if found.evidence is None else plain_evidence(found.evidence, namespace=found.namespace),
        "actions": [plain(a) for a in found.actions],
        "on_log": None if entry is None else {"time": to_plain(entry.time), **_bytes_of(entry)},
        "decoded": None if record is None else {"record": type(record).__name__, "fields": to_plain(record)},
        "not_decoded_because": why,
    }


def _bytes_of(entry: LogRecord) -> dict[str, Any]:
    return {"key": to_plain(entry.key), "value": to_plain(entry.value)}


def _lines(found: Found, limit_bytes: int) -> list[str]:
    p = found.place
    lines = [f"{p.short(namespace=found.namespace)}: {p.topic} partition {p.partition} offset {p.offset}"]
    if found.evidence is None:
        lines.append("  letter    none: this record was not set aside")
    else:
        x = found.evidence.letter
        lines += [
            f"  state     {x.state.value}",
            f"  kind      {x.kind or '-'}",
            f"  reason    {shown(x.reason)}",
            f"  set aside {stamp(x.seen_at)}",
        ]
    lines += [f"  action    {action_line(a)}" for a in found.actions]
    lines.append(f"  log       {_on_log(found)}")
    lines += [f"  key       {line}" for line in hex_lines(found.key or b"", limit=64)] or [
        f"  key       {'none' if found.key is None else 'empty'}"
    ]
    return lines + _value_lines(found, limit_bytes)


def _value_lines(found: Found, limit_bytes: int) -> list[str]:
    digest = None if found.evidence is None else found.evidence.value_sha256
    lines = []
    if digest is not None and found.evidence is not None:
        length = size(found.evidence.letter.size_bytes)
        lines.append(f"  value     {length}, too large for the letter, sha256 {digest}")
    if found.value is None:
        return lines or ["  value     none"]
    if digest is None:
        lines.append(f"  value     {size(len(found.value))}")
    lines += [f"    {line}" for line in hex_lines(found.value, limit=limit_bytes)]
    record, why = found.decoded()
    if why is not None:
        lines.append(f"  decoded   not as this topic's record: {shown(why)}")
    if record is not None:
        name, *rest = record_lines(record)
        lines += [f"  decoded   {name}", *(f"    {line}" for line in rest)]
    return lines
