"""`inferlog provision`: create topics, tables and the bucket, or say how they differ."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import click

from infra import provision as provisioning
from infra.settings import operator_settings
from schemas.topics import DEFAULT_POOL


@click.command(epilog="Example:  inferlog provision --pool default --pool gpu-a --json")
@click.option(
    "--pool", "pools", multiple=True, default=(DEFAULT_POOL,), show_default=True, help="Worker pool to serve."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was done as one JSON object.")
def provision(pools: tuple[str, ...], as_json: bool) -> None:
    """Create topics, tables and the bucket; report drift, never change what holds data.

    Exits 3 when something exists otherwise than declared.
    """
    say = (lambda _line: None) if as_json else click.echo
    done = asyncio.run(provisioning.provision(operator_settings(), pools=pools, progress=say))
    if as_json:
        click.echo(json.dumps(asdict(done)))
    else:
        for d in done.drift:
            click.echo(f"drift: {d.topic} {d.setting}: declared {d.declared}, found {d.found}")
    if done.drift:
        raise SystemExit(3)
