"""One log with every way in which a call is admitted or not, proved whole: the parts of admission beside each other."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from infra.local.stack import Stack
from infra.settings import operator_settings
from schemas.codec import decode
from schemas.records import InferenceRequested, LimiterMode
from schemas.topics import requests_topic
from streams.log import open_log
from tests.conditions import eventually
from tests.end_to_end.installation import Installation, Spawn, call_digits, statuses
from tests.integration.api_desk import run
from tests.integration.worker_desk import constant_bundle

# A worker that takes its time, so that it hears of callers who are gone.
SLOW = """
import time
from gpu_worker.runner import LoadedModel
real = LoadedModel._forward
def slow(self, inputs):
    time.sleep(0.3)
    return real(self, inputs)
LoadedModel._forward = slow
"""
CAP_CALLS = 40
ITEM_MICROS = 100


async def _admitted(installation: Installation) -> list[InferenceRequested]:
    settings = operator_settings(installation.env).kafka
    topic = requests_topic().in_namespace(settings.namespace)
    async with open_log(settings) as reader:
        spans = await reader.freeze(topic.name, topic.partitions)
        return [decode(entry.value, InferenceRequested) async for entry in reader.read(topic.name, spans)]


async def test_capped_repeated_abandoned_and_locally_admitted_calls_are_proved_from_one_log(
    env: dict[str, str], spawn: Spawn, stack: Stack, tmp_path: Path
) -> None:
    installation = Installation(env=env, spawn=spawn)
    installation.make_customer("capped")
    capped = installation.key
    cap = ["customers", "cap", "capped", "--per-month", f"{CAP_CALLS * ITEM_MICROS / 1e6:f}", "--currency", "usd"]
    capped_id = run(env, *cap, "--json")["customer_id"]
    installation.make_customer("acme")
    free = installation.key
    version = installation.publish("digits", str(constant_bundle(tmp_path / "bundle", 1.0)))
    installation.start_api(INFERLOG_API_REPLICAS="1")
    installation.start_worker()
    installation.start_ledger()
    await installation.routed("digits", version)
    url = installation.url

    # What was reserved before is not known, until the ledger is past the first call.
    async def known() -> bool:
        return statuses(await call_digits(url, capped, 1)) == {200: 1}

    await eventually(known, timeout_s=90, what="the ledger to be past the first call")
    assert statuses(await call_digits(url, capped, 100)) == {200: CAP_CALLS - 1, 402: 101 - CAP_CALLS}

    # Ten of a kind are one request; what a caller leaves before it was begun is not run.
    assert statuses(await call_digits(url, free, 10, headers={"Idempotency-Key": "ten of a kind"})) == {200: 10}
    installation.processes["worker"].kill()
    leaving = asyncio.ensure_future(call_digits(url, free, 20))
    await eventually(lambda: _are_admitted(installation, CAP_CALLS + 1 + 20), what="all of them on the log")
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    installation.env["INFERLOG_MAX_BATCH_ITEMS"] = "1"
    installation.start_worker(changed=SLOW)
    await eventually(lambda: _answers(url, free), what="the worker to be past them")

    await asyncio.to_thread(stack.pause_part, "valkey")
    try:
        assert not statuses(await call_digits(url, capped, 3))[200]
        alone = statuses(await call_digits(url, free, 10))
    finally:
        await asyncio.to_thread(stack.resume_part, "valkey")
    assert set(alone) <= {200, 503}
    await eventually(lambda: _answers(url, free), timeout_s=60, what="Redis to be asked again")
    assert statuses(await call_digits(url, capped, 20))[200] == 0

    report = installation.verify()
    assert report["holds"] is True, report
    assert report["proofs"]["I4"]["figures"]["cancelled"] > 0
    requests = await _admitted(installation)
    assert {r.limiter for r in requests} == {LimiterMode.SHARED, LimiterMode.LOCAL}
    assert Counter(r.reserved_micros for r in requests if r.customer_id == capped_id) == {ITEM_MICROS: CAP_CALLS}
    assert {r.reserved_micros for r in requests if r.customer_id != capped_id} == {0}
    spent = run(env, "usage", "--customer", "capped", "--json")["totals"]
    assert spent["items"] * ITEM_MICROS == CAP_CALLS * ITEM_MICROS


async def _are_admitted(installation: Installation, requests: int) -> bool:
    return len(await _admitted(installation)) == requests


async def _answers(url: str, key: str) -> bool:
    return statuses(await call_digits(url, key, 1)) == {200: 1}
