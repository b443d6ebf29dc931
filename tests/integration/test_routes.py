"""Routes by their commands, their facts, and a gateway's memory that follows them: each change once, none missed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from api.errors import NotFound
from api.routing.registry import PostgresRegistry
from api.routing.versions import RegistryAway, Versions
from gpu_worker.aliases import set_alias
from gpu_worker.history import read_history
from gpu_worker.registry import register
from gpu_worker.routing import RouteWish, call_off, reroute, roll_back
from infra.actor import Author
from infra.postgres import is_data_error, open_pool
from infra.settings import PostgresSettings
from schemas.facts import Canary, Pin, RouteChange, RouteChanged
from schemas.routes import part_of
from tests.conditions import eventually
from tests.fakes import manifest
from tests.integration.facts_desk import FactsDesk
from tests.integration.worker_desk import constant_bundle

BY = Author(actor="ada", reason="a test")
SIGNED = ("--actor", "ada", "--reason", "a test")
HOUR = timedelta(hours=1)


@pytest.fixture
def desk(env: dict[str, str]) -> FactsDesk:
    made = FactsDesk(env)
    made.sql("INSERT INTO customers (customer_id, name, requests_per_s, burst) VALUES ('cust_1', 'acme', 10, 20)")
    return made


async def versions_of(desk: FactsDesk, model: str, count: int) -> list[str]:
    """Registered versions that have run, without a route; their hashes differ in the first digits."""
    connection = await desk.connect()
    try:
        made = [manifest(producer=f"{model} {n}") for n in range(count)]
        for m in made:
            await register(connection, model, m, artifact_uri=f"s3://b/{m.version}/", wish=None, by=BY)
    finally:
        await connection.close()
    return [m.version for m in made]


def facts(desk: FactsDesk) -> list[RouteChanged]:
    return [t.fact for t in desk.told() if isinstance(t.fact, RouteChanged)]


async def test_every_change_is_a_revision_and_a_fact_and_rollbacks_go_back(desk: FactsDesk) -> None:
    a, b, c = await versions_of(desk, "m", 3)

    async def said(*arguments: str) -> Any:
        return json.loads(await asyncio.to_thread(desk.said, "models", *arguments, "--json", *SIGNED))

    async def shown() -> Any:
        (found,) = json.loads(await asyncio.to_thread(desk.said, "models", "routes", "m", "--json"))
        return found

    await said("route", "m", a[:8])
    await said("route", "m", "--canary", f"{b[:10]}=5%", "--canary", f"{c[:10]}=1", "--pin", f"acme={c[:10]}")
    grown = await said("route", "m", "--canary", f"{b[:10]}=20%")
    assert (grown["canaries"], grown["pins"], grown["revision"]) == ({b: 20}, {"cust_1": c}, 3)
    promoted = await said("route", "m", b)
    assert (promoted["version"], promoted["canaries"], promoted["pins"]) == (b, {}, {"cust_1": c})
    assert not (await said("route", "m", b))["route_changed"]
    assert (await said("route", "m", "--unpin", "cust_1"))["pins"] == {}
    assert (await said("alias", "m", "stable", a[:8]))["alias_changed"]
    assert not (await said("alias", "m", "stable", a[:8]))["alias_changed"]
    at = (datetime.now(timezone.utc) + 5 * HOUR).replace(microsecond=0)
    later = await said("route", "m", "stable", "--spread", "4", "--at", at.isoformat())
    assert (later["effective_at"], later["previous_route"]["version"]) == (at.isoformat(), b)
    soon = await said("route", "m", c, "--in", "1h")
    assert soon["scheduled"] == [6]
    assert [r["revision"] for r in (await shown())["scheduled"]] == [7, 6]
    assert (await shown())["now"]["version"] == b
    assert [r["revision"] for r in (await said("unschedule", "m", "--revision", "7"))["unscheduled"]] == [7]
    first = await said("rollback", "m")
    assert (first["restores"], first["version"], first["pins"], first["scheduled"]) == (4, b, {"cust_1": c}, [6])
    second = await said("rollback", "m")
    assert (second["restores"], second["version"], second["canaries"]) == (3, a, {b: 20})
    assert (await said("unschedule", "m"))["unscheduled"][0]["revision"] == 6
    assert (await said("alias", "m", "stable", "--remove"))["version"] is None

    found = await shown()
    assert found["now"]["revision"] == 9 and found["scheduled"] == [] and found["aliases"] == {}
    assert [r["change"] for r in found["history"]] == ["ROUTED"] * 5 + ["SCHEDULED"] * 2 + ["ROLLED_BACK"] * 2
    assert {(r["actor"], r["reason"]) for r in found["history"]} == {("ada", "a test")}
    printed = await asyncio.to_thread(desk.said, "models", "routes", "m")
    assert f"m: revision 9: version {a[:12]}" in printed and "as revision 3" in printed
    assert printed.count("; taken back by ada (why: inferlog export routes)") == 2

    told = facts(desk)
    expected = [RouteChange.ROUTED] * 5 + [RouteChange.ALIASED, RouteChange.SCHEDULED, RouteChange.SCHEDULED]
    expected += [RouteChange.UNSCHEDULED, RouteChange.ROLLED_BACK, RouteChange.ROLLED_BACK, RouteChange.UNSCHEDULED]
    assert [f.change for f in told] == [*expected, RouteChange.UNALIASED]
    assert {(f.actor, f.reason) for f in told} == {("ada", "a test")}
    assert (told[1].canaries, told[1].pins) == (
        (Canary(version=b, percent=5), Canary(version=c, percent=1)),
        (Pin(customer_id="cust_1", version=c),),
    )
    assert (told[5].alias, told[5].version, told[5].previous_version) == ("stable", a, None)
    assert (told[6].effective_at, told[6].version, told[6].spread) == (at, a, 4)
    assert (told[8].effective_at, told[8].version, told[8].previous_version) == (told[7].effective_at, c, b)
    assert told[9].effective_at is None and told[9].pins == told[3].pins
    assert (told[12].alias, told[12].version, told[12].previous_version) == ("stable", a, a)


async def test_what_cannot_be_is_refused_with_the_way_out_and_changes_nothing(desk: FactsDesk) -> None:
    a, b = await versions_of(desk, "m", 2)
    await versions_of(desk, "unrouted", 1)
    cold = "c0" * 32
    desk.sql("INSERT INTO model_versions VALUES ($1, 'm', '{}', 's3://b/')", cold)
    await asyncio.to_thread(desk.said, "models", "route", "m", a)
    before, told = desk.tables(), len(desk.told())
    past = (datetime.now(timezone.utc) - HOUR).isoformat()
    refused = {
        ("route", "m", cold[:8]): "inferlog models publish m FOLDER --no-route",
        ("route", "m", "--canary", f"{cold[:8]}=5"): "has not passed its warm-up",
        ("route", "m", "--pin", f"acme={cold[:8]}"): "has not passed its warm-up",
        ("route", "m", cold[:8], "--in", "2h"): "has not passed its warm-up",
        ("alias", "m", "stable", cold[:8]): "has not passed its warm-up",
        ("route", "m", "--canary", f"{b[:8]}=60", "--canary", f"{a[:8]}=50"): "version "
        + a[:12]
        + " is the route's own",
        ("route", "m", "--canary", f"{b[:8]}=101"): "1 to 100 %",
        ("route", "m", b, "--canary", f"{a[:8]}=50", "--canary", f"{a[:9]}=10"): "named twice",
        ("route", "m", "--pin", f"nobody={b[:8]}"): "there is no customer 'nobody'",
        ("route", "m", b, "--at", past): "is over",
        ("route", "m", b, "--in", "1s"): "2 s from now",
        ("route", "m", "--pin", f"acme={b[:8]}", "--unpin", "cust_1"): "one customer is named twice",
        ("route", "m", b, "--at", past, "--in", "2h"): "give one of them",
        ("route", "m", "--no-canary", "--canary", f"{b[:8]}=5"): "give one of them",
        ("route", "unrouted"): "no route yet",
        ("route", "m", "stable"): "no alias 'stable'",
        ("alias", "m", "beef", b): "expected a small letter",
        ("alias", "m", "Stable", b): "expected a small letter",
        ("alias", "m", "stable"): "either a VERSION",
        ("alias", "unrouted", "stable", "--remove", b[:8]): "either a VERSION",
        ("unschedule", "m"): "there is none",
        ("unschedule", "m", "--revision", "1"): "revision 1 is not one",
        ("rollback", "m"): "nothing to go back to",
        ("rollback", "unrouted"): "has no route",
        ("routes", "nothing"): "there is no model 'nothing'",
    }
    for arguments, words in refused.items():
        result = await asyncio.to_thread(desk.call, "models", *arguments)
        assert result.exit_code != 0 and words in result.output, (arguments, result.output)
        assert "Traceback" not in result.output
    (unrouted,) = desk.sql("SELECT version FROM model_versions WHERE model = 'unrouted'")
    alias = ("models", "alias", "unrouted", "stable", unrouted["version"])
    assert "has no route" in (await asyncio.to_thread(desk.call, *alias)).output
    assert (desk.tables(), len(desk.told())) == (before, told)


REVISION = (
    "INSERT INTO route_revisions (model, revision, change, effective_at, version, pool, spread, price_id, canaries, "
    "pins, actor, made_at) VALUES ('m', 9, 'ROUTED', now(), $1, 'default', 2, 'standard-v1', $2, $3, 'sql', now())"
)


async def test_no_statement_lets_a_route_name_a_version_that_has_not_run(desk: FactsDesk) -> None:
    a, b = await versions_of(desk, "m", 2)
    (other,) = await versions_of(desk, "other", 1)
    cold = "c0" * 32
    desk.sql("INSERT INTO model_versions VALUES ($1, 'm', '{}', 's3://b/')", cold)
    connection = await desk.connect()
    await reroute(connection, "m", a, RouteWish(canaries={b: 5}), by=BY)
    statements: list[tuple[str, list[Any]]] = []
    for bad in (cold, other, "d0" * 32):
        statements += [
            (REVISION, [bad, "{}", "{}"]),
            (REVISION, [a, json.dumps({bad: [1]}), "{}"]),
            (REVISION, [a, "{}", json.dumps({"cust_1": bad})]),
            ("UPDATE route_revisions SET version = $1 WHERE revision = 1", [bad]),
            ("UPDATE route_revisions SET canaries = $1 WHERE revision = 1", [json.dumps({b: [0], bad: [1]})]),
            ("INSERT INTO route_aliases VALUES ('m', 'x', $1, now())", [bad]),
        ]
    statements.append(("UPDATE model_versions SET warmed_up_at = NULL WHERE version = $1", [a]))
    before = desk.tables()
    for statement, values in statements:
        with pytest.raises(Exception, match=r"warm-up|violates") as refused:
            await connection.execute(statement, *values)
        assert is_data_error(refused.value), (statement, refused.value)
    assert desk.tables() == before
    await connection.execute("UPDATE model_versions SET warmed_up_at = now() WHERE version = $1", cold)
    await connection.execute(REVISION, cold, json.dumps({b: [1]}), json.dumps({"cust_1": a}))
    await connection.close()


def test_a_version_that_has_not_run_is_tried_by_publishing_it_again(desk: FactsDesk, tmp_path: Path) -> None:
    bundle = str(constant_bundle(tmp_path / "b", 1.0))
    version = json.loads(desk.said("models", "publish", "m", bundle, "--no-route", "--json"))["version"]
    desk.sql("UPDATE route_revisions SET version = version")
    desk.sql("DELETE FROM model_versions")
    desk.sql("INSERT INTO model_versions VALUES ($1, 'm', '{}', 's3://b/')", version)
    assert "has not passed its warm-up" in desk.call("models", "route", "m", version[:8]).output
    again = desk.said("models", "publish", "m", bundle)
    assert "running a sample" in again and f"routed to version {version}" in again


@asynccontextmanager
async def following(desk: FactsDesk) -> AsyncIterator[Versions]:
    """A gateway's memory over the real tables, read when the test says so."""
    async with open_pool(PostgresSettings(dsn=desk.env["INFERLOG_POSTGRES_DSN"])) as pool:
        yield Versions(PostgresRegistry(pool))


async def test_memory_follows_every_change_and_reads_nothing_when_there_is_none(desk: FactsDesk) -> None:
    a, b, c = await versions_of(desk, "m", 3)
    c_, other = await desk.connect(), await versions_of(desk, "quiet", 1)
    await reroute(c_, "quiet", other[0], RouteWish(), by=BY)
    async with following(desk) as memory:
        await memory.refresh()
        with pytest.raises(NotFound):
            memory.resolve("m")
        assert memory.resolve("quiet").version == other[0]
        await reroute(c_, "m", a, RouteWish(canaries={b: 30}, pins={"cust_1": c}), by=BY)
        await set_alias(c_, "m", "stable", c, by=BY)
        await memory.refresh()
        assert (memory.resolve("m").version, memory.resolve("m", "stable").version) == (a, c)
        assert memory.resolve("m", customer_id="cust_1").version == c
        for n in range(50):
            expected = b if part_of("m", f"x{n}") < 30 else a
            assert memory.resolve("m", customer_id=f"x{n}").version == expected
        (registered,) = desk.sql("SELECT created_at FROM model_versions WHERE version = $1", a)
        assert memory.resolve("m").created_at == registered["created_at"]

        registry = PostgresRegistry(memory._registry._pool)  # type: ignore[attr-defined]
        everything = await registry.changes(0)
        assert (len(everything.versions), len(everything.revisions), len(everything.aliases)) == (4, 2, 1)

        async def nothing_is_new() -> bool:
            found = await registry.changes((await registry.changes(0)).horizon)
            return not (found.versions or found.revisions or found.aliases)

        # As long as anybody on this server has a transaction open that is older, rows are told again.
        await eventually(nothing_is_new, what="no change to be told")

        planned = await reroute(c_, "m", b, RouteWish(at=HOUR / 2), by=BY)
        memory._now = lambda: datetime.now(timezone.utc) + HOUR * 3 / 4
        await memory.refresh()
        assert memory.resolve("m").version == b, "by this clock it is time"
        await call_off(c_, "m", planned.number, by=BY)
        await set_alias(c_, "m", "stable", None, by=BY)
        await memory.refresh()
        assert memory.resolve("m").version == a
        with pytest.raises(NotFound, match="it has none"):
            memory.resolve("m", "stable")
        await reroute(c_, "m", b, RouteWish(), by=BY)
        await roll_back(c_, "m", by=BY)
        await memory.refresh()
        assert memory.resolve("m").version == a and memory.resolve("m", customer_id="cust_1").version == c
    await c_.close()


async def test_a_change_that_commits_late_is_not_missed(desk: FactsDesk) -> None:
    """It began before others that were read meanwhile, and everything in it is older than what was read."""
    a, b = await versions_of(desk, "m", 2)
    late, quick = await desk.connect(), await desk.connect()
    await reroute(quick, "m", a, RouteWish(), by=BY)
    async with following(desk) as memory:
        transaction = late.transaction()
        await transaction.start()
        slow = manifest(producer="slow")
        await register(late, "slow", slow, artifact_uri="s3://b/", wish=RouteWish(), by=BY)
        await late.execute("SELECT pg_advisory_unlock_all()")
        for version in (b, a, b):
            # Not by the command, whose fact would wait for the open transaction's.
            await quick.execute(
                "INSERT INTO route_revisions (model, revision, change, effective_at, version, pool, spread, price_id, "
                "actor, made_at) SELECT 'm', max(revision) + 1, 'ROUTED', clock_timestamp(), $1, 'default', 2, "
                "'standard-v1', 'a test', now() FROM route_revisions WHERE model = 'm'",
                version,
            )
            await memory.refresh()
            assert memory.resolve("m").version == version
            with pytest.raises(NotFound):
                memory.resolve("slow")
        await transaction.commit()
        await memory.refresh()
        assert memory.resolve("slow").version == slow.version
    await late.close()
    await quick.close()


async def test_two_rollbacks_at_once_are_one_and_a_refusal(desk: FactsDesk) -> None:
    a, b, c = await versions_of(desk, "m", 3)
    one, two = await desk.connect(), await desk.connect()
    for version in (a, b, c):
        await reroute(one, "m", version, RouteWish(), by=BY)
    held = (await read_history(one, "m")).held_number
    done = await asyncio.gather(
        *(roll_back(connection, "m", expected=held, by=BY) for connection in (one, two)), return_exceptions=True
    )
    assert sorted(type(d).__name__ for d in done) == ["PublishConflict", "Rerouted"]
    assert desk.sql("SELECT version FROM routes") == [{"version": b}]
    await one.close()
    await two.close()


async def test_a_registry_that_is_away_is_said_to_be(desk: FactsDesk) -> None:
    async with open_pool(PostgresSettings(dsn="postgresql://nobody@127.0.0.1:1/none"), connect_timeout_s=1) as pool:
        with pytest.raises(RegistryAway):
            await PostgresRegistry(pool).changes(0)
