"""What the commands about dead letters share: how letters are named and selected, and a word when the log is away."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import click

from infra.arguments import Moment
from infra.away import unanswered
from infra.settings import ReplaySettings, replay_settings
from streams.ledger.dead_letters import Kind
from streams.quarantine.desk import Desk
from streams.quarantine.letters import Place, PlaceError, Selection, topic_named

R = TypeVar("R")


def place_of(text: str, settings: ReplaySettings) -> Place:
    """The place named by an argument, or click's own error."""
    try:
        return Place.parse(text, namespace=settings.kafka.namespace)
    except PlaceError as error:
        raise click.BadParameter(str(error), param_hint="PLACE") from error


def selecting(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command the options that select letters; it is called with `selection`, whose topic is a full name."""

    @click.option("--topic", help="Only letters about this topic: usage, requests.POOL, or its full name.")
    @click.option("--kind", type=click.Choice([k.value for k in Kind]), help="Only letters of this kind.")
    @click.option("--since", type=Moment(), help="Only what was set aside then or later (ISO 8601, UTC).")
    @click.option("--until", type=Moment(), help="Only what was set aside before this time.")
    @functools.wraps(command)
    def call(
        *args: Any, topic: str | None, kind: str | None, since: datetime | None, until: datetime | None, **kwargs: Any
    ) -> R:
        if since is not None and until is not None and since >= until:
            raise click.UsageError(f"--until must lie after --since, found {until.isoformat()}")
        try:
            namespace = replay_settings().kafka.namespace
            name = None if topic is None else topic_named(topic, namespace=namespace).name
        except PlaceError as error:
            raise click.BadParameter(str(error), param_hint="--topic") from error
        return command(*args, selection=Selection(topic=name, kind=kind, since=since, until=until), **kwargs)

    return call


def say_away(desk: Desk) -> None:
    """On standard error, that letters may be missing."""
    if desk.away is not None:
        click.echo(unanswered("Kafka", desk.away, but=", so new letters of workers may be missing"), err=True)
