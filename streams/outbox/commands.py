"""`inferlog outbox list|relay`: what waits to be published and why, and a relay in the foreground."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import click

from infra.away import unanswered
from infra.kafka import BusUnavailable
from infra.kafka_admin import open_admin
from infra.postgres import connect, queries
from infra.settings import KafkaSettings, ReplaySettings, replay_settings
from infra.telemetry import configure_logging
from infra.turns import Turn
from schemas.keys import prefixed
from schemas.topics import all_topics
from streams.outbox.backfill import Untold, untold
from streams.outbox.relay import Relay

_NO_RELAY = "no relay runs; start the ledger (faust -A streams.app worker) or  inferlog outbox relay"
_OVERHEAD_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingTopic:
    """Facts that wait for one topic; `problem` says what hinders them, None when nothing that can be seen from here."""

    topic: str
    waiting: int
    oldest_at: datetime
    oldest_age_s: float
    problem: str | None

    def plain(self) -> dict[str, Any]:
        """The line with its time as ISO 8601 text."""
        return asdict(self) | {"oldest_at": self.oldest_at.astimezone(timezone.utc).isoformat()}


@click.group(epilog="Example:  inferlog outbox list && inferlog outbox relay")
def outbox() -> None:
    """Show and publish the changes that wait to become records."""


@outbox.command(name="list", epilog="Example:  inferlog outbox list --json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the relay and the waiting topics.")
def list_(as_json: bool) -> None:
    """Show which facts wait to be published, since when, and what hinders them."""
    relay, lines, passed_over = asyncio.run(_read(replay_settings()))
    if as_json:
        topics = [line.plain() for line in lines]
        click.echo(json.dumps({"relay": relay, "topics": topics, "untold": passed_over.plain()}))
        return
    click.echo(
        _NO_RELAY if relay is None else f"a relay is active since {relay['since']} (Postgres session {relay['pid']})"
    )
    if not lines:
        click.echo("nothing waits")
    for line in lines:
        click.echo(f"{line.topic}: {line.waiting} waiting, the oldest for {line.oldest_age_s:.0f} s")
        if line.problem is not None:
            click.echo(f"  {line.problem}")
    if passed_over.count:
        click.echo(
            f"{passed_over.count} rows older than the outbox have no fact; mend and change them by a command, then"
        )
        click.echo("remove them from the table outbox_untold:")
        for row in passed_over.first:
            click.echo(f"  {row}")


@outbox.command(epilog="Example:  inferlog outbox relay")
def relay() -> None:
    """Run a relay in the foreground until Ctrl-C or SIGTERM; beside the ledger's it stands by."""
    configure_logging()
    asyncio.run(_relay(replay_settings()))


async def _relay(settings: ReplaySettings) -> None:
    task = asyncio.ensure_future(Relay(settings.kafka, settings.postgres).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


async def _read(settings: ReplaySettings) -> tuple[dict[str, Any] | None, list[WaitingTopic], Untold]:
    sql = queries("infra")
    connection = await connect(settings.postgres)
    try:
        session = await connection.fetchrow(sql["outbox_relay_session"], Turn.RELAY)
        rows = await connection.fetch(sql["outbox_standing"])
        passed_over = await untold(connection)
    finally:
        await connection.close(timeout=5)
    relay = (
        None
        if session is None
        else {
            "pid": session["pid"],
            "client": session["client"],
            "since": session["backend_start"].astimezone(timezone.utc).isoformat(timespec="seconds"),
        }
    )
    there = await _topics(settings.kafka, [r["topic"] for r in rows])
    largest = {t.name: t.max_message_bytes for t in all_topics()}
    now = datetime.now(timezone.utc)
    waiting = [
        WaitingTopic(
            topic=r["topic"],
            waiting=r["waiting"],
            oldest_at=r["oldest_at"],
            oldest_age_s=(now - r["oldest_at"]).total_seconds(),
            problem=problem(
                r["topic"],
                r["first_size_bytes"],
                relayed=relay is not None,
                there=there,
                max_message_bytes=largest.get(r["topic"]),
            ),
        )
        for r in rows
    ]
    return relay, waiting, passed_over


async def _topics(settings: KafkaSettings, topics: Sequence[str]) -> Mapping[str, bool] | str:
    """Which of these exist, or why that cannot be told."""
    try:
        async with open_admin(settings) as admin:
            found = await admin.partitions([prefixed(settings.namespace, t) for t in topics])
    except BusUnavailable as error:
        return str(error)
    return {t: prefixed(settings.namespace, t) in found for t in topics}


def problem(
    topic: str,
    first_size_bytes: int,
    *,
    relayed: bool,
    there: Mapping[str, bool] | str,
    max_message_bytes: int | None,
) -> str | None:
    """What hinders the first fact of a topic, as far as it shows from outside the relay."""
    if isinstance(there, str):
        return unanswered("Kafka", there)
    if not there.get(topic, False):
        return "the topic does not exist; create it:  inferlog provision"
    if max_message_bytes is not None and first_size_bytes + _OVERHEAD_BYTES > max_message_bytes:
        return (
            f"the first fact has {first_size_bytes} bytes, and the topic takes records of {max_message_bytes} at most"
        )
    return None if relayed else _NO_RELAY
