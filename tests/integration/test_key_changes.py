"""Keys and customers on real servers: what commands change and tell, and that whoever remembers keys hears of it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import asyncpg
import pytest

from api.access.key_feed import KeyFeed
from api.access.key_record import caller_of
from api.access.key_shape import MintedKey, mint
from api.access.key_source import PostgresKeys
from api.access.keys import Keys
from api.access.revocations import RedisRevokedSet, Revocations, RevokedKey
from api.admission.caller import Cap, Concurrency
from api.errors import Unauthorized
from api.operators.customers import change_customer
from api.operators.keyring import change_key, create_key, revoke_key
from infra.actor import Author
from infra.postgres import open_pool
from infra.redis import open_redis
from infra.settings import operator_settings
from schemas.facts import CustomerChange, CustomerChanged, KeyChange, KeyChanged, RateLimit, SpendCap
from schemas.keys import RedisKeys
from schemas.topics import CUSTOMERS, KEYS
from tests.integration.facts_desk import FactsDesk, what

BY = Author(actor="ada", reason="a test")
SIGNED = ("--actor", "ada", "--reason", "a test")


@pytest.fixture
def desk(env: dict[str, str]) -> FactsDesk:
    made = FactsDesk(env)
    made.sql("INSERT INTO customers (customer_id, name, requests_per_s, burst) VALUES ('cust_1', 'acme', 10, 20)")
    made.sql("INSERT INTO models VALUES ('minilm', 'EMBEDDINGS'), ('digits', 'TENSORS')")
    return made


# -- the commands -----------------------------------------------------------------------------------------------------


def test_a_keys_scope_limits_and_end_are_changed_one_by_one_and_told(desk: FactsDesk) -> None:
    made = json.loads(
        desk.said(
            "keys", "create", "acme", "--models", "minilm,digits", "--operations", "infer", "--limit", "items=60/1m",
            "--limit", "tokens=9/1h,burst=4", "--max-concurrent", "3", "--json", *SIGNED,
        )
    )  # fmt: skip
    key = made["key_id"]
    items = {"unit": "items", "model": None, "amount": 60, "window_s": 60, "burst": 60}
    assert (made["models"], made["operations"], made["max_concurrent"]) == (["digits", "minilm"], ["infer"], 3)
    assert made["limits"][0] == items
    at = (datetime.now(timezone.utc) + timedelta(days=3)).replace(microsecond=0)
    steps: list[tuple[tuple[str, ...], KeyChange, dict[str, Any]]] = [
        (("scope", key, "--models", "minilm", "--all-operations"), KeyChange.SCOPED,
         {"models": ("minilm",), "operations": ()}),
        (("limits", key, "--without", "tokens", "--burst", "2"), KeyChange.LIMITED,
         {"limits": (RateLimit(**items),), "burst": 2}),
        (("limits", key, "--limit", "items=1/1s", "--no-max-concurrent"), KeyChange.LIMITED,
         {"limits": (RateLimit(unit="items", amount=1, window_s=1, burst=1),), "max_concurrent": None}),
        (("expire", key, "--at", at.isoformat()), KeyChange.EXPIRY_CHANGED, {"expires_at": at}),
        (("expire", key, "--never"), KeyChange.EXPIRY_CHANGED, {"expires_at": None}),
    ]  # fmt: skip
    told = [t.fact for t in desk.told()]
    state = what(told[-1])
    for command, change, fields in steps:
        answer = json.loads(desk.said("keys", *command, "--json", *SIGNED))
        assert answer["changed"]
        if "--without" not in command:
            assert not json.loads(desk.said("keys", *command, "--json"))["changed"], "a second time"
        (fact,) = [t.fact for t in desk.told()][len(told) :]
        told.append(fact)
        state.update(fields, change=change)
        assert what(fact) == state, command
    desk.said("keys", "expire", key, "--in", "90d")
    successor = json.loads(desk.said("keys", "rotate", key, "--json", *SIGNED))
    last = desk.told()[-1]
    assert isinstance(last.fact, KeyChanged) and last.topic == KEYS.name
    assert (last.fact.models, last.fact.limits) == (
        ("minilm",),
        (RateLimit(unit="items", amount=1, window_s=1, burst=1),),
    )
    shown = json.loads(desk.said("keys", "show", successor["key_id"], "--json"))
    assert (shown["models"], shown["limits"][0]["amount"]) == (["minilm"], 1)
    assert {k["key_id"] for k in json.loads(desk.said("keys", "list", "acme", "--json"))} == {key, successor["key_id"]}
    assert "items=1/1s,burst=1" in desk.said("keys", "show", key)
    desk.said("keys", "revoke", key)
    for command in (("scope", key, "--all-models"), ("limits", key, "--burst", "1"), ("expire", key, "--never")):
        assert "is revoked; make a new one" in desk.call("keys", *command).output


def test_a_customers_limits_and_cap_are_changed_and_told(desk: FactsDesk) -> None:
    made = json.loads(
        desk.said("customers", "create", "Brook", "--requests-per-s", "5", "--burst", "6", "--limit",
                  "items=9/1s,model=digits", "--json", *SIGNED)
    )  # fmt: skip
    customer = made["customer_id"]
    of_model = RateLimit(unit="items", model="digits", amount=9, window_s=1, burst=9)
    tokens = RateLimit(unit="tokens", amount=100, window_s=3600, burst=7)
    state = {
        "customer_id": customer, "change": CustomerChange.CREATED, "name": "Brook", "requests_per_s": 5, "burst": 6,
        "limits": (of_model,), "max_concurrent": None, "spend_cap": None, "actor": "ada", "reason": "a test",
    }  # fmt: skip
    (told,) = desk.told()
    assert (told.topic, told.key, what(told.fact)) == (CUSTOMERS.name, customer, state)
    assert isinstance(told.fact, CustomerChanged)
    assert [told.fact.occurred_at] == [
        r["created_at"] for r in desk.sql("SELECT * FROM customers WHERE name = 'Brook'")
    ]
    steps: list[tuple[tuple[str, ...], CustomerChange, dict[str, Any]]] = [
        (("limits", "Brook", "--limit", "tokens=100/1h,burst=7", "--max-concurrent", "4"), CustomerChange.LIMITED,
         {"limits": (of_model, tokens), "max_concurrent": 4}),
        (("limits", customer, "--without", "items,model=digits", "--requests-per-s", "1"), CustomerChange.LIMITED,
         {"limits": (tokens,), "requests_per_s": 1}),
        (("cap", customer, "--per-month", "250.5", "--currency", "usd"), CustomerChange.CAPPED,
         {"spend_cap": SpendCap(amount_micros=250_500_000, currency="usd")}),
        (("cap", customer, "--none"), CustomerChange.CAPPED, {"spend_cap": None}),
    ]  # fmt: skip
    for command, change, fields in steps:
        assert json.loads(desk.said("customers", *command, "--json", *SIGNED))["changed"]
        if "--without" not in command:
            assert "is like that already" in desk.said("customers", *command)
        state |= {**fields, "change": change}
        assert what(desk.told()[-1].fact) == state, command
    assert len(desk.told()) == 5
    noted = desk.call("customers", "cap", customer, "--per-month", "0", "--currency", "xau")
    assert "no price is in 'xau'" in noted.stderr
    (shown,) = [c for c in json.loads(desk.said("customers", "list", "--json")) if c["customer_id"] == customer]
    assert shown == json.loads(desk.said("customers", "show", "Brook", "--json"))
    assert (shown["spend_cap"], shown["max_concurrent"]) == ({"amount_micros": 0, "currency": "xau"}, 4)
    assert "0.00 xau" in desk.said("customers", "show", customer)


def test_commands_say_what_holds_beside_what_was_changed(desk: FactsDesk) -> None:
    """Keys that stay slow, calls that a first cap holds up, a successor that still works; and a whole key is its id."""
    slow, fast, gone = (
        json.loads(desk.said("keys", "create", "acme", "--requests-per-s", rate, "--json"))
        for rate in ("10", "90", "1")
    )
    desk.said("keys", "revoke", gone["key_id"])
    raised = desk.said("customers", "limits", "acme", "--requests-per-s", "50")
    assert f"keys' own rates stay below the customer's; see  inferlog keys limits: {slow['key_id']}\n" in raised
    raised = json.loads(desk.said("customers", "limits", "acme", "--burst", "90", "--json"))
    assert raised["slower_keys"] == [slow["key_id"], fast["key_id"]], "their bursts"
    assert json.loads(desk.said("customers", "limits", "acme", "--max-concurrent", "9", "--json"))["slower_keys"] == []
    for amount, is_first in (("0.000512", True), ("1", False)):
        capped = desk.call("customers", "cap", "acme", "--per-month", amount, "--currency", "usd")
        assert ("its calls are answered 503 spend_unknown" in capped.stderr) == is_first
        assert f"{amount} usd" in desk.said("customers", "show", "acme").replace("1.00", "1")
    ends = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(days=1)
    made = json.loads(desk.said("keys", "create", "acme", "--expires-at", ends.isoformat(), "--json"))
    assert made["expires_at"] == ends.isoformat()
    assert (
        "is over; expected a time to come" in desk.call("keys", "create", "acme", "--expires-at", "2020-01-01").output
    )
    successor = json.loads(desk.said("keys", "rotate", made["key_id"], "--json"))
    revoked = desk.call("keys", "revoke", made["key"])
    assert f"its successor {successor['key_id']} still works" in revoked.stdout
    assert f"a whole key was given; its id is {made['key_id']}" in revoked.stderr
    assert made["key"] not in revoked.output
    assert json.loads(desk.said("keys", "show", made["key_id"], "--json"))["revoked_at"]
    desk.said("keys", "revoke", successor["key"])
    assert "still works" not in desk.said("keys", "revoke", made["key_id"])


def test_what_is_wrong_with_an_option_is_said_by_its_name(desk: FactsDesk) -> None:
    key = json.loads(desk.said("keys", "create", "acme", "--json"))["key_id"]
    told = desk.told()
    for words, command in [
        ("'--models': expected names of models", ("keys", "create", "acme", "--models", "a,,b")),
        ("--models: there is no model 'nope'", ("keys", "create", "acme", "--models", "digits,nope")),
        ("'--operations': expected some of infer,", ("keys", "scope", key, "--operations", "infer,write")),
        ("expected names or all of them", ("keys", "scope", key, "--models", "digits", "--all-models")),
        ("nothing to change; say --models", ("keys", "scope", key)),
        ("'--limit': expected UNIT=AMOUNT/WINDOW", ("keys", "limits", key, "--limit", "calls=1/1s")),
        ("a limit of one model is a customer's", ("keys", "limits", key, "--limit", "items=1/1s,model=digits")),
        ("expected one limit of each unit", ("keys", "create", "acme", *("--limit", "items=1/1s") * 2)),
        ("there is no limit of items", ("keys", "limits", key, "--without", "items")),
        ("expected one of them", ("keys", "limits", key, "--max-concurrent", "1", "--no-max-concurrent")),
        ("--expires-in: expected an end before the year 2200", ("keys", "create", "acme", "--expires-in", "99999d")),
        ("--in: expected an end before the year 2200", ("keys", "expire", key, "--in", "999999d")),
        ("--overlap: expected an end before the year 2200", ("keys", "rotate", key, "--overlap", "99999d")),
        ("expected one of --in, --at and --never", ("keys", "expire", key, "--in", "1d", "--never")),
        ("--at: 2020-01-01T00:00:00Z is over; to end the key now", ("keys", "expire", key, "--at", "2020-01-01")),
        ("there is no key with the id 'nope'", ("keys", "show", "nope")),
        ("there is no key with the id 'nope'", ("keys", "scope", "nope", "--all-models")),
        ("--limit: there is no model 'nope'", ("customers", "limits", "acme", "--limit", "items=1/1s,model=nope")),
        ("'--per-month': expected an amount", ("customers", "cap", "acme", "--per-month", "1e3", "--currency", "usd")),
        ("'--currency': expected a currency's three letters", ("customers", "cap", "acme", "--currency", "USD")),
        ("expected --per-month and --currency, or --none", ("customers", "cap", "acme", "--per-month", "5")),
        ("there is no customer 'nobody'", ("customers", "show", "nobody")),
    ]:  # fmt: skip
        refused = desk.call(*command)
        assert refused.exit_code in (1, 2), command
        assert words in " ".join(refused.output.split()), refused.output
    assert desk.told() == told


# -- who remembers keys hears of it -----------------------------------------------------------------------------------


@asynccontextmanager
async def remembering(desk: FactsDesk) -> AsyncIterator[tuple[KeyFeed, Keys, PostgresKeys]]:
    async with open_pool(operator_settings(desk.env).postgres) as pool:
        source = PostgresKeys(pool)
        keys = Keys(source, environment="test")
        feed = KeyFeed(source, keys)
        await feed.read()
        yield feed, keys, source


async def made_key(desk: FactsDesk) -> MintedKey:
    connection, minted = await desk.connect(), mint("test")
    limits = {"requests_per_s": 9, "burst": 9}
    await create_key(connection, minted, customer_id="cust_1", label="", lifetime=None, by=BY, **limits)
    await connection.close()
    return minted


async def test_every_kind_of_change_is_followed_and_nothing_else_is_looked_up(desk: FactsDesk) -> None:
    key = await made_key(desk)
    connection = await desk.connect()
    key_id = key.key_id

    async def by_command(kind: KeyChange, **fields: Any) -> None:
        await change_key(connection, key_id, kind, lambda k, now: replace(k, **fields), by=BY)

    async def of_customer(kind: CustomerChange, **fields: Any) -> None:
        await change_customer(connection, "cust_1", kind, lambda c: replace(c, **fields), by=BY)

    async with remembering(desk) as (feed, keys, _):
        found = await keys.identify(f"Bearer {key.secret}")
        lookups = 0
        real = keys._source.find

        async def counted(key_id: str) -> Any:
            nonlocal lookups
            lookups += 1
            return await real(key_id)

        keys._source.find = counted  # type: ignore[method-assign]
        places = (Concurrency(name=f"key:{key_id}", most=5),)
        capped = SpendCap(amount_micros=7, currency="usd")
        items = RateLimit(unit="items", amount=2, window_s=1, burst=8)
        of_model = RateLimit(unit="requests", model="digits", amount=2, window_s=1, burst=8)
        steps: list[tuple[Any, Any]] = [
            (by_command(KeyChange.SCOPED, models=("digits",)), lambda c: c.models == {"digits"}),
            (by_command(KeyChange.SCOPED, operations=("infer",)), lambda c: c.operations == {"infer"}),
            (by_command(KeyChange.LIMITED, burst=3), lambda c: c.limits[0].burst == 3),
            (by_command(KeyChange.LIMITED, limits=(items,)), lambda c: c.limits[1].name == f"key:{key_id}:items"),
            (by_command(KeyChange.LIMITED, max_concurrent=5), lambda c: c.concurrency == places),
            (of_customer(CustomerChange.LIMITED, limits=(of_model,)), lambda c: c.limits[-1].name == "model:digits"),
            (of_customer(CustomerChange.LIMITED, max_concurrent=6), lambda c: c.concurrency[1].most == 6),
            (of_customer(CustomerChange.CAPPED, spend_cap=capped), lambda c: c.cap == Cap(**asdict(capped))),
            # By hand, past every command: triggers see it.
            (connection.execute("UPDATE rate_limits SET burst = 1"), lambda c: c.limits[-1].burst == 1),
            (connection.execute("DELETE FROM rate_limits WHERE key_id = $1", key_id), lambda c: len(c.limits) == 3),
        ]  # fmt: skip
        for number, (change, follows) in enumerate(steps, 1):
            await change
            await feed.read()
            for _ in range(3):
                found = await keys.identify(f"Bearer {key.secret}")
            assert follows(found), number
            assert lookups == number
        await feed.read()
        await keys.identify(f"Bearer {key.secret}")
        assert lookups == len(steps), "nothing changed"
        await revoke_key(connection, key_id, by=BY)
        await feed.read()
        with pytest.raises(Unauthorized, match="revoked"):
            await keys.identify(f"Bearer {key.secret}")
    with pytest.raises(asyncpg.PostgresError, match="only a minute after it was revoked"):
        await connection.execute("DELETE FROM api_keys WHERE key_id = $1", key_id)
    await connection.execute("UPDATE api_keys SET revoked_at = now() - interval '2 minutes' WHERE key_id = $1", key_id)
    await connection.execute("DELETE FROM api_keys WHERE key_id = $1", key_id)
    await connection.close()


@pytest.mark.parametrize("seed", range(3))
async def test_no_change_is_missed_however_late_it_is_committed_and_none_is_told_twice(
    desk: FactsDesk, seed: int
) -> None:
    """Transactions that are held open over several reads, ended in any order or rolled back, each with savepoints."""
    chance = random.Random(seed)
    count = 12
    keys = [(await made_key(desk)).key_id for _ in range(count)]
    writers = [await desk.connect() for _ in range(count)]
    heard: list[str] = []
    done: set[int] = set()
    async with open_pool(operator_settings(desk.env).postgres) as pool:
        source = PostgresKeys(pool)
        snapshot = (await source.changes(None)).snapshot
        begun: dict[int, Any] = {}
        waiting = list(range(count))
        while waiting or begun:
            if waiting and (not begun or chance.random() < 0.5):
                number = waiting.pop()
                begun[number] = transaction = writers[number].transaction()
                await transaction.start()
                async with writers[number].transaction():  # its row names the outer transaction all the same
                    await writers[number].execute(
                        "UPDATE api_keys SET burst = burst + 1 WHERE key_id = $1", keys[number]
                    )
            else:
                number = chance.choice(sorted(begun))
                if chance.random() < 0.25:
                    await begun.pop(number).rollback()
                else:
                    await begun.pop(number).commit()
                    done.add(number)
            if chance.random() < 0.7:
                found = await source.changes(snapshot)
                snapshot = found.snapshot
                heard += found.key_ids
        found = await source.changes(snapshot)
        heard += found.key_ids
        assert (await source.changes(found.snapshot)).key_ids == []
    for writer in writers:
        await writer.close()
    assert sorted(heard) == sorted(keys[n] for n in done)


async def test_rows_that_were_restored_from_another_server_do_not_stand_in_the_way(desk: FactsDesk) -> None:
    key, other = await made_key(desk), await made_key(desk)
    async with remembering(desk) as (_, _, source):
        before = (await source.changes(None)).snapshot
        connection = await desk.connect()
        await connection.execute("ALTER TABLE api_keys DISABLE TRIGGER note_change")
        await connection.execute("UPDATE api_keys SET changed_in = '99999999999' WHERE key_id = $1", key.key_id)
        await connection.execute("ALTER TABLE api_keys ENABLE TRIGGER note_change")
        assert (await source.changes(before)).key_ids == []
        await connection.execute("UPDATE api_keys SET burst = 1 WHERE key_id = $1", other.key_id)
        await connection.close()
        assert (await source.changes(before)).key_ids == [other.key_id]


async def test_a_key_is_read_as_it_was_made(desk: FactsDesk) -> None:
    key = await made_key(desk)
    async with remembering(desk) as (_, keys, source):
        record = await source.find(key.key_id)
        assert record is not None and key.secret not in repr(record) and repr(key.secret_sha256) not in repr(record)
        assert [b.name for b in caller_of(record).limits] == [f"key:{key.key_id}", "customer:cust_1"]
        assert await keys.identify(f"Bearer {key.secret}") == caller_of(record)


async def test_the_set_of_revoked_keys_is_filled_again_after_redis_lost_it(desk: FactsDesk) -> None:
    """2,000 of them, by another server's mark as well; and those that have expired need not be in it."""
    settings = operator_settings(desk.env)
    names = RedisKeys(namespace=settings.redis.namespace)
    desk.sql(
        "INSERT INTO api_keys (key_id, customer_id, secret_sha256, label, requests_per_s, burst, revoked_at, "
        "expires_at) SELECT 'k' || n, 'cust_1', sha256(''), '', 1, 1, now(), CASE WHEN n > 2000 THEN now() END "
        "FROM generate_series(1, 2010) AS n"
    )
    async with remembering(desk) as (_, _, source), open_redis(settings.redis, timeout_s=5.0) as redis:
        kept = Revocations(source, RedisRevokedSet(redis, names))

        async def size() -> int:
            return int(await redis.scard(names.revoked_keys("cust_1")))

        began_s = time.monotonic()
        assert await kept.keep()
        took_s = time.monotonic() - began_s
        assert await size() == 2000, f"in {took_s:.3f} s"
        assert not await kept.keep()
        for lost in (names.revoked_whole(), names.revoked_keys("cust_1")):
            await redis.delete(lost)
        assert await kept.keep()
        assert (await size(), await redis.ttl(names.revoked_whole())) == (2000, -1)
        await redis.set(names.revoked_whole(), "another run of the server")
        await redis.delete(names.revoked_keys("cust_1"))
        assert await kept.keep()
        kept.told([RevokedKey("cust_1", "later")])
        assert not await kept.keep()
        assert await size() == 2001
        repair = await RedisRevokedSet(redis, names).begin()
        await redis.delete(repair)
        assert not await RedisRevokedSet(redis, names).finish(repair)
