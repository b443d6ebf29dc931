"""`python -m streams.billing`: the reporter in the foreground, until SIGTERM."""

from __future__ import annotations

import asyncio

from infra.settings import billing_settings
from infra.telemetry import configure_logging
from streams.billing import app
from streams.billing.outcome import PassReport

if __name__ == "__main__":
    configure_logging()

    def ignore(report: PassReport) -> None:
        """Passes log what matters themselves."""

    asyncio.run(app.run(billing_settings(), include_open_hours=False, each=ignore))
