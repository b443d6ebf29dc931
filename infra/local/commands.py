"""`inferlog up`, `down` and `status`: the local stack from the command line.
They only print; what happens is decided in `infra.local.stack`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

import click

from infra.local.part import PartError
from infra.local.stack import PartStatus, Stack, StackError
from infra.settings import home_dir


@click.command(epilog="Example:  inferlog up --services-only && inferlog status")
@click.option("--services-only", is_flag=True, help="Only the servers: no API, worker or Faust worker.")
def up(services_only: bool) -> None:
    """Start the local stack and wait until every part has done a real operation.

    Kafka, PostgreSQL, Valkey, SeaweedFS and a Stripe stand-in, then the API, one CPU worker and one Faust worker, on
    free ports of 127.0.0.1. State lies in $INFERLOG_HOME, else ./.inferlog. What runs and works is left alone.
    """
    stack, began = Stack(home_dir()), time.monotonic()
    try:
        stack.up(services_only=services_only, progress=click.echo)
    except StackError as error:
        for name, why in error.failures.items():
            click.echo(f"\n{name}: {why}", err=True)
        click.echo(
            "\nThe other parts keep running. `inferlog status` shows them, `inferlog up` tries again, "
            "`inferlog down` stops everything.",
            err=True,
        )
        raise SystemExit(1) from None
    except PartError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        click.echo("\nInterrupted; `inferlog down` stops what was started.", err=True)
        raise SystemExit(130) from None
    click.echo(
        f"\n{_table(stack.status())}\n\nup after {time.monotonic() - began:.1f} s; settings: {stack.home}/stack.env"
    )


@click.command(epilog="Example:  inferlog down --wipe")
@click.option("--wipe", is_flag=True, help="Also remove data and logs; addresses and credentials stay.")
def down(wipe: bool) -> None:
    """Stop every part of the local stack within 10 seconds, also what a killed `up` left behind."""
    began = time.monotonic()
    try:
        killed = Stack(home_dir()).down(wipe=wipe, progress=click.echo)
    except PartError as error:
        raise click.ClickException(str(error)) from None
    note = f" ({', '.join(killed)} had to be killed)" if killed else ""
    click.echo(f"down after {time.monotonic() - began:.1f} s{note}")


@click.command(epilog="Example:  inferlog status --json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def status(as_json: bool) -> None:
    """Say for each part: address, pid, healthy, and why not. Exits 0 only when all are healthy."""
    parts = Stack(home_dir()).status()
    if as_json:
        click.echo(json.dumps([{**asdict(part), "log": str(part.log)} for part in parts]))
    elif parts:
        click.echo(_table(parts))
    else:
        click.echo(f"nothing was ever started at {home_dir()}; `inferlog up` starts it")
    if not parts or not all(part.healthy for part in parts):
        raise SystemExit(1)


def _table(parts: Sequence[PartStatus]) -> str:
    rows = [("part", "address", "pid", "healthy", "why not")]
    rows += [(p.name, p.address, str(p.pid or "-"), "yes" if p.healthy else "no", p.why) for p in parts]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    )
