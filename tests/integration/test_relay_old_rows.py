"""Rows older than the outbox: each is told once and before all else, by slices, whatever dies; none stops the rest."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner

import streams.outbox.backfill
from api.access.key_shape import MintedKey
from api.operators.customers import change_customer
from api.operators.keyring import rotate_key
from infra.actor import Author
from infra.cli import cli
from infra.postgres import Connection, is_data_error
from infra.provision import migrate, migrations
from infra.settings import PostgresSettings
from schemas.codec import decode, decode_at
from schemas.facts import (
    CustomerChange,
    CustomerChanged,
    Fact,
    KeyChange,
    KeyChanged,
    ModelPublished,
    PriceBookPublished,
    RouteChanged,
    SpendCap,
)
from schemas.ranges import MOMENTS
from schemas.topics import CUSTOMERS, KEYS, MODELS, PRICES, ROUTES
from streams.log import open_log
from streams.outbox.backfill import tell_old_rows
from tests.conditions import eventually
from tests.factories import VERSION
from tests.integration.relay_world import RelayWorld, route
from tests.processes import Process

TOPICS = {t.name: t for t in (PRICES, MODELS, ROUTES, CUSTOMERS, KEYS)}
OLD = datetime.now(timezone.utc) - timedelta(days=9)


@pytest.fixture
def world(env: dict[str, str], spawn: Callable[..., Process]) -> RelayWorld:
    return RelayWorld(env, spawn)


async def on_topics(world: RelayWorld) -> dict[str, list[Any]]:
    """The facts on each topic."""
    told: dict[str, list[Any]] = {name: [] for name in TOPICS}
    async with open_log(world.settings.kafka) as reader:
        for topic in TOPICS.values():
            name = topic.in_namespace(world.settings.kafka.namespace).name
            async for record in reader.read(name, await reader.freeze(name, 1)):
                told[topic.name].append(decode_at(record, topic.record))
    return told


async def add_key(c: Connection, key_id: str, *, created: Any = OLD, expires: Any = None, revoked: Any = None) -> None:
    """A key of the customer 'cus', who is made when there is none; times as Python's or as SQL's text."""
    await c.execute("INSERT INTO customers VALUES ('cus', 'acme', 10, 5) ON CONFLICT DO NOTHING")
    times = [None if t is None else t if isinstance(t, str) else t.isoformat() for t in (created, expires, revoked)]
    await c.execute(
        "INSERT INTO api_keys VALUES ($1, 'cus', $2, '', 10, 5, $3::text::timestamptz, $4::text::timestamptz, "
        "$5::text::timestamptz)",
        key_id,
        bytes(32),
        *times,
    )


async def add_model(c: Connection, model: str, version: str, created: Any = OLD, *, routed: Any = None) -> None:
    await c.execute("INSERT INTO models VALUES ($1, 'TENSORS')", model)
    at = [t if isinstance(t, str) else t.isoformat() for t in (created, routed or created)]
    await c.execute(
        "INSERT INTO model_versions VALUES ($1, $2, '{}', 's3://b/', $3::text::timestamptz)", version, model, at[0]
    )
    if await c.fetchval("SELECT to_regclass('route_revisions') IS NULL"):  # as an older release has left the tables
        await c.execute(
            "INSERT INTO routes VALUES ($1, $2, 'default', 2, 'standard-v1', $3::text::timestamptz)",
            model,
            version,
            at[1],
        )
        return
    await c.execute("UPDATE model_versions SET warmed_up_at = created_at WHERE model = $1", model)
    await c.execute(
        "INSERT INTO route_revisions (model, revision, change, effective_at, version, pool, spread, price_id, actor, "
        "made_at) VALUES ($1, 1, 'ROUTED', $3::text::timestamptz, $2, 'default', 2, 'standard-v1', 'migration', "
        "$3::text::timestamptz)",
        model,
        version,
        at[1],
    )


async def test_rows_older_than_the_outbox_are_told_once_and_first(world: RelayWorld) -> None:
    hour = timedelta(hours=1)
    async with world.tables() as c:
        await add_model(c, "m", VERSION)
        await c.execute("INSERT INTO model_versions VALUES ($1, 'm', '{}', 's3://b/')", "cd" * 32)
        await add_key(c, "gone", created=OLD + 6 * hour, revoked=OLD + 7 * hour)
        await add_key(c, "kept", created=OLD + 5 * hour)
        await add_key(c, "new", created="now")
        await add_key(c, "later", created=OLD + 8 * hour, revoked="now")
    by_command = route("m")
    await world.write([by_command], topic=ROUTES)  # before any relay has run
    for _ in range(2):
        async with world.relaying() as relay:
            await eventually(lambda relay=relay: relay.standing.state == "active")
            await world.emptied()
    told = await on_topics(world)
    (seeded,) = told[PRICES.name]
    assert isinstance(seeded, PriceBookPublished)
    assert seeded.price_id == "standard-v1" and seeded.amounts_micros == {"requests": 0, "items": 100, "tokens": 2}
    assert seeded.actor == "migration"
    (version,) = told[MODELS.name]
    assert isinstance(version, ModelPublished) and (version.version, version.occurred_at) == (VERSION, OLD)
    first, second = told[ROUTES.name]
    assert isinstance(first, RouteChanged) and first.occurred_at == OLD
    assert second == by_command
    assert [(k.key_id, k.change, k.revoked_at is None) for k in told[KEYS.name]] == [
        ("kept", KeyChange.CREATED, True),
        ("gone", KeyChange.CREATED, True),
        ("gone", KeyChange.REVOKED, False),
        ("later", KeyChange.CREATED, True),
    ]


async def test_a_key_that_is_older_than_the_outbox_and_was_rotated_before_a_relay_ran(world: RelayWorld) -> None:
    expires = OLD + timedelta(days=90)
    async with world.tables() as c:
        await add_key(c, "old", expires=expires)
        await add_key(c, "endless")
        for key, successor in (("old", "second"), ("second", "third"), ("endless", "another")):
            minted = MintedKey(key_id=successor, secret="", secret_sha256=bytes(32))
            await rotate_key(c, key, minted, overlap=timedelta(hours=1), by=Author(actor="tests"))
    async with world.relaying():
        await world.emptied()
    told: dict[str, list[KeyChanged]] = {}
    for fact in (await on_topics(world))[KEYS.name]:
        told.setdefault(fact.key_id, []).append(fact)
    for key, end in (("old", expires), ("endless", None)):
        made, rotated = told[key]
        assert (made.change, made.occurred_at, made.expires_at) == (KeyChange.CREATED, OLD, end)
        assert rotated.change is KeyChange.ROTATED
        assert rotated.expires_at is not None and rotated.expires_at < datetime.now(timezone.utc) + timedelta(hours=2)
    assert [f.change for f in told["second"]] == [KeyChange.CREATED, KeyChange.ROTATED]


async def test_customers_are_told_once_also_where_the_other_tables_were_told_long_ago(world: RelayWorld) -> None:
    """As it is on the first start after the release that told of customers; one has been changed before it."""
    async with world.tables() as c:
        await c.execute(
            "INSERT INTO customers VALUES ('cus', 'acme', 10, 5, NULL, $1), ('cus2', 'brook', 1, 2, NULL, $2), "
            "('new', 'new', 1, 2, NULL, now())",
            OLD,
            OLD + timedelta(hours=1),
        )
        await add_key(c, "old")
        await c.execute("UPDATE schema_migrations SET applied_at = $1 WHERE name < '0014'", OLD - timedelta(days=9))
        await c.execute(
            "INSERT INTO outbox_backfill (source, completed_at) "
            "VALUES ('prices', now()), ('model_versions', now()), ('routes', now()), ('api_keys', now())"
        )
        cap = SpendCap(amount_micros=5, currency="usd")
        by = Author(actor="tests")
        await change_customer(c, "cus", CustomerChange.CAPPED, lambda found: replace(found, spend_cap=cap), by=by)
    for _ in range(2):
        async with world.relaying() as relay:
            await eventually(lambda relay=relay: relay.standing.state == "active")
            await world.emptied()
    told = await on_topics(world)
    facts: list[CustomerChanged] = told[CUSTOMERS.name]
    assert [(f.customer_id, f.change, f.occurred_at == OLD) for f in facts] == [
        ("cus", CustomerChange.CREATED, True),
        ("cus2", CustomerChange.CREATED, False),
        ("cus", CustomerChange.CAPPED, False),
    ]
    assert (facts[0].name, facts[0].requests_per_s, facts[0].burst, facts[0].spend_cap) == ("acme", 10, 5, None)
    assert (facts[0].actor, facts[2].spend_cap) == ("migration", cap)
    assert not told[KEYS.name] and not told[PRICES.name]


class Died(Exception):
    """The process ended here."""


@pytest.mark.parametrize("step", ["after the facts", "after the move", "after the commit"])
async def test_dying_in_any_slice_costs_and_doubles_nothing(
    world: RelayWorld, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    keys, models, customers = 11, 5, 4
    async with world.tables() as c:
        for n in range(customers):
            await c.execute("INSERT INTO customers VALUES ($1, $1, 10, 5, NULL, $2)", f"old{n}", OLD)
        for n in range(keys):  # some of the same moment, so that the id decides where a slice ends
            await add_key(
                c, f"k{n}", created=OLD + timedelta(hours=n // 4), revoked=OLD + timedelta(hours=n, minutes=1)
            )
        for n in range(models):
            await add_model(c, f"m{n}", f"{n:064x}")
    by_command = route("m0")
    await world.write([by_command], topic=ROUTES)
    deaths = iter([True, False] * 100)
    add = streams.outbox.backfill.add_earlier_facts
    said: list[int] = []

    def progress(told: int) -> None:
        said.append(told)
        if told and step == "after the commit":
            raise Died

    async def adding(connection: Connection, facts: Any) -> None:
        await add(connection, facts)
        if next(deaths) and step == "after the facts":
            raise Died

    monkeypatch.setattr("streams.outbox.backfill.add_earlier_facts", adding)
    attempts, done = 0, False
    while not done:
        attempts += 1
        async with world.tables() as c:
            if step == "after the move" and attempts == 1:
                await refuse_every_other_commit(c)
            with suppress(Died, asyncpg.RaiseError):
                await tell_old_rows(c, progress=progress, rows=3)
                done = True
    assert attempts > (2 * keys + 2 * models + 1 + customers) / 3
    async with world.tables() as c:
        rows = await c.fetch("SELECT position, event_id, topic, value FROM outbox ORDER BY position")
        assert await tell_old_rows(c, rows=3) == 0
        assert await c.fetchval("SELECT count(*) FROM outbox") == len(rows)
    assert len(rows) == 2 * keys + 2 * models + 1 + customers + 1 and len({r["event_id"] for r in rows}) == len(rows)
    assert rows[-1]["event_id"] == by_command.event_id
    assert [r["position"] for r in rows[:-1]] == list(range(2 - len(rows), 1))
    facts: dict[str, list[Fact]] = {}
    for r in rows[:-1]:
        facts.setdefault(r["topic"], []).append(decode(r["value"], TOPICS[r["topic"]].record))  # type: ignore[arg-type]
    assert list(facts) == [PRICES.name, MODELS.name, ROUTES.name, CUSTOMERS.name, KEYS.name]
    for told in facts.values():
        assert [f.occurred_at for f in told] == sorted(f.occurred_at for f in told)
    assert max(b - a for a, b in pairwise(said)) <= 3, "a slice is bounded"


async def refuse_every_other_commit(c: Connection) -> None:
    """Of the transactions that note how far a table is told, the first fails at its commit, the second does not."""
    await c.execute(
        "CREATE SEQUENCE commits;"
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF nextval('commits') % 2 = 1 THEN RAISE 'not now'; END IF; RETURN NULL; END $$;"
        "CREATE CONSTRAINT TRIGGER refuse AFTER UPDATE ON outbox_backfill DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION refuse()"
    )


async def test_rows_that_no_fact_can_carry_are_named_and_stop_nobody(
    world: RelayWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world.tables() as c:
        await add_key(c, "before")
        await add_key(c, "endless", expires="2199-12-31T00:00:00Z")
        await add_key(c, "last", created="2000-01-02T00:00:00Z", expires="2199-12-31T00:00:00Z")
        await c.execute("UPDATE api_keys SET replaces_key_id = 'endless' WHERE key_id = 'last'")
        for one in ("a", "b"):
            await add_key(c, one)
        await c.execute(
            "UPDATE api_keys SET replaces_key_id = CASE key_id WHEN 'a' THEN 'b' ELSE 'a' END "
            "WHERE key_id IN ('a', 'b')"
        )
        await add_key(c, "after", created=OLD + timedelta(hours=1))
        await add_model(c, "m", VERSION)
        await c.execute("ALTER TABLE prices DROP CONSTRAINT prices_currency_check")  # as older rows are
        await c.execute("INSERT INTO prices VALUES ('odd', 'items', 1, 'Taler', $1)", OLD)
        await c.execute("ALTER TABLE models DROP CONSTRAINT models_task_check")
        await add_model(c, "odd", VERSION)
        await c.execute("UPDATE models SET task = 'GUESSING' WHERE model = 'odd'")
    async with world.relaying() as relay:
        await eventually(lambda: relay.standing.state == "active")
        await world.emptied()
        figures = relay.standing.figures()["untold"]
    told = await on_topics(world)
    assert [k.key_id for k in told[KEYS.name]] == ["last", "before", "after"]
    assert [m.model for m in told[MODELS.name]] == ["m"]
    assert [p.price_id for p in told[PRICES.name]] == ["standard-v1"]
    assert figures["count"] == 5
    for name, reason in (
        ("api_keys endless/CREATED", "KeyChanged.expires_at: expected a time from"),
        ("api_keys a/CREATED", "in a circle"),
        ("api_keys b/CREATED", "in a circle"),
        ('prices ["odd", "Taler"]', "PriceBookPublished.currency"),
        (f"model_versions odd/{VERSION}", "'GUESSING' is not a valid Task"),
    ):
        assert any(line.startswith(name) and reason in line for line in figures["first"]), (name, figures)
        assert name in caplog.text
    monkeypatch.setattr("os.environ", {**os.environ, **world.env})
    for options in ([], ["--json"]):
        listed = await asyncio.to_thread(CliRunner().invoke, cli, ["outbox", "list", *options])
        if options:
            assert json.loads(listed.output)["untold"] == figures
        else:
            assert figures["first"][0] in listed.output
    async with world.relaying() as another:
        await eventually(lambda: another.standing.figures()["untold"] == figures, what="said by the next relay as well")


NEVER = ("infinity", "20000-01-01", "2200-01-01T00:00:00.000001Z")
BAD_TIMES = (*NEVER, "-infinity", "4000-01-01 BC", "1999-12-31T23:59:59.999999Z")
COLUMNS = (
    ("api_keys", "created_at"),
    ("api_keys", "expires_at"),
    ("api_keys", "revoked_at"),
    ("prices", "created_at"),
    ("model_versions", "created_at"),
    ("route_revisions", "effective_at"),
    ("route_revisions", "made_at"),
)


async def test_times_that_no_record_can_carry_are_mended_and_refused_from_then_on(world: RelayWorld) -> None:
    async with world.tables() as c:
        await c.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        await migrate_up_to(c, "0010")
        for n, bad in enumerate(BAD_TIMES):
            await add_key(c, f"created{n}", created=bad)
            await add_key(c, f"expires{n}", expires=bad)
            await add_key(c, f"revoked{n}", revoked=bad)
            await c.execute("INSERT INTO prices VALUES ($1, 'items', 1, 'usd', $2::text::timestamptz)", f"p{n}", bad)
            await add_model(c, f"m{n}", f"{n:064x}", bad)
    await migrate(PostgresSettings(dsn=world.env["INFERLOG_POSTGRES_DSN"]))
    async with world.relaying() as relay:
        await eventually(lambda: relay.standing.state == "active", timeout_s=30)
        await world.emptied()
        assert relay.standing.figures()["untold"]["count"] == 0
    told = await on_topics(world)
    every = set(range(len(BAD_TIMES)))
    assert {m.model for m in told[MODELS.name]} == {r.model for r in told[ROUTES.name]} == {f"m{n}" for n in every}
    assert {p.price_id for p in told[PRICES.name]} == {"standard-v1", *(f"p{n}" for n in every)}
    keys = {(k.key_id, k.change): k for k in told[KEYS.name]}
    assert {key for key, change in keys if change is KeyChange.REVOKED} == {f"revoked{n}" for n in every}
    for n, bad in enumerate(BAD_TIMES):
        assert (f"created{n}", KeyChange.CREATED) in keys
        ends = keys[f"expires{n}", KeyChange.CREATED].expires_at
        # What never comes is no end; what is long over is an end that is over.
        assert ends is None if bad in NEVER else ends == MOMENTS.low, bad
    async with world.tables() as c:
        for table, column in COLUMNS:
            for bad in BAD_TIMES:
                with pytest.raises(Exception, match="_check") as refused:
                    await c.execute(f"UPDATE {table} SET {column} = $1::text::timestamptz", bad)
                assert is_data_error(refused.value)
            for good in (MOMENTS.low, MOMENTS.high):
                await c.execute(f"UPDATE {table} SET {column} = $1", good)


async def migrate_up_to(c: Connection, name: str) -> None:
    """As an older release has left the tables."""
    await c.execute(
        "CREATE TABLE schema_migrations (name text PRIMARY KEY, digest text NOT NULL, "
        "applied_at timestamptz NOT NULL DEFAULT now())"
    )
    for migration, text in migrations().items():
        if migration < name:
            await c.execute(text)
            await c.execute(
                "INSERT INTO schema_migrations (name, digest) "
                "VALUES ($1, encode(sha256(convert_to($2, 'UTF8')), 'hex'))",
                migration,
                text,
            )
