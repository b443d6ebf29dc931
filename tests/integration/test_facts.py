"""Whatever changes the registry, keys, the price list or the bill writes its fact: in the same transaction, once, in
the order of the changes, and without any secret."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from api.access.key_shape import digest, mint
from api.operators.keyring import NotRotatable, create_key, revoke_key, rotate_key
from gpu_worker.registry import register
from gpu_worker.routing import RouteWish, reroute
from infra.actor import Author
from infra.postgres import Connection
from schemas.facts import (
    BillingAdjusted,
    KeyChange,
    KeyChanged,
    ModelPublished,
    PriceBookPublished,
    RouteChange,
    RouteChanged,
)
from schemas.records import Task
from schemas.topics import ADJUSTMENTS, CUSTOMERS, KEYS, MODELS, PRICES, ROUTES
from streams.billing.adjustments import AdjustmentRefused, adjust
from streams.billing.intents import HourKey
from streams.billing.prices import PriceConflict, price, publish_price
from tests.conditions import eventually
from tests.fakes import manifest
from tests.integration.facts_desk import FactsDesk, what
from tests.integration.worker_desk import constant_bundle

BY = Author(actor="ada", reason="a test")
SIGNED = ("--actor", "ada", "--reason", "a test")
NOW = datetime(2026, 3, 1, 12, 30, tzinfo=timezone.utc)
HOUR = HourKey(customer_id="cust_1", meter="items", hour=datetime(2026, 3, 1, 10, tzinfo=timezone.utc))

Work = Callable[[Connection], Awaitable[Any]]


@pytest.fixture
def desk(env: dict[str, str]) -> FactsDesk:
    made = FactsDesk(env)
    made.sql("INSERT INTO customers (customer_id, name, requests_per_s, burst) VALUES ('cust_1', 'acme', 10, 20)")
    made.sql("UPDATE customers SET created_at = '2026-03-01T09:40Z'")
    return made


# -- each command -----------------------------------------------------------------------------------------------------


def test_a_change_and_its_fact_are_there_together_or_neither_is(desk: FactsDesk, tmp_path: Path) -> None:
    """Each command once with no room for the fact, once with a change that fails at its commit, then undisturbed."""
    first = constant_bundle(tmp_path / "1", 1.0)
    version = json.loads(desk.said("models", "publish", "digits", str(first), "--json"))["version"]
    rotated, revoked, kept = (json.loads(desk.said("keys", "create", "acme", "--json"))["key_id"] for _ in range(3))
    hour = ("--meter", "items", "--hour", "2026-03-01T10", "--units", "5", "--carried")
    commands = {
        ("models", "publish", "digits", str(constant_bundle(tmp_path / "2", 2.0))): [MODELS.name, ROUTES.name],
        ("models", "route", "digits", version): [ROUTES.name],
        ("models", "rollback", "digits"): [ROUTES.name],
        ("models", "alias", "digits", "stable", version): [ROUTES.name],
        ("models", "route", "digits", version, "--in", "2h"): [ROUTES.name],
        ("models", "unschedule", "digits"): [ROUTES.name],
        ("keys", "create", "acme"): [KEYS.name],
        ("keys", "rotate", rotated): [KEYS.name, KEYS.name],
        ("keys", "revoke", revoked): [KEYS.name],
        ("keys", "scope", kept, "--models", "digits"): [KEYS.name],
        ("keys", "limits", kept, "--limit", "items=9/1s"): [KEYS.name],
        ("keys", "expire", kept, "--in", "9d"): [KEYS.name],
        ("customers", "create", "brook", "--requests-per-s", "1", "--burst", "1"): [CUSTOMERS.name],
        ("customers", "limits", "acme", "--limit", "items=9/1s,model=digits"): [CUSTOMERS.name],
        ("customers", "cap", "acme", "--per-month", "9", "--currency", "usd"): [CUSTOMERS.name],
        ("prices", "publish", "p2", "--meter", "items=80", "--currency", "usd"): [PRICES.name],
        ("billing", "adjust", "acme", *hour): [ADJUSTMENTS.name],
    }
    refuse_commits(desk)
    for command, topics in commands.items():
        before, told = desk.tables(), desk.told()
        desk.sql("ALTER TABLE outbox RENAME TO outbox_gone")
        assert desk.call(*command, *SIGNED).exit_code != 0, command
        desk.sql("ALTER TABLE outbox_gone RENAME TO outbox")
        assert desk.tables() == before, f"{command}: changed without its fact"

        desk.sql("INSERT INTO refusing VALUES (true)")
        result = desk.call(*command, *SIGNED)
        assert "refused at the commit" in str(result.exception), (command, result.output)
        desk.sql("DELETE FROM refusing")
        assert (desk.tables(), desk.told()) == (before, told), f"{command}: a fact without its change"

        desk.said(*command, *SIGNED)
        assert desk.tables() != before
        assert [t.topic for t in desk.told()[len(told) :]] == topics, command
        assert {(t.fact.actor, t.fact.reason) for t in desk.told()[len(told) :]} == {("ada", "a test")}


def refuse_commits(desk: FactsDesk) -> None:
    """While `refusing` has a row, a transaction that changed anything fails in its very last moment."""
    desk.sql("CREATE TABLE refusing (now boolean)")
    desk.sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF EXISTS (SELECT 1 FROM refusing) THEN RAISE 'refused at the commit'; END IF; RETURN NULL; END $$"
    )
    for table in desk.tables():
        desk.sql(
            f"CREATE CONSTRAINT TRIGGER refuse AFTER INSERT OR UPDATE ON {table} DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION refuse()"
        )


def test_models_and_routes_tell_what_is_new_and_nothing_when_nothing_is(desk: FactsDesk, tmp_path: Path) -> None:
    bundles = [constant_bundle(tmp_path / str(n), float(n)) for n in range(2)]
    first = json.loads(desk.said("models", "publish", "m", str(bundles[0]), "--json", *SIGNED))
    assert (first["created"], first["routed"], first["route_changed"]) == (True, True, True)
    published, routed = desk.told()
    (row,) = desk.sql("SELECT manifest, artifact_uri, created_at FROM model_versions")
    assert isinstance(published.fact, ModelPublished)
    assert (published.topic, published.key, published.fact.occurred_at) == (MODELS.name, "m", row["created_at"])
    assert what(published.fact) == {
        "model": "m",
        "version": first["version"],
        "task": Task.TENSORS,
        "artifact_uri": row["artifact_uri"],
        "manifest": row["manifest"],
        "actor": "ada",
        "reason": "a test",
    }
    terms = {"pool": "default", "spread": 2, "price_id": "standard-v1", "actor": "ada", "reason": "a test"}
    terms |= {"change": RouteChange.ROUTED, "alias": None, "effective_at": None, "canaries": (), "pins": ()}
    assert isinstance(routed.fact, RouteChanged)
    assert (routed.topic, routed.key) == (ROUTES.name, "m")
    assert what(routed.fact) == {"model": "m", "version": first["version"], "previous_version": None, **terms}
    assert desk.sql("SELECT updated_at FROM routes") == [{"updated_at": routed.fact.occurred_at}]

    again = json.loads(desk.said("models", "publish", "m", str(bundles[0]), "--json"))
    assert (again["created"], again["routed"], again["route_changed"]) == (False, True, False)
    assert not json.loads(desk.said("models", "route", "m", first["version"][:8], "--json"))["route_changed"]
    assert "already routed" in desk.said("models", "route", "m", first["version"][:8])
    assert len(desk.told()) == 2, "nothing changed, nothing is told"

    second = json.loads(desk.said("models", "publish", "m", str(bundles[1]), "--no-route", "--json"))["version"]
    assert [t.topic for t in desk.told()[2:]] == [MODELS.name]
    desk.said("models", "route", "m", second[:8], "--spread", "3", *SIGNED)
    desk.said("models", "route", "m", second[:8], "--spread", "4", *SIGNED)
    moved, widened = (t.fact for t in desk.told()[3:])
    route = {"model": "m", "version": second, "previous_version": first["version"], **terms}
    assert what(moved) == {**route, "spread": 3}
    assert what(widened) == {**what(moved), "previous_version": second, "spread": 4}


def test_keys_tell_their_state_after_each_change_and_never_a_secret(desk: FactsDesk) -> None:
    created = json.loads(
        desk.said("keys", "create", "acme", "--label", "ci", "--burst", "3", "--expires-in", "90d", "--json", *SIGNED)
    )
    successor = json.loads(desk.said("keys", "rotate", created["key_id"], "--overlap", "2h", "--json", *SIGNED))
    for _ in range(2):
        desk.said("keys", "revoke", created["key_id"], *SIGNED)
    told = desk.told()
    facts = [t.fact for t in told if isinstance(t.fact, KeyChanged)]
    old, new = created["key_id"], successor["key_id"]
    assert [(t.topic, t.key) for t in told] == [(KEYS.name, key) for key in (old, old, new, old)]
    assert [f.change for f in facts] == [KeyChange.CREATED, KeyChange.ROTATED, KeyChange.CREATED, KeyChange.REVOKED]
    shared = {"customer_id": "cust_1", "label": "ci", "requests_per_s": 10, "burst": 3, "actor": "ada"}
    for fact in facts:
        assert shared.items() <= what(fact).items()
    first, rotated, second, revoked = facts
    days = timedelta(days=90)
    assert (first.expires_at, second.expires_at) == (first.occurred_at + days, second.occurred_at + days)
    assert rotated.expires_at == rotated.occurred_at + timedelta(hours=2) == revoked.expires_at
    assert [f.replaces_key_id for f in facts] == [None, None, old, None]
    assert [f.revoked_at for f in facts] == [None, None, None, revoked.occurred_at]

    rows = {r["key_id"]: r for r in desk.sql("SELECT * FROM api_keys")}
    for fact in (second, revoked):
        row = rows[fact.key_id]
        state = ("expires_at", "revoked_at", "label", "burst", "requests_per_s", "replaces_key_id")
        assert [getattr(fact, name) for name in state] == [row[name] for name in state]
    written = b"".join(
        r["value"] + r["key"] + r["headers"].encode() for r in desk.sql("SELECT key, value, headers FROM outbox")
    )
    for key in (created["key"], successor["key"]):
        secret = key.removesuffix(key[-8:]).rpartition("_")[2]
        assert len(secret) == 43
        for trace in (secret, digest(key), digest(key).hex(), key[-8:]):
            assert (trace if isinstance(trace, bytes) else trace.encode()) not in written


def test_a_rotated_key_keeps_an_earlier_end_and_is_rotated_once(desk: FactsDesk) -> None:
    short = json.loads(desk.said("keys", "create", "acme", "--expires-in", "1h", "--json"))
    endless = json.loads(desk.said("keys", "create", "acme", "--json"))
    made = json.loads(desk.said("keys", "rotate", short["key_id"], "--json"))
    assert made["replaced_key_expires_at"] == short["expires_at"], "an overlap lengthens no key's life"
    assert json.loads(desk.said("keys", "rotate", endless["key_id"], "--json"))["expires_at"] is None
    told = len(desk.told())
    for words, key_id in [
        (f"was rotated before; rotate its successor {made['key_id']}", short["key_id"]),
        ("there is no key with the id 'nope'", "nope"),
    ]:
        assert words in desk.call("keys", "rotate", key_id).output
    desk.said("keys", "revoke", made["key_id"])
    assert "is revoked; make a new one" in desk.call("keys", "rotate", made["key_id"]).output
    assert "--overlap: expected a number" in desk.call("keys", "rotate", "x", "--overlap", "0h").output
    assert len(desk.told()) == told + 1, "the revocation alone"


def test_a_price_is_published_once_and_never_otherwise(desk: FactsDesk) -> None:
    entry = ("--meter", "requests=0", "--meter", "items=80", "--currency", "eur")
    first_euro = desk.call("prices", "publish", "p2", *entry, *SIGNED)
    assert "p2: published" in first_euro.stdout
    assert "note: no other price is in 'eur'" in first_euro.stderr
    (told,) = desk.told()
    assert isinstance(told.fact, PriceBookPublished)
    assert (told.topic, told.key) == (PRICES.name, "p2")
    amounts = {"requests": 0, "items": 80}
    said = {"price_id": "p2", "currency": "eur", "amounts_micros": amounts, "actor": "ada", "reason": "a test"}
    assert what(told.fact) == said
    assert "p2: already published" in desk.said("prices", "publish", "p2", *entry)
    others = [
        ("--meter", "items=81", "--meter", "requests=0", "--currency", "eur"),
        ("--meter", "items=80", "--currency", "eur"),
        (*entry[:4], "--currency", "usd"),
    ]
    for other in others:
        refused = desk.call("prices", "publish", "p2", *other)
        assert refused.exit_code == 1
        assert "an entry never changes" in refused.output
    assert len(desk.told()) == 1
    first, second = json.loads(desk.said("prices", "list", "--json"))
    assert "note" not in desk.call("prices", "publish", "p3", "--meter", "items=1", "--currency", "usd").output
    assert (first["price_id"], first["amounts_micros"]) == ("standard-v1", {"items": 100, "requests": 0, "tokens": 2})
    assert (second["amounts_micros"], second["currency"]) == (amounts, "eur")
    assert datetime.fromisoformat(second["created_at"]) == told.fact.occurred_at


def test_a_correction_is_a_row_and_a_fact_of_the_same_id(desk: FactsDesk) -> None:
    hour = ("--hour", "2026-03-01T10:00Z", "--meter", "items", "--carried")
    done = json.loads(desk.said("billing", "adjust", "acme", *hour, "--units", "7", "--json", *SIGNED))
    assert (done["customer_id"], done["billable_units"], done["carried"]) == ("cust_1", 7, True)
    (told,) = desk.told()
    assert isinstance(told.fact, BillingAdjusted)
    assert (told.topic, told.key, str(told.fact.event_id)) == (ADJUSTMENTS.name, "cust_1", done["adjustment_id"])
    said = {
        "customer_id": "cust_1",
        "hour": HOUR.hour,
        "meter": "items",
        "units": 7,
        "actor": "ada",
        "reason": "a test",
    }
    assert what(told.fact) == said
    desk.said("billing", "adjust", "cust_1", *hour, "--units", "-7", "--reason", "back", INFERLOG_ACTOR="brook")
    for customer in ((), ("acme",), ("cust_1",)):
        listed = json.loads(desk.said("billing", "adjustments", *customer, "--json"))
        assert [(a["units"], a["actor"], a["reason"]) for a in listed] == [(7, "ada", "a test"), (-7, "brook", "back")]
    for words, arguments in [
        ("would bring them below 0", ("acme", *hour, "--units", "-1", "--reason", "x")),
        ("there is no customer 'nobody'", ("nobody", *hour, "--units", "1", "--reason", "x")),
        ("nobody knows 'item'", ("acme", *hour, "--meter", "item", "--units", "1", "--reason", "x")),
        ("by an invoice item; --carried says", ("acme", *hour[:-1], "--units", "1", "--reason", "x")),
        (
            "was created at 2026-03-01T09:40Z",
            ("acme", *hour, "--hour", "2026-03-01T08", "--units", "1", "--reason", "x"),
        ),
        ("Missing option '--reason'", ("acme", *hour, "--units", "1")),
        ("not a whole hour", ("acme", "--hour", "2026-03-01T10:30", *hour[2:], "--units", "1", "--reason", "x")),
    ]:
        refused = desk.call("billing", "adjust", *arguments)
        assert refused.exit_code != 0
        assert words in " ".join(refused.output.split()), refused.output
    assert len(desk.told()) == len(desk.sql("SELECT 1 FROM billing_adjustments")) == 2


# -- several at once --------------------------------------------------------------------------------------------------


async def in_turn(desk: FactsDesk, first: Work, second: Work) -> Any:
    """What `second` does that was begun while `first` had changed everything and committed nothing."""
    connections = [await desk.connect() for _ in range(3)]
    ahead, behind, watch = connections
    try:
        async with ahead.transaction():
            await first(ahead)
            task = asyncio.ensure_future(second(behind))

            async def waits() -> bool:
                found: bool = await watch.fetchval(
                    "SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock')",
                    behind.get_server_pid(),
                )
                assert not task.done(), "it did not wait"
                return found

            await eventually(waits, what="the second one waits for the first")
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        return outcome
    finally:
        for connection in connections:
            connection.terminate()


async def versions(desk: FactsDesk, count: int) -> list[str]:
    """Registered versions of the model `m`, without a route."""
    connection = await desk.connect()
    try:
        made = [manifest(producer=f"v{n}") for n in range(count)]
        for m in made:
            await register(connection, "m", m, artifact_uri=f"s3://inferlog/sha256/{m.version}/", wish=None, by=BY)
    finally:
        await connection.close()
    return [m.version for m in made]


def routes_told(desk: FactsDesk) -> list[tuple[str | None, str]]:
    """Version before and after, of every change of a route, in order."""
    return [(t.fact.previous_version, t.fact.version) for t in desk.told() if isinstance(t.fact, RouteChanged)]


@pytest.mark.parametrize("has_route", [False, True])
async def test_a_route_names_the_version_that_really_answered_before(desk: FactsDesk, has_route: bool) -> None:
    start, one, other = await versions(desk, 3)
    if has_route:
        connection = await desk.connect()
        await reroute(connection, "m", start, RouteWish(), by=BY)
        await connection.close()

    def to(version: str) -> Work:
        return lambda c: reroute(c, "m", version, RouteWish(), by=BY)

    assert (await in_turn(desk, to(one), to(other))).before.version == one
    assert routes_told(desk)[-2:] == [(start if has_route else None, one), (one, other)]


@pytest.mark.parametrize("seed", range(2))
async def test_facts_of_a_crowd_stand_in_the_order_of_its_changes(desk: FactsDesk, seed: int) -> None:
    chance = random.Random(seed)
    found = await versions(desk, 4)

    async def work(targets: list[str]) -> None:
        connection = await desk.connect()
        try:
            for version in targets:
                await reroute(connection, "m", version, RouteWish(), by=BY)
        finally:
            await connection.close()

    await asyncio.gather(*(work([chance.choice(found) for _ in range(8)]) for _ in range(6)))
    told = routes_told(desk)
    assert told[0][0] is None
    assert all(before == after for (_, before), (after, _) in pairwise(told))
    assert all(before != after for before, after in told), "a route that stays is no change"
    assert desk.sql("SELECT version FROM routes") == [{"version": told[-1][1]}]
    times = [t.fact.occurred_at for t in desk.told() if isinstance(t.fact, RouteChanged)]
    assert times == sorted(times)


async def test_of_two_changes_of_a_key_the_second_sees_the_first(desk: FactsDesk) -> None:
    day = timedelta(days=1)
    minted = [mint("test") for _ in range(2)]
    keys = [m.key_id for m in minted]
    connection = await desk.connect()
    limits = {"requests_per_s": 1, "burst": 1}
    for m in minted:
        await create_key(connection, m, customer_id="cust_1", label="", lifetime=None, by=BY, **limits)
    await connection.close()
    told = len(desk.told())
    outcome = await in_turn(
        desk,
        lambda c: rotate_key(c, keys[0], mint("test"), overlap=day, by=BY),
        lambda c: rotate_key(c, keys[0], mint("test"), overlap=day, by=BY),
    )
    assert isinstance(outcome, NotRotatable)
    revoked = await in_turn(
        desk, lambda c: revoke_key(c, keys[1], by=BY), lambda c: revoke_key(c, keys[1], by=Author(actor="late"))
    )
    changes = [t.fact for t in desk.told()[told:] if isinstance(t.fact, KeyChanged)]
    assert [f.change for f in changes] == [KeyChange.ROTATED, KeyChange.CREATED, KeyChange.REVOKED]
    assert (changes[-1].actor, changes[-1].revoked_at) == ("ada", revoked.revoked_at)


async def test_two_corrections_cannot_together_go_below_nothing(desk: FactsDesk) -> None:
    desk.sql(
        "INSERT INTO usage_hourly (customer_id, hour, model, version, price_id, meter, quantity) "
        "VALUES ('cust_1', $1, 'm', 'v', 'standard-v1', 'items', 40)",
        HOUR.hour,
    )
    outcome = await in_turn(
        desk,
        lambda c: adjust(c, HOUR, -30, by=BY, now=NOW),
        lambda c: adjust(c, HOUR, -11, by=BY, now=NOW),
    )
    assert isinstance(outcome, AdjustmentRefused)
    assert "are 10 with earlier corrections" in str(outcome)
    assert [t.fact.units for t in desk.told() if isinstance(t.fact, BillingAdjusted)] == [-30]


@pytest.mark.parametrize(("other", "expected"), [("items=80", False), ("requests=1", PriceConflict)])
async def test_two_publishers_of_one_price_agree_or_one_is_refused(desk: FactsDesk, other: str, expected: Any) -> None:
    outcome = await in_turn(
        desk,
        lambda c: publish_price(c, price("p2", ["items=80"], "usd"), by=BY),
        lambda c: publish_price(c, price("p2", [other], "usd"), by=BY),
    )
    assert isinstance(outcome, PriceConflict) if expected is PriceConflict else outcome.created is False
    assert len(desk.told()) == 1
