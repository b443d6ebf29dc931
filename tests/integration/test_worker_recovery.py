"""A result that is on the log stands: whoever takes over finds it, and nobody says anything else about the request.

Each test is run a second time without the mechanism that it is about, and then the proofs find the broken promise.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest

from infra.redis import open_redis
from infra.settings import worker_settings
from schemas.codec import decode
from schemas.keys import RedisKeys
from schemas.records import InferenceFinished, InferenceRequested, Outcome
from tests.conditions import eventually
from tests.integration.worker_desk import admitted, constant_bundle, open_desk, start_worker, store_bundle
from tests.processes import Process

Spawn = Callable[..., Process]

DIES_BEFORE_USAGE = """
import os, signal
from gpu_worker.outcomes import KafkaRedisOutcomes
def die(self, billed):
    os.kill(os.getpid(), signal.SIGKILL)
KafkaRedisOutcomes._log_usage = die
"""

FAILS_AND_DIES_BEFORE_COMMIT = """
import os, signal
from gpu_worker.endings import Failure, Ran
from gpu_worker.outcomes import KafkaRedisOutcomes
from gpu_worker.runner import LoadedModel
def fail(self, requests):
    failure = Failure(code="run_failed", message="here and now")
    return Ran(version=self.manifest.version, results=[failure] * len(requests), run_us=1)
async def die(self, ends):
    os.kill(os.getpid(), signal.SIGKILL)
LoadedModel.run = fail
KafkaRedisOutcomes._cache = die
"""

# Runs, says so, and does not come to an end before it is told to.
RUNS_UNTIL_TOLD = """
import pathlib, time
from gpu_worker.runner import LoadedModel
run, folder = LoadedModel.run, pathlib.Path({folder!r})
def wait(self, requests):
    (folder / "running").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    return run(self, requests)
LoadedModel.run = wait
"""

NEVER_COMMITS = """
from gpu_worker.inbox import Inbox
async def nothing(self):
    pass
Inbox.commit = nothing
"""

# The mechanisms removed.
WITHOUT_RECOVERY = """
from gpu_worker.inheritance import Inheritance
from gpu_worker.recovery import FirstResults
async def nothing(self, consumer, spans):
    return FirstResults()
Inheritance.first_results = nothing
"""
WITHOUT_TIME_RULE = """
import gpu_worker.outcomes
gpu_worker.outcomes.as_of = lambda ended, now: ended
"""


@pytest.fixture
def version(env: dict[str, str], tmp_path: Path) -> str:
    return store_bundle(env, constant_bundle(tmp_path / "v", 1.0))


async def passed(request: InferenceRequested) -> None:
    """Wait until the request's deadline has passed."""
    await eventually(lambda: datetime.now(timezone.utc) > request.deadline_at)


async def cached(env: dict[str, str], request: InferenceRequested) -> InferenceFinished | None:
    settings = worker_settings(env)
    async with open_redis(settings.redis) as redis:
        value = await redis.get(RedisKeys(namespace=settings.redis.namespace).result(request.request_id))
    return decode(value, InferenceFinished) if isinstance(value, bytes) else None


@pytest.mark.parametrize("recovery", [True, False])
async def test_killed_between_result_and_usage_past_the_deadline(
    env: dict[str, str], spawn: Spawn, version: str, recovery: bool
) -> None:
    async with open_desk(env) as desk:
        first = start_worker(spawn, env, changed=DIES_BEFORE_USAGE, INFERLOG_WORKER="first")
        request = admitted(version, within_s=8)
        await desk.submit([request])
        assert first.wait() == -signal.SIGKILL
        assert [r.outcome for r in (await desk.read()).results[request.request_id]] == [Outcome.SUCCEEDED]
        assert await desk.violations() == ["succeeded without usage"]
        assert await cached(env, request) is None
        await passed(request)

        start_worker(spawn, env, changed="" if recovery else WITHOUT_RECOVERY, INFERLOG_WORKER="second")
        await desk.everything_committed(1)
        outcomes = [r.outcome for r in (await desk.read()).results[request.request_id]]
        if recovery:
            assert outcomes == [Outcome.SUCCEEDED]
            assert len(desk.seen.usage[request.request_id]) == 1
            assert await desk.violations() == []
            assert await cached(env, request) == desk.seen.results[request.request_id][0]
        else:
            assert outcomes == [Outcome.SUCCEEDED, Outcome.EXPIRED]
            assert await desk.violations() == ["succeeded without usage"]


@pytest.mark.parametrize("recovery", [True, False])
async def test_a_failure_on_the_log_stays_though_a_second_run_would_succeed(
    env: dict[str, str], spawn: Spawn, version: str, recovery: bool
) -> None:
    request = admitted(version, within_s=60)
    async with open_desk(env) as desk:
        first = start_worker(spawn, env, changed=FAILS_AND_DIES_BEFORE_COMMIT)
        await desk.submit([request])
        assert first.wait() == -signal.SIGKILL
        start_worker(spawn, env, changed="" if recovery else WITHOUT_RECOVERY)
        await desk.everything_committed(1)
        outcomes = [r.outcome for r in (await desk.read()).results[request.request_id]]
        if recovery:
            assert outcomes == [Outcome.FAILED]
            assert request.request_id not in desk.seen.usage
            assert await desk.violations() == []
        else:
            assert outcomes == [Outcome.FAILED, Outcome.SUCCEEDED]
            assert await desk.violations() == ["usage of a request that did not succeed"]


@pytest.mark.parametrize("time_rule", [True, False])
async def test_a_worker_that_wakes_after_its_successor_expired_its_request(
    env: dict[str, str], spawn: Spawn, version: str, tmp_path: Path, time_rule: bool
) -> None:
    frozen = RUNS_UNTIL_TOLD.format(folder=str(tmp_path)) + ("" if time_rule else WITHOUT_TIME_RULE)
    async with open_desk(env) as desk:
        zombie = start_worker(spawn, env, changed=frozen, INFERLOG_WORKER="zombie")
        request = admitted(version, within_s=8)
        await desk.submit([request])
        await eventually(lambda: (tmp_path / "running").exists(), what="the run to begin")
        os.kill(zombie.pid, signal.SIGSTOP)
        await passed(request)
        start_worker(spawn, env, INFERLOG_WORKER="successor")
        (expired,) = await desk.results_of([request])
        assert (expired.worker, expired.outcome) == ("successor", Outcome.EXPIRED)

        (tmp_path / "go").touch()
        os.kill(zombie.pid, signal.SIGCONT)

        async def second_result() -> bool:
            return len((await desk.read()).results[request.request_id]) == 2

        await eventually(second_result, what="the result of the one that woke up")
        _, late = desk.seen.results[request.request_id]
        assert late.worker == "zombie"
        if time_rule:
            assert late.outcome is Outcome.EXPIRED
            assert await desk.violations() == []
        else:
            assert late.outcome is Outcome.SUCCEEDED

            async def billed() -> bool:
                return request.request_id in (await desk.read()).usage

            await eventually(billed)
            assert await desk.violations() == ["usage of a request that did not succeed"]


async def test_however_much_was_ended_and_not_committed_nothing_runs_twice(
    env: dict[str, str], spawn: Spawn, version: str
) -> None:
    requests = [admitted(version, within_s=120) for _ in range(2500)]
    async with open_desk(env) as desk:
        first = start_worker(spawn, env, changed=NEVER_COMMITS)
        await desk.submit(requests[:2000], partition=3)
        await desk.results_of(requests[:2000], timeout_s=60)
        first.kill()
        await desk.submit(requests[2000:], partition=3)
        start_worker(spawn, env)
        await desk.everything_committed(len(requests))
        assert await desk.violations() == []
        assert {len(results) for results in desk.seen.results.values()} == {1}
