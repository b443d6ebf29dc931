"""`inferlog dead-letters redrive|discard`: count what can be counted now, or decide that it stays uncounted."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import click

from infra.actor import Author, authored
from infra.settings import replay_settings
from schemas.topics import USAGE
from streams.ledger.dead_letters import Kind
from streams.quarantine import shelf
from streams.quarantine.desk import Desk, Work, open_desk
from streams.quarantine.letters import Place, Selection
from streams.quarantine.options import place_of, say_away, selecting
from streams.quarantine.recount import MAY_ACCEPT
from streams.quarantine.rendering import OUTCOME_WORDS, outcome_line, plain_settled, shown
from streams.quarantine.settling import Outcome, Settled

R = TypeVar("R")

_SHOWN: Final = 10
_EXIT_REFUSED: Final = 3
_PROGRESS_AFTER_S: Final = 1.0


@dataclass(slots=True, kw_only=True)
class Done:
    """What came of all letters: counts, and the first that were not settled by this."""

    counts: Counter[Outcome] = field(default_factory=Counter)
    first: list[Settled] = field(default_factory=list)

    def add(self, settled: Sequence[Settled]) -> None:
        """Note a slice."""
        self.counts.update(s.outcome for s in settled)
        unusual = [s for s in settled if s.why is not None]
        self.first += unusual[: max(0, _SHOWN - len(self.first))]


def settling(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command PLACE, --all with its selection, and the options of every change."""

    @click.argument("place", required=False)
    @click.option("--all", "every", is_flag=True, help="All open letters, or those that the options below select.")
    @selecting
    @click.option("--dry-run", "dry", is_flag=True, help="Say what would come of it, and change nothing.")
    @click.option("--yes", is_flag=True, help="Do not ask.")
    @authored()
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    @functools.wraps(command)
    def call(*args: Any, place: str | None, every: bool, selection: Selection, by: Author, dry: bool, **kw: Any) -> R:
        if (place is None) != every:
            raise click.UsageError("give a PLACE like usage/3/41, or --all; see  inferlog dead-letters list")
        if place is not None and selection != Selection():
            raise click.UsageError("--topic, --kind, --since and --until select among --all; PLACE is one letter")
        if dry:
            by = replace(by, reason="dry run")  # taken back with everything else
        elif by.reason is None:
            raise click.UsageError("--reason is missing: say why, in your words; it is kept with the letter")
        settings = replay_settings()
        target = selection if place is None else place_of(place, settings)
        return command(*args, target=target, by=by, dry=dry, **kw)

    return call


@click.command(
    "redrive", epilog="Example:  inferlog dead-letters redrive --all --kind unknown_schema --reason upgraded"
)
@settling
@click.option(
    "--accept",
    type=click.Choice([k.value for k in MAY_ACCEPT]),
    multiple=True,
    help="Count it although the ledger objects to its time; needs a PLACE or --kind of the same name.",
)
def redrive_command(
    target: Place | Selection, by: Author, dry: bool, yes: bool, as_json: bool, accept: tuple[str, ...]
) -> None:
    """Count the record of PLACE, or of all letters about usage, if today's ledger takes it; what it refuses stays.

    May be repeated, by anybody, at any time: a request is counted once. Exits 3 when a letter was refused.
    """
    if isinstance(target, Selection) and any(target.kind != a for a in accept):
        raise click.UsageError("--accept with --all needs --kind of the same name, so that nothing else slips through")
    if isinstance(target, Selection) and target.topic is None:
        target = replace(target, topic=USAGE.in_namespace(replay_settings().kafka.namespace).name)
    _run(target, Work(by=by, accept=[Kind(a) for a in accept], dry=dry), yes=yes, as_json=as_json)


@click.command("discard", epilog='Example:  inferlog dead-letters discard usage/3/41 --reason "a stranger wrote it"')
@settling
def discard_command(target: Place | Selection, by: Author, dry: bool, yes: bool, as_json: bool) -> None:
    """Decide that the record of PLACE, or of all letters, stays uncounted. The letter and its bytes are kept.

    A discarded letter can still be redriven by its place; a redriven one cannot be discarded. Exits 3 when a letter was
    redriven before.
    """
    _run(target, Work(by=by, discarding=True, dry=dry), yes=yes, as_json=as_json)


def _run(target: Place | Selection, work: Work, *, yes: bool, as_json: bool) -> None:
    done, namespace = asyncio.run(_settle(target, work, ask=not (yes or work.dry) and sys.stdin.isatty()))
    if as_json:
        first = [plain_settled(s, namespace=namespace) for s in done.first]
        counts = {o.value: done.counts[o] for o in Outcome}
        click.echo(json.dumps({"dry_run": work.dry, "counts": counts, "first": first}))
    else:
        click.echo(outcome_line(done.counts, dry=work.dry))
        for s in done.first:
            words = OUTCOME_WORDS[s.outcome]
            click.echo(f"  {s.place.short(namespace=namespace)} {words}: {shown(s.why or '')}")
        more = done.counts[Outcome.REFUSED] + done.counts[Outcome.SETTLED_BEFORE] - len(done.first)
        if more > 0:
            click.echo(f"  … and {more} more; see  inferlog dead-letters list")
    if done.counts[Outcome.REFUSED]:
        raise SystemExit(_EXIT_REFUSED)


async def _settle(target: Place | Selection, work: Work, *, ask: bool) -> tuple[Done, str]:
    done = Done()
    async with open_desk(replay_settings()) as desk:
        say_away(desk)
        if isinstance(target, Place):
            found = await shelf.find(desk.connection, target)
            if found is None:
                short = target.short(namespace=desk.namespace)
                raise click.ClickException(f"there is no dead letter {short}; see  inferlog dead-letters list")
            _confirm(1, work, ask=ask)
            done.add(await desk.settle_one(found, work))
        else:
            total = await shelf.count(desk.connection, target)
            if total:
                _confirm(total, work, ask=ask)
            await _settle_all(desk, target, work, total, done)
        return done, desk.namespace


async def _settle_all(desk: Desk, target: Selection, work: Work, total: int, done: Done) -> None:
    began = time.monotonic()
    told = False
    slices: AsyncIterator[list[Settled]] = desk.settle_all(target, work)
    async for settled in slices:
        done.add(settled)
        if sys.stderr.isatty() and time.monotonic() - began > _PROGRESS_AFTER_S:
            told = True
            click.echo(f"\r\033[K{done.counts.total()} of {total} letters", nl=False, err=True)
    if told:
        click.echo("", err=True)


def _confirm(letters: int, work: Work, *, ask: bool) -> None:
    if ask:
        verb = "Discard" if work.discarding else "Redrive"
        # Standard output is for what comes of it.
        click.confirm(f"{verb} {letters} dead letter{'' if letters == 1 else 's'}?", abort=True, err=True)
