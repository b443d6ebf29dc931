"""`inferlog verify`: prove the promises, print the figures, exit 0 (all hold), 1 (violated) or 2 (could not check)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

import click

from infra.arguments import Moment, Seconds
from infra.away import unanswered
from infra.kafka import BusUnavailable
from infra.postgres import is_outage
from infra.settings import ReplaySettings, replay_settings
from streams.log import no_progress
from streams.replay.evidence import TopicsMissing
from streams.replay.proofs import Verdict
from streams.replay.verify import NotCaughtUp, Report, wait_for_ledger
from streams.replay.verify import verify as prove

_WORDS = {True: "holds", False: "VIOLATED", None: "could not be checked"}


@click.command(epilog="Example:  inferlog verify --wait --since 2026-03-01T00:00Z --json")
@click.option("--since", type=Moment(), help="Only hours from this one on (ISO 8601, UTC unless it says otherwise).")
@click.option("--wait", is_flag=True, help="First wait until the ledger has passed all usage now on the log.")
@click.option(
    "--wait-timeout",
    "wait_timeout_s",
    type=Seconds(longest_s=7 * 86400),
    default=120,
    show_default=True,
    help="Longest wait in seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as one JSON object.")
def verify(since: datetime | None, wait: bool, wait_timeout_s: float, as_json: bool) -> None:
    """Prove I1 to I4 from the topics and tables alone.

    Exits 0 when all hold, 1 when one is violated, 2 when one could not be checked.
    """
    settings = replay_settings()
    try:
        report = asyncio.run(_run(settings, since, wait_timeout_s if wait else None, quiet=as_json))
    except (TopicsMissing, NotCaughtUp) as error:
        _could_not(str(error), as_json=as_json)
    except BusUnavailable as error:
        _could_not(unanswered("Kafka", error), as_json=as_json)
    except Exception as error:
        if not is_outage(error):
            raise
        _could_not(unanswered("Postgres", error), as_json=as_json)
    else:
        click.echo(json.dumps(_plain(report)) if as_json else _table(report))
        raise SystemExit(report.exit_code)


def _could_not(reason: str, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"holds": None, "reason": reason}))
    click.echo(f"could not check: {reason}", err=True)
    raise SystemExit(2)


async def _run(settings: ReplaySettings, since: datetime | None, wait_s: float | None, *, quiet: bool) -> Report:
    show = not quiet and sys.stderr.isatty()
    if wait_s is not None:
        await wait_for_ledger(settings, timeout_s=wait_s, progress=_say_lag if show else lambda _lag: None)
    return await prove(settings, since=since, progress=_say_read if show else no_progress)


def _say_lag(lag: int) -> None:
    click.echo(f"\r\033[Kwaiting for the ledger: {lag} usage records to go", nl=lag == 0, err=True)


def _say_read(topic: str, done: int, total: int) -> None:
    click.echo(f"\r\033[K{topic}: {done} of {total} records read", nl=done >= total, err=True)


def _plain(report: Report) -> dict[str, object]:
    holds = None if report.exit_code == 2 else report.exit_code == 0
    return {
        "holds": holds,
        "proofs": {v.name: {k: x for k, x in asdict(v).items() if k != "name"} for v in report.verdicts},
        "hours": report.hours,
        "open": report.open_ids,
        "undecodable": dict(report.undecodable),
        "written_off": dict(report.written_off),
        "open_letters": dict(report.open_letters),
    }


def _table(report: Report) -> str:
    lines: list[str] = []
    for v in report.verdicts:
        lines += _verdict_lines(v)
        if v.name == "I4":
            lines += _hour_lines(report.hours)
            if report.open_ids:
                lines.append("    open (the first ones): " + ", ".join(report.open_ids))
        lines.append("")
    lines += [f"{topic}: {count} records do not decode" for topic, count in sorted(report.undecodable.items())]
    lines += [
        f"{topic}: {count} records that do not decode were discarded"
        for topic, count in sorted(report.written_off.items())
    ]
    lines += [
        f"{topic}: {count} dead letters are open; see  inferlog dead-letters list"
        for topic, count in report.open_letters.items()
    ]
    summary = {0: "All promises hold.", 1: "A promise is VIOLATED.", 2: "Not everything could be checked."}
    lines.append(summary[report.exit_code])
    return "\n".join(lines)


def _verdict_lines(v: Verdict) -> list[str]:
    figures = "  ".join(f"{name} {'-' if value is None else value}" for name, value in v.figures.items())
    lines = [f"{v.name}  {v.promise}: {_WORDS[v.holds]}", f"    {figures}"]
    for f in v.findings:
        lines.append(f"    {f.what}: {f.count}")
        lines += [f"        {example}" for example in f.examples]
        if f.count > len(f.examples):
            lines.append(f"        … and {f.count - len(f.examples)} more")
    return lines + [f"    {note}" for note in v.notes]


def _hour_lines(hours: Sequence[dict[str, object]]) -> list[str]:
    if not hours:
        return []
    names = list(hours[0])
    lines = ["    " + f"{names[0]:<18}" + "".join(f"{name:>11}" for name in names[1:])]
    lines += ["    " + f"{row[names[0]]!s:<18}" + "".join(f"{row[name]!s:>11}" for name in names[1:]) for row in hours]
    return lines
