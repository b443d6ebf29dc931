"""I3: a request is served by the version it was admitted with, and the numbers that come back prove it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from schemas.records import InferenceFinished, InferenceRequested, Outcome
from tests.integration.worker_desk import admitted, constant_bundle, open_desk, start_worker, store_bundle, value_of
from tests.processes import Process

Spawn = Callable[..., Process]

# Lanes no longer tell versions apart: whatever waits runs with the version that came first.
UNVERSIONED = """
from dataclasses import replace
from gpu_worker.batching import Batcher
add, first = Batcher.add, []
def mixed(self, one, *, idle):
    first.append(one.version)
    add(self, replace(one, version=first[0]), idle=idle)
Batcher.add = mixed
"""


def assert_pinned(
    requests: Sequence[InferenceRequested], results: Sequence[InferenceFinished], values: dict[str, float]
) -> None:
    for request, finished in zip(requests, results, strict=True):
        assert finished.outcome is Outcome.SUCCEEDED, finished.error_message
        assert finished.version == request.version
        assert value_of(finished) == values[request.version]


@pytest.fixture
def values(env: dict[str, str], tmp_path: Path) -> dict[str, float]:
    """Two versions of one model, and what each answers."""
    return {store_bundle(env, constant_bundle(tmp_path / f"v{value}", value)): value for value in (1.0, 2.0)}


def interleaved(values: dict[str, float], count: int) -> list[InferenceRequested]:
    versions = list(values)
    return [admitted(versions[i // 3 % 2]) for i in range(count)]


async def test_a_route_switched_while_200_wait_changes_none_of_them(
    env: dict[str, str], spawn: Spawn, values: dict[str, float]
) -> None:
    requests = interleaved(values, 200)
    async with open_desk(env) as desk:
        # All on one partition, which is the worst case: both versions in every poll.
        await desk.submit(requests, partition=3)
        start_worker(spawn, env)
        more = interleaved(values, 100)
        await desk.submit(more, partition=3)
        assert_pinned([*requests, *more], await desk.results_of([*requests, *more]), values)
        assert await desk.batches_are_uniform()
        # Usage follows results; only when offsets are committed is all of it on the log.
        await desk.everything_committed(len(requests) + len(more))
        assert await desk.violations() == []


async def test_without_the_version_in_the_batch_key_the_numbers_are_another_versions(
    env: dict[str, str], spawn: Spawn, values: dict[str, float]
) -> None:
    requests = interleaved(values, 200)
    async with open_desk(env) as desk:
        await desk.submit(requests, partition=3)
        start_worker(spawn, env, changed=UNVERSIONED)
        results = await desk.results_of(requests)
        with pytest.raises(AssertionError):
            assert_pinned(requests, results, values)
        await desk.everything_committed(len(requests))
        # The record names what ran, not what was asked for, so that the proof from the log alone finds it too.
        assert "served by another version" in await desk.violations()
        assert {value_of(r) for r in results} == {values[r.version] for r in results}
