"""What a customer is told of its own usage, from the ledger's tables."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from typing import Any
from urllib.parse import urlencode

from aiokafka.partitioner import DefaultPartitioner

from api.usage_question import KNOWN
from infra.postgres import Connection, connect
from infra.settings import operator_settings
from schemas.keys import ledger_group
from schemas.topics import USAGE
from tests.conditions import eventually
from tests.integration.api_desk import Desk, open_desk
from tests.processes import ROOT

OLD, NEW = "a" * 64, "b" * 64
# Kolkata is 5:30 ahead: its 2 March begins within the UTC hour of 18:00.
ROWS = [
    ("2026-03-01T10:00Z", "digits", OLD, "items", 5),
    ("2026-03-01T18:00Z", "digits", OLD, "items", 7),
    ("2026-03-01T18:00Z", "digits", NEW, "items", 11),
    ("2026-03-01T18:00Z", "texts", NEW, "tokens", 40),
    ("2026-03-01T19:00Z", "digits", NEW, "items", 100),
    ("2026-04-01T00:00Z", "digits", NEW, "items", 2**63 - 1),
    ("2026-04-01T00:00Z", "digits", OLD, "items", 2**63 - 1),
]
MARCH = "from=2026-03-01&to=2026-04-01"


async def put(connection: Connection, customer: str, rows: list[tuple[str, str, str, str, int]]) -> None:
    await connection.executemany(
        "INSERT INTO usage_hourly VALUES ($1, $2::text::timestamptz, $3, $4, 'standard-v1', $5, $6)",
        [(customer, *row) for row in rows],
    )


async def read(desk: Desk, query: str, status: int = 200) -> Any:
    answer = await desk.caller.call("GET", f"/v1/usage?{query}")
    assert answer.status == status, answer.text
    return answer.json


def lines(document: Any, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(line[name] for name in names) for line in document["data"]]


async def test_usage_is_the_callers_own_in_any_zone_and_grouping(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env) as desk:
        connection = await connect(operator_settings(env).postgres)
        await put(connection, desk.acme["customer_id"], ROWS)
        await put(connection, "cust_other", ROWS)

        hours = await read(desk, MARCH)
        assert hours["data"][0] == {
            "start": "2026-03-01T10:00:00Z",
            "end": "2026-03-01T11:00:00Z",
            "model": "digits",
            "meter": "items",
            "quantity": 5,
        }
        assert lines(hours, "start", "model", "quantity")[1:] == [
            ("2026-03-01T18:00:00Z", "digits", 18),
            ("2026-03-01T18:00:00Z", "texts", 40),
            ("2026-03-01T19:00:00Z", "digits", 100),
        ]
        assert hours["totals"] == {"items": 123, "tokens": 40}
        assert (hours["interval"], hours["zone"], hours["by"]) == ("hour", "UTC", ["model", "meter"])
        assert (hours["from"], hours["to"]) == ("2026-03-01T00:00:00Z", "2026-04-01T00:00:00Z")
        assert "begins in it" in hours["rule"]
        assert hours["next"] is None

        days = await read(desk, f"{MARCH}&interval=day&by=version&zone=Asia/Kolkata&meter=items")
        assert lines(days, "start", "end", "version", "quantity") == [
            ("2026-03-01T00:30:00+05:30", "2026-03-02T00:30:00+05:30", OLD, 12),
            ("2026-03-01T00:30:00+05:30", "2026-03-02T00:30:00+05:30", NEW, 11),
            ("2026-03-02T00:30:00+05:30", "2026-03-03T00:30:00+05:30", NEW, 100),
        ]
        for zone in ("UTC", "Asia/Kathmandu", "America/St_Johns", "Australia/Lord_Howe"):
            for interval in ("hour", "day", "month", "total"):
                for by in ("", "model,version,price_id"):
                    query = urlencode({"interval": interval, "zone": zone, "by": by})
                    found = await read(desk, f"{MARCH}&{query}")
                    sums: Counter[str] = Counter()
                    for line in found["data"]:
                        sums[line["meter"]] += line["quantity"]
                    assert sums == found["totals"]

        assert (await read(desk, f"{MARCH}&model=texts"))["totals"] == {"tokens": 40}
        assert (await read(desk, f"{MARCH}&version=aaaa&price_id=standard-v1"))["totals"] == {"items": 12}
        assert (await read(desk, f"{MARCH}&version=%25"))["totals"] == {}
        page = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
        calls = re.findall(r'^\$ curl -s "\$API/v1/usage\?([^"]*)"', page, flags=re.MULTILINE)
        assert len(calls) > 3
        for call in calls:
            assert (await desk.caller.call("GET", f"/v1/usage?{call}")).status == 200, call
        shown = json.loads(re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)[0])
        assert list(shown) == list(hours)
        assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE)))) >= set(
            KNOWN
        )

        # Sums past what 64 bits hold are still numbers.
        assert (await read(desk, "month=2026-04&interval=total"))["totals"] == {"items": 2 * (2**63 - 1)}
        await connection.close()


async def test_pages_make_up_the_whole_and_csv_says_the_same(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env) as desk:
        connection = await connect(operator_settings(env).postgres)
        names = ["plain", "com,ma", 'quo"te', "=1+1", "li\nne", "ünï"]
        rows = [(f"2026-03-{d:02}T0{h}:00Z", m, OLD, "items", d + h) for d in (1, 2, 3) for h in (1, 2) for m in names]
        await put(connection, desk.acme["customer_id"], rows)
        query = "month=2026-03&interval=day&by=model,version"
        whole = await read(desk, query)
        assert len(whole["data"]) == 3 * len(names)
        pages, following = [], f"/v1/usage?{query}&limit=5"
        while following:
            page = (await desk.caller.call("GET", following)).json
            assert page["totals"] == whole["totals"]
            pages.append(page["data"])
            following = page["next"]
        assert [len(page) for page in pages] == [5, 5, 5, 3]
        assert [line for page in pages for line in page] == whole["data"]

        text, following = "", f"/v1/usage?{query}&limit=10&format=csv"
        while following:
            answer = await desk.caller.call("GET", following)
            assert answer.headers["Content-Type"].startswith("text/csv")
            assert answer.headers["x-complete-until"] == "unknown"
            head, _, body = answer.text.partition("\r\n")
            assert head == "start,end,model,version,price_id,meter,quantity"
            text += body
            link = re.fullmatch(r'<(.*)>; rel="next"', answer.headers.get("Link", ""))
            following = link.group(1) if link else None
        told = list(csv.reader(io.StringIO(text, newline="")))
        assert [[*row[:4], row[5], int(row[6])] for row in told] == [
            [line[name] for name in ("start", "end", "model", "version", "meter", "quantity")] for line in whole["data"]
        ]
        assert {row[4] for row in told} == {""}
        await connection.close()


async def test_it_says_up_to_when_it_is_complete_and_a_slow_ledger_is_given_up_there_too(
    env: dict[str, str], spawn: Any
) -> None:
    async with open_desk(spawn, env) as desk:
        connection = await connect(operator_settings(env).postgres)
        # Other groups, topics and partitions say nothing about this customer's usage.
        namespace = env["INFERLOG_NAMESPACE"]
        topic, group = USAGE.in_namespace(namespace), ledger_group(namespace)
        partition = DefaultPartitioner()(desk.acme["customer_id"].encode(), [*range(8)], [*range(8)])
        mark = "INSERT INTO usage_watermarks VALUES ($1, $2, $3, $4::text::timestamptz, $5::text::timestamptz)"
        for place in [("another", topic.name, partition), (group, "another", partition)] + [
            (group, topic.name, p) for p in range(topic.partitions) if p != partition
        ]:
            await connection.execute(mark, *place, "2026-03-05T00:00:00Z", "2026-03-05T00:00:00Z")
        unknown = await read(desk, "")
        assert (unknown["complete_until"], unknown["ledger_seen_at"]) == (None, None)
        assert unknown["as_of"] > "2026"
        await connection.execute(mark, group, topic.name, partition, "2026-03-02T01:02:03Z", "2026-03-02T01:02:15Z")
        known = await read(desk, "zone=Asia/Tokyo")
        assert known["complete_until"] == "2026-03-02T10:02:03+09:00"
        assert known["ledger_seen_at"] == "2026-03-02T10:02:15+09:00"

        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("LOCK TABLE usage_hourly IN ACCESS EXCLUSIVE MODE")
        refused = await desk.caller.call("GET", "/v1/usage")
        assert (refused.status, refused.json["code"]) == (503, "ledger_away")

        async def ended() -> bool:
            waiting = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            return await connection.fetchval(waiting) == 0

        await eventually(ended, what="the statement to end at the server")
        await transaction.rollback()
        assert (await desk.caller.call("GET", "/v1/usage")).status == 200
        await connection.close()
