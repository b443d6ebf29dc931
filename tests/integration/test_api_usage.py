"""What a customer is told of its own usage, from the ledger's tables."""

from __future__ import annotations

from typing import Any

from aiokafka.partitioner import DefaultPartitioner

from infra.postgres import connect
from infra.settings import operator_settings
from schemas.keys import ledger_group
from schemas.topics import USAGE
from tests.integration.api_desk import open_desk


async def test_usage_shows_only_the_callers_own_hours(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env) as desk:
        mine = desk.acme["customer_id"]
        connection = await connect(operator_settings(env).postgres)
        for who, hour, model, meter, quantity in [
            (mine, "2026-03-01T10:00Z", "digits", "items", 5),
            (mine, "2026-03-01T11:00Z", "digits", "items", 7),
            (mine, "2026-03-01T11:00Z", "texts", "tokens", 40),
            (mine, "2026-03-02T00:00Z", "digits", "items", 100),
            ("cust_other", "2026-03-01T11:00Z", "digits", "items", 1000),
        ]:
            await connection.execute(
                "INSERT INTO usage_hourly VALUES ($1, $2::text::timestamptz, $3, 'v', 'p', $4, $5)",
                who, hour, model, meter, quantity,
            )  # fmt: skip
        # Other groups, topics and partitions say nothing about this customer's usage.
        topic, namespace = USAGE.in_namespace(env["INFERLOG_NAMESPACE"]), env["INFERLOG_NAMESPACE"]
        partition, group = DefaultPartitioner()(mine.encode(), [*range(8)], [*range(8)]), ledger_group(namespace)
        moved = "INSERT INTO consumer_offsets VALUES ($1, $2, $3, 5, $4::text::timestamptz)"
        for place in [("another", topic.name, partition), (group, "another", partition)] + [
            (group, topic.name, p) for p in range(topic.partitions) if p != partition
        ]:
            await connection.execute(moved, *place, "2026-03-05T00:00:00Z")
        assert (await desk.caller.call("GET", "/v1/usage")).json["ledger_moved_at"] is None
        await connection.execute(moved, group, topic.name, partition, "2026-03-02T01:02:03Z")
        await connection.close()
        hours = (await desk.caller.call("GET", "/v1/usage?from=2026-03-01&to=2026-03-02")).json
        assert hours["data"] == [
            {"start": "2026-03-01T10:00:00Z", "model": "digits", "meter": "items", "quantity": 5},
            {"start": "2026-03-01T11:00:00Z", "model": "digits", "meter": "items", "quantity": 7},
            {"start": "2026-03-01T11:00:00Z", "model": "texts", "meter": "tokens", "quantity": 40},
        ]
        assert hours["totals"] == {"items": 12, "tokens": 40}
        assert hours["ledger_moved_at"] == "2026-03-02T01:02:03Z"
        days = (await desk.caller.call("GET", "/v1/usage?from=2026-03-01&to=2026-03-03&group=day&meter=items")).json
        assert [(d["start"], d["quantity"]) for d in days["data"]] == [
            ("2026-03-01T00:00:00Z", 12),
            ("2026-03-02T00:00:00Z", 100),
        ]
        assert days["totals"] == {"items": 112}
        one = (await desk.caller.call("GET", "/v1/usage?from=2026-03-01&to=2026-03-02&model=texts")).json
        assert one["totals"] == {"tokens": 40}
