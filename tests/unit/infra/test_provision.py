"""Migrations are applied in order, each with the digest of its text, and their files are read once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from infra import provision as provisioning
from infra.postgres import queries
from infra.provision import migrate, migrations
from infra.settings import PostgresSettings


class Database:
    """A new one; it notes what is executed in it."""

    def __init__(self) -> None:
        self.executed: list[tuple[Any, ...]] = []

    async def execute(self, statement: str, *args: Any) -> None:
        self.executed.append((statement, *args))

    async def fetchval(self, statement: str, *args: Any) -> Any:
        return sha256(args[0].encode()).hexdigest() if statement == queries("infra")["text_digest"] else None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        yield


async def test_all_are_applied_in_order_and_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database()

    @asynccontextmanager
    async def opened(_settings: object, **_options: object) -> AsyncIterator[Database]:
        yield database

    reads: list[str] = []
    read_text = Path.read_text

    def reading(path: Path, *args: Any, **options: Any) -> str:
        reads.append(path.name)
        return read_text(path, *args, **options)

    queries("infra")
    migrations.cache_clear()
    monkeypatch.setattr(provisioning, "open_connection", opened)
    monkeypatch.setattr(Path, "read_text", reading)
    applied = await migrate(PostgresSettings(dsn="postgresql://x"))
    assert applied == sorted(reads) == list(migrations()), "each file once"
    add = queries("infra")["migration_add"]
    pairs = [
        call
        for name, text in migrations().items()
        for call in ((text,), (add, name, sha256(text.encode()).hexdigest()))
    ]
    assert database.executed[2:] == pairs
