"""A key never exceeds its rate, also across a killed Valkey."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest

from api.admission.buckets import Limit
from api.errors import RateLimited
from api.limits.limiter import Limiter, RedisScript
from infra.local import valkey
from infra.local.stack import Stack
from infra.redis import open_redis
from infra.settings import RedisSettings, replay_settings
from schemas.keys import RedisKeys
from streams.replay.verify import verify
from tests.conditions import eventually
from tests.fakes import demand
from tests.integration.api_desk import customer, open_desk


async def spent(environment: dict[str, str], key: str) -> list[bool]:
    """Whether each of five calls was admitted; a bucket of three that takes a quarter of an hour per unit."""
    limits = (Limit(name=f"key:{key}", interval_us=900_000_000, burst=3),)
    admitted = []
    settings = RedisSettings(url=environment["INFERLOG_REDIS_URL"], namespace="")
    async with open_redis(settings, timeout_s=20.0) as client:
        # As long as it takes: on a busy machine a late answer is not what this is about.
        limiter = Limiter(RedisScript(client, within_s=20.0), RedisKeys())
        for _ in range(5):
            try:
                await limiter.take(demand("c", key, limits))
                admitted.append(True)
            except RateLimited:
                admitted.append(False)
    return admitted


@pytest.mark.parametrize("keeps", [True, False], ids=["as it is", "without its file"])
def test_a_killed_limiter_remembers_what_was_spent(
    stack: Stack, servers: dict[str, str], monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """Or every restart would admit each key's burst once more, far above its rate."""
    if not keeps:
        monkeypatch.setattr(valkey, "_CONFIGURATION", valkey._CONFIGURATION.replace("appendonly yes", "appendonly no"))
        stack.stop_part("valkey")
        stack.start_part("valkey")
    environment, key = servers, f"k-{uuid4()}"
    assert asyncio.run(spent(environment, key)) == [True, True, True, False, False]
    for _ in range(2):
        stack.stop_part("valkey", kill=True)
        stack.start_part("valkey")
        again = asyncio.run(spent(environment, key))
        assert again == ([False] * 5 if keeps else [True, True, True, False, False])
    if not keeps:
        monkeypatch.undo()
        stack.stop_part("valkey")
        stack.start_part("valkey")


async def test_what_a_gateway_decides_without_redis_is_proved_from_the_log(
    env: dict[str, str], spawn: Any, stack: Stack
) -> None:
    async with open_desk(spawn, env, INFERLOG_DEADLINE_S="60") as desk:
        assert (await desk.caller.infer()).headers.get("x-inferlog-limits") is None
        small = desk.caller.with_key(customer(env, "Small", requests_per_s=1, burst=3)["key"])
        assert (await small.infer()).status == 200
        await asyncio.to_thread(stack.stop_part, "valkey", kill=True)
        try:

            async def decided_alone() -> bool:
                reply = await desk.caller.infer()
                return reply.status == 200 and reply.headers.get("x-inferlog-limits") == "local"

            for _ in range(5):
                await eventually(decided_alone)
            refused = await small.infer()
            assert (refused.status, refused.headers["x-inferlog-limits"]) == (503, "local")
            assert "part of the key's limit" in refused.json["error"]
            assert int(refused.headers["Retry-After"]) >= 1
            ready = (await desk.caller.call("GET", "/readyz")).json
            assert "limits' Redis did not answer" in ready["degraded"]["limits"]
            assert ready["counts"]["limits_local"] >= 5
        finally:
            await asyncio.to_thread(stack.start_part, "valkey")

        async def decided_together() -> bool:
            return "x-inferlog-limits" not in (await small.infer()).headers

        await eventually(decided_together)
    report = await verify(replay_settings(env))
    (rate,) = [v for v in report.verdicts if v.name == "I2"]
    assert rate.holds is True, rate.findings
    assert rate.figures["by_gateways_alone"] >= 5
