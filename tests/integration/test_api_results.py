"""Results that Redis lost, or never had: callers and status reads are answered from the log."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from uuid import UUID

from infra.kafka import open_producer
from infra.local.stack import Stack
from infra.redis import open_redis
from infra.settings import operator_settings
from schemas.codec import encode
from schemas.ids import new_request_id
from schemas.keys import RedisKeys
from schemas.records import InferenceFinished, InferenceRequested, Outcome
from schemas.topics import RESULTS, partition_for, requests_topic
from tests.conditions import eventually
from tests.factories import finished, requested
from tests.integration.api_desk import (
    DIGITS,
    Caller,
    Desk,
    Reply,
    calling,
    customer,
    echo_worker,
    open_desk,
    register,
    start_gateway,
)


async def status(caller: Caller, request_id: UUID | str) -> Reply:
    return await caller.call("GET", f"/v1/requests/{request_id}")


async def log(env: dict[str, str], *records: InferenceFinished | InferenceRequested) -> None:
    """Records as a gateway or a worker would have written them, at the times that they say."""
    settings = operator_settings(env)
    async with open_producer(settings.kafka) as producer:
        for record in records:
            is_request = isinstance(record, InferenceRequested)
            topic = (requests_topic() if is_request else RESULTS).in_namespace(settings.kafka.namespace)
            partition = partition_for(record.version, record.request_id.int, partitions=8, spread=2)
            await producer.send(
                topic.name,
                encode(record),
                key=record.request_id.bytes,
                partition=partition if is_request else None,
                timeout_s=10,
            )


async def test_what_redis_lost_is_told_from_the_log_to_its_customer_only(env: dict[str, str], spawn: Any) -> None:
    settings = operator_settings(env)
    keys = RedisKeys(namespace=settings.redis.namespace)
    await register(env, "digits", DIGITS)
    acme = customer(env, "Acme")
    gateway = start_gateway(spawn, env)
    async with calling(gateway, acme["key"]) as caller, open_redis(settings.redis) as redis:
        stranger = caller.with_key(customer(env, "Stranger")["key"])
        async with echo_worker(env):
            replies = [await caller.infer(items=n, id="mine") for n in (1, 2, 3)]
        ids = [UUID(r.headers["x-request-id"]) for r in replies]
        fresh = await status(caller, ids[0])
        assert (fresh.status, fresh.json["status"]) == (200, "succeeded"), fresh.text
        assert fresh.json["outputs"] == replies[0].json["outputs"]
        # Evicted, or flushed: the same for whoever looks for it.
        await redis.delete(*(keys.result(i) for i in ids))
        assert (await status(stranger, ids[0])).status == 404
        assert not await redis.exists(keys.result(ids[0]))
        looked = await asyncio.gather(*(status(caller, i) for i in ids))
        assert [r.json["outputs"] for r in looked] == [r.json["outputs"] for r in replies]
        assert looked[0].json == fresh.json
        assert looked[0].headers["Cache-Control"] == "private, no-store"
        for request_id in ids:  # put back, and not for ever
            assert 0 < await redis.ttl(keys.result(request_id)) <= 3600
        assert (await status(stranger, ids[0])).status == 404  # now from Redis

        mine = acme["customer_id"]
        failed = finished(
            requested(request_id=new_request_id(), customer_id=mine),
            outcome=Outcome.FAILED,
            error_code="boom",
            error_message="the model failed",
        )
        succeeded = finished(requested(request_id=failed.request_id, customer_id=mine))
        waiting = requested(request_id=new_request_id(), customer_id=mine)
        theirs = replace(waiting, request_id=new_request_id(), customer_id="cust_other")
        await log(env, failed, succeeded, waiting, theirs)
        first = (await status(caller, failed.request_id)).json
        assert (first["status"], first["error"]["code"], first["usage"]) == ("failed", "boom", {})
        assert "outputs" not in first
        accepted = await status(caller, waiting.request_id)
        assert (accepted.status, accepted.json["status"], accepted.json["model"]) == (200, "accepted", "digits")
        for unknown in (theirs.request_id, new_request_id(), "nonsense"):
            refused = await status(caller, unknown)
            assert (refused.status, refused.json["code"]) == (404, "request_not_found")
            assert refused.headers["Content-Type"] == "application/problem+json"
        assert (await status(caller.with_key(None), ids[0])).status == 401
        await log(env, finished(waiting, outcome=Outcome.CANCELLED))
        assert (await status(caller, waiting.request_id)).json["status"] == "cancelled"


async def test_callers_are_answered_from_the_log_when_workers_cannot_write_to_redis(
    env: dict[str, str], spawn: Any
) -> None:
    await register(env, "digits", DIGITS)
    acme = customer(env, "Acme")
    gateway = start_gateway(spawn, env, INFERLOG_DEADLINE_S="60")
    async with calling(gateway, acme["key"]) as caller, echo_worker(env, copies=False) as seen:
        replies = await asyncio.gather(*(caller.infer(items=1 + n % 3) for n in range(40)))
        assert {r.status for r in replies} == {200}
        assert len(seen) == 40
        for reply in replies:
            assert reply.json["id"] == reply.headers["x-request-id"]
        counts = (await caller.call("GET", "/readyz")).json["counts"]
        assert counts["results_from_log"] >= 40
        settings = operator_settings(env)
        keys = RedisKeys(namespace=settings.redis.namespace)
        async with open_redis(settings.redis) as redis:
            first = keys.result(UUID(replies[0].headers["x-request-id"]))

            async def put_back() -> bool:
                return bool(await redis.exists(first))

            await eventually(put_back)


async def test_calls_go_on_while_redis_is_stopped_or_frozen(env: dict[str, str], spawn: Any, stack: Stack) -> None:
    async with open_desk(spawn, env, INFERLOG_DEADLINE_S="60") as desk:
        assert (await desk.caller.infer()).status == 200
        for how in ("stopped", "frozen"):
            over = asyncio.Event()
            calls = [asyncio.ensure_future(keep_calling(desk, over)) for _ in range(4)]
            await eventually(lambda: len(desk.seen) > 4)
            if how == "stopped":
                await asyncio.to_thread(stack.stop_part, "valkey", kill=True)
            else:
                stack.pause_part("valkey")
            try:

                async def answered_from_the_log() -> bool:
                    ready = await desk.caller.call("GET", "/readyz")
                    assert "results_cache" in ready.json["degraded"]
                    return bool(ready.json["counts"]["results_from_log"] > 20)

                await eventually(answered_from_the_log)
                assert (await status(desk.caller, desk.seen[-1].request_id)).status == 200
            finally:
                if how == "stopped":
                    await asyncio.to_thread(stack.start_part, "valkey")
                else:
                    stack.resume_part("valkey")
            over.set()
            await asyncio.gather(*calls)


async def keep_calling(desk: Desk, over: asyncio.Event) -> None:
    while not over.is_set():
        reply = await desk.caller.infer(timeout_s=10.0)
        assert reply.status == 200, reply.text
