"""I4 at the worker: killed with -9 under load, it loses nothing, and its repeated work collapses on ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from schemas.records import Outcome
from tests.conditions import eventually
from tests.integration.worker_desk import Desk, admitted, constant_bundle, open_desk, start_worker, store_bundle
from tests.processes import Process

Spawn = Callable[..., Process]

# Slow enough that a kill always meets work on its way; the order of acts is the product's own.
SLOW_LOG = """
import asyncio
from gpu_worker.outcomes import KafkaRedisOutcomes
record, turn = KafkaRedisOutcomes.record, asyncio.Lock()
async def slow(self, ended):
    async with turn:
        await asyncio.sleep(0.1)
        await record(self, ended)
KafkaRedisOutcomes.record = slow
"""

# The mechanism removed: offsets first, log second.
COMMIT_FIRST = (
    SLOW_LOG
    + """
from gpu_worker.worker import Worker
async def commit_first(self, deliveries, ended):
    self._inbox.done(deliveries)
    await self._inbox.commit()
    await self._outcomes.record(ended)
Worker._record_and_commit = commit_first
"""
)
SMALL_BATCHES = {"INFERLOG_MAX_BATCH_ITEMS": "8"}
COUNT = 300


async def killed_under_load(env: dict[str, str], spawn: Spawn, desk: Desk, version: str, *, changed: str) -> set[str]:
    """Ids without a result after a worker was killed in the middle of 300 requests and another took over."""
    requests = [admitted(version, within_s=120) for _ in range(COUNT)]
    first = start_worker(spawn, env, changed=changed, **SMALL_BATCHES)
    await desk.submit(requests)

    async def committed_something() -> bool:
        return await desk.committed() > 0

    await eventually(committed_something, what="a first commit")
    first.kill()
    before = len((await desk.read()).results)
    assert before < COUNT, "the kill came too late to prove anything"

    # A request of its own on each partition: once these have results, everything before them was handled.
    start_worker(spawn, env)
    markers = [admitted(version, within_s=120) for _ in range(8)]
    for partition, marker in enumerate(markers):
        await desk.submit([marker], partition=partition)
    await desk.results_of(markers, timeout_s=60)
    await desk.everything_committed(COUNT + len(markers))
    seen = await desk.read()
    return {str(r.request_id) for r in requests if r.request_id not in seen.results}


async def test_a_worker_killed_under_load_loses_nothing_and_doubles_nothing(
    env: dict[str, str], spawn: Spawn, tmp_path: Path
) -> None:
    version = store_bundle(env, constant_bundle(tmp_path / "v", 1.0))
    async with open_desk(env) as desk:
        assert await killed_under_load(env, spawn, desk, version, changed=SLOW_LOG) == set()
        for request_id, results in desk.seen.results.items():
            assert {r.outcome for r in results} == {Outcome.SUCCEEDED}
            assert len({r.event_id for r in results}) == 1
            # One effect: however often it ran, it says the same thing to be billed, under the same id.
            usage = desk.seen.usage[request_id]
            assert usage
            assert all(u == usage[0] for u in usage)
        assert await desk.violations() == []


async def test_offsets_committed_before_the_log_lose_requests(
    env: dict[str, str], spawn: Spawn, tmp_path: Path
) -> None:
    version = store_bundle(env, constant_bundle(tmp_path / "v", 1.0))
    async with open_desk(env) as desk:
        assert await killed_under_load(env, spawn, desk, version, changed=COMMIT_FIRST) != set()


async def test_partitions_move_between_workers_under_load_without_loss(
    env: dict[str, str], spawn: Spawn, tmp_path: Path
) -> None:
    version = store_bundle(env, constant_bundle(tmp_path / "v", 1.0))
    async with open_desk(env) as desk:
        first = start_worker(spawn, env, INFERLOG_WORKER="first", **SMALL_BATCHES)
        requests = [admitted(version, within_s=120) for _ in range(COUNT)]
        await desk.submit(requests[:100])
        start_worker(spawn, env, INFERLOG_WORKER="second", **SMALL_BATCHES)
        await desk.submit(requests[100:200])
        first.terminate()
        assert first.wait() == 0
        await desk.submit(requests[200:])
        await desk.results_of(requests, timeout_s=60)
        assert {r[0].worker for r in desk.seen.results.values()} == {"first", "second"}
