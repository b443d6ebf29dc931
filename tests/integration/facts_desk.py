"""What the tests of facts do from the outside: run commands in this process, read the outbox, break what facts need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import click
from click.testing import CliRunner

from infra.cli import cli
from infra.postgres import Connection, connect
from infra.settings import PostgresSettings
from schemas.codec import decode
from schemas.facts import Fact
from schemas.topics import ADJUSTMENTS, CUSTOMERS, KEYS, MODELS, PRICES, ROUTES
from tests.conftest import run_apart

TOPICS = {topic.name: topic for topic in (MODELS, ROUTES, KEYS, CUSTOMERS, PRICES, ADJUSTMENTS)}
TABLES = (
    "models",
    "model_versions",
    "route_revisions",
    "route_aliases",
    "customers",
    "api_keys",
    "rate_limits",
    "prices",
    "billing_adjustments",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A row of the outbox, decoded."""

    topic: str
    key: str
    fact: Fact


class FactsDesk:
    """One installation's tables."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = dict(env)

    def call(self, *arguments: str, **env: str) -> click.testing.Result:
        """An `inferlog` command in this process."""
        return CliRunner().invoke(cli, arguments, env={**self.env, **env})

    def said(self, *arguments: str, **env: str) -> str:
        """What a command that must succeed printed."""
        result = self.call(*arguments, **env)
        assert result.exit_code == 0, (result.output, result.exception)
        return str(result.stdout)

    async def connect(self) -> Connection:
        return await connect(PostgresSettings(dsn=self.env["INFERLOG_POSTGRES_DSN"]))

    def sql(self, statement: str, *args: Any) -> list[dict[str, Any]]:
        async def run() -> list[dict[str, Any]]:
            connection = await self.connect()
            try:
                return [dict(r) for r in await connection.fetch(statement, *args)]
            finally:
                await connection.close()

        return run_apart(run())

    def told(self) -> list[Told]:
        """Every fact of a command that waits to be published, in order; not those about older rows."""
        rows = self.sql("SELECT topic, key, value, headers FROM outbox WHERE position > 0 ORDER BY position")
        return [
            Told(topic=r["topic"], key=r["key"].decode(), fact=decode(r["value"], TOPICS[r["topic"]].record))  # type: ignore[arg-type]
            for r in rows
        ]

    def tables(self) -> dict[str, list[Any]]:
        """The rows of everything that commands change."""
        return {name: sorted(str(sorted(row.items())) for row in self.sql(f"SELECT * FROM {name}")) for name in TABLES}


def what(fact: Fact) -> dict[str, Any]:
    """A fact without what is new every time."""
    return {f.name: getattr(fact, f.name) for f in fields(fact) if f.name not in ("event_id", "occurred_at")}
