"""The product's own ledger as a contender: a whole worker in one of its modes, on a database of its own."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ledger.watched import faust_worker, program
from benchmarks.ledger.world import World
from infra.postgres import Connection, open_connection
from infra.settings import PostgresSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The running worker, where it logs, and a connection to its tables."""

    process: subprocess.Popen[bytes]
    log: Path
    tables: Connection


@asynccontextmanager
async def running(world: World, mode: str, *, name: str) -> AsyncIterator[Product]:
    """The worker in `mode`, its database and log called by `name`; both are gone, or ended, afterwards.

    The group stands where an earlier contender left it, and the ledger is empty: as after a restore, the ledger moves
    the group back to its own position and reads everything again.
    """
    log = world.home / f"{name}.log"
    async with (
        world.database(name) as env,
        open_connection(PostgresSettings(dsn=env["INFERLOG_POSTGRES_DSN"])) as tables,
    ):
        own = {
            **env,
            "INFERLOG_LEDGER_MODE": mode,
            "INFERLOG_LEDGER_REWIND": "1",
            "INFERLOG_LEDGER_HORIZON_DAYS": "3650",
        }
        async with program(faust_worker("streams.app"), own, log) as process:
            yield Product(process=process, log=log, tables=tables)
