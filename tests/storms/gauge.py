"""How far the ledger is, as its own table says, and a line of it every few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from infra.postgres import is_outage, open_connection
from infra.settings import PostgresSettings

EVERY_S = 10.0
#: Other topics have their rows there, too.
REACHED = "SELECT coalesce(sum(next_offset), 0)::bigint FROM consumer_offsets WHERE topic LIKE '%inference.usage.v1'"


class Gauge:
    """`records` is where the ledger was last seen, all partitions together; `fastest_per_s` between two looks."""

    def __init__(self, settings: PostgresSettings) -> None:
        self._settings = settings
        self._seen_at_s = 0.0
        self.records = 0
        self.fastest_per_s = 0.0

    async def look(self) -> bool:
        """Read the positions; False when PostgreSQL does not answer."""
        try:
            async with open_connection(self._settings, command_timeout_s=5) as connection:
                found = await connection.fetchval(REACHED)
        except Exception as error:
            if not is_outage(error):
                raise
            return False
        now = asyncio.get_running_loop().time()
        if self._seen_at_s and now - self._seen_at_s >= EVERY_S / 2:
            self.fastest_per_s = max(self.fastest_per_s, (found - self.records) / (now - self._seen_at_s))
        self.records, self._seen_at_s = found, now
        return True

    async def report(self, say: Callable[[str], None], about: Callable[[], str]) -> None:
        """For ever: a line with the ledger's position and what else there is to say."""
        while True:
            answered = await self.look()
            say(f"ledger at {self.records:,}{'' if answered else ' when last seen'}, {about()}")
            await asyncio.sleep(EVERY_S)
