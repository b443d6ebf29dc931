"""`inferlog api`: run a gateway."""

from __future__ import annotations

import click

from infra.settings import api_settings


@click.command(epilog="Example:  inferlog api --check && inferlog api")
@click.option("--check", is_flag=True, help="Check the settings, say where it would listen, and exit.")
def api(check: bool) -> None:
    """Run the API gateway in the foreground."""
    if check:
        settings = api_settings()
        click.echo(f"settings are fine; would listen on http://{settings.host}:{settings.port}")
        return
    from api.__main__ import main

    raise SystemExit(main())
