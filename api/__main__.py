"""`python -m api`: one gateway process in the foreground."""

from __future__ import annotations

import sys

import uvloop

from api.app import serve
from infra.settings import SettingsError, api_settings
from infra.telemetry import configure_logging


def main() -> int:
    """Run until asked to stop. Exit status 2 when a setting is missing or the port is taken."""
    configure_logging()
    try:
        uvloop.run(serve(api_settings()))
    except (SettingsError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)  # noqa: T201 (before and after the logs)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
