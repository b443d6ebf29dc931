"""What goes wrong around one request, one version or one server stays there."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.local.stack import Stack
from infra.redis import open_redis
from infra.settings import worker_settings
from schemas.codec import decode
from schemas.keys import RedisKeys
from schemas.manifest import artifact_prefix
from schemas.records import InferenceFinished, InferenceRequested, Outcome, Task
from schemas.tensors import Tensor
from tests.conditions import eventually
from tests.factories import encode_unchecked, floats
from tests.integration.worker_desk import (
    Desk,
    admitted,
    constant_bundle,
    open_desk,
    overwrite,
    start_worker,
    store_bundle,
    value_of,
    wait_for_s3_alone,
)
from tests.processes import Process

Spawn = Callable[..., Process]

SLOW_MODEL = """
import time
from gpu_worker.runner import LoadedModel
run = LoadedModel.run
def slow(self, requests):
    time.sleep(0.2)
    return run(self, requests)
LoadedModel.run = slow
"""


@pytest.fixture
def version(env: dict[str, str], tmp_path: Path) -> str:
    return store_bundle(env, constant_bundle(tmp_path / "good", 1.0))


async def test_tampered_weights_are_refused_and_other_versions_serve(
    env: dict[str, str], spawn: Spawn, tmp_path: Path, version: str
) -> None:
    tampered = store_bundle(env, constant_bundle(tmp_path / "tampered", 3.0))
    evil = (constant_bundle(tmp_path / "evil", 666.0) / "weights.safetensors").read_bytes()
    overwrite(env, artifact_prefix(tampered) + "weights.safetensors", evil)
    async with open_desk(env) as desk:
        worker = start_worker(spawn, env)
        requests = [admitted(tampered), admitted(version)]
        await desk.submit(requests)
        refused, served = await desk.results_of(requests)
        assert (refused.outcome, refused.error_code, refused.outputs) == (Outcome.FAILED, "model_unavailable", ())
        assert "expected sha256" in (refused.error_message or "")
        assert value_of(served) == 1.0
        assert f"version loaded version={tampered}" not in worker.log.read_text()
        assert not (Path(env["INFERLOG_WEIGHTS_DIR"]) / tampered).exists()


async def test_without_the_digest_check_the_tampered_weights_answer(
    env: dict[str, str], spawn: Spawn, tmp_path: Path
) -> None:
    tampered = store_bundle(env, constant_bundle(tmp_path / "tampered", 3.0))
    evil = (constant_bundle(tmp_path / "evil", 666.0) / "weights.safetensors").read_bytes()
    overwrite(env, artifact_prefix(tampered) + "weights.safetensors", evil)
    unchecked = "from infra.s3 import Store\nStore.get_verified = lambda s, k, t, *, sha256: t.write_bytes(s.get(k))"
    async with open_desk(env) as desk:
        start_worker(spawn, env, changed=unchecked)
        request = admitted(tampered)
        await desk.submit([request])
        (finished,) = await desk.results_of([request])
        assert value_of(finished) == 666.0


async def test_a_bad_request_in_a_batch_fails_alone(env: dict[str, str], spawn: Spawn, version: str) -> None:
    narrow = admitted(version, inputs=(floats("pixels", 1.0, 2.0),))
    renamed = admitted(version, inputs=(floats("pixel", *([0.5] * 64)),))
    # What only a forger writes; each of these ended the worker at each start, or was billed as it stood.
    forged = [
        admitted(version, task=Task.EMBEDDINGS),
        admitted(version, item_count=2**31 - 1),
        admitted(version, item_count=2),
        admitted(version, customer_id="a\0b"),
        admitted(version, within_s=10**6),
    ]
    unreadable = [admitted(version, customer_id="c" * 5_000_000), admitted("a\0b"), admitted("../../../../tmp/x")]
    good = [admitted(version) for _ in range(20)]
    not_a_number = admitted(version, inputs=(floats("pixels", *([float("nan")] * 64)),))
    async with open_desk(env) as desk:
        await desk.submit([*good[:10], narrow, renamed, *forged[:3], *good[10:], *forged[3:], not_a_number])
        for record in unreadable:
            value = encode_unchecked(record)
            await desk.producer.send(desk.topic, value, key=record.request_id.bytes, partition=1, timeout_s=10)
        worker = start_worker(spawn, env)
        results = await desk.results_of([narrow, renamed])
        assert [r.error_code for r in results] == ["invalid_input"] * 2
        assert results[0].error_message == "input 'pixels': expected shape [-1, 64], found [1, 2]"
        assert all(value_of(r) == 1.0 for r in await desk.results_of(good))
        (odd,) = await desk.results_of([not_a_number])
        assert odd.outcome is Outcome.SUCCEEDED, "NaN is data"
        assert {r.error_code for r in await desk.results_of(forged)} == {"invalid_input"}
        await desk.everything_committed(len(good) + len(forged) + len(unreadable) + 3)
        seen = await desk.read()
        assert seen.usage.keys() == {r.request_id for r in [*good, not_a_number]}
        assert len(seen.dead_letters) == len(unreadable)
        assert worker.returncode is None


async def test_an_expired_request_is_answered_and_not_run(env: dict[str, str], spawn: Spawn, version: str) -> None:
    late, good = admitted(version, within_s=-1), admitted(version)
    async with open_desk(env) as desk:
        await desk.submit([late, good])
        start_worker(spawn, env)
        expired, _ = await desk.results_of([late, good])
        assert (expired.outcome, expired.batch_items, expired.run_us) == (Outcome.EXPIRED, 0, 0)
        assert not (await desk.read()).usage.get(late.request_id)


async def test_a_request_of_many_items_runs_in_slices_and_comes_back_whole(
    env: dict[str, str], spawn: Spawn, version: str
) -> None:
    rows = 150
    tensor = Tensor(name="pixels", datatype="FP32", shape=(rows, 64), data=bytes(4 * 64 * rows))
    request = admitted(version, inputs=(tensor,), item_count=rows)
    async with open_desk(env) as desk:
        start_worker(spawn, env)
        await desk.submit([request])
        (finished,) = await desk.results_of([request])
        assert finished.outputs[0].shape == (rows, 10)
        assert set(struct.unpack(f"<{rows * 10}f", finished.outputs[0].data)) == {1.0}
        assert finished.quantities == {"requests": 1, "items": rows}


async def test_what_is_no_request_becomes_a_dead_letter_and_the_rest_is_served(
    env: dict[str, str], spawn: Spawn, version: str
) -> None:
    good = admitted(version)
    async with open_desk(env) as desk:
        start_worker(spawn, env)
        await desk.producer.send(desk.topic, b'{"json": true}', key=b"k", partition=5, timeout_s=10)
        await desk.submit([good], partition=5)
        await desk.results_of([good])
        await eventually(lambda: _letters(desk), what="a dead letter")
        (letter,) = desk.seen.dead_letters
        assert (letter.value, letter.partition, letter.offset) == (b'{"json": true}', 5, 0)

        async def both_committed() -> bool:
            return await desk.committed() == 2

        await eventually(both_committed)


async def _letters(desk: Desk) -> bool:
    return bool((await desk.read()).dead_letters)


async def test_a_version_waits_for_s3_while_another_serves(
    env: dict[str, str], spawn: Spawn, tmp_path: Path, version: str, stack: Stack
) -> None:
    new = store_bundle(env, constant_bundle(tmp_path / "new", 2.0))
    async with open_desk(env) as desk:
        start_worker(spawn, env)
        served, _ = await wait_for_s3_alone(desk, stack, version, lambda within_s: admitted(new, within_s=within_s))
        assert value_of(served) == 2.0


async def test_without_redis_results_are_on_the_log_and_committed(
    env: dict[str, str], spawn: Spawn, version: str, stack: Stack
) -> None:
    async with open_desk(env) as desk:
        worker = start_worker(spawn, env)
        stack.stop_part("valkey", kill=True)
        try:
            requests = [admitted(version) for _ in range(5)]
            await desk.submit(requests)
            await desk.results_of(requests)

            async def committed() -> bool:
                return await desk.committed() == 5

            await eventually(committed, timeout_s=60)
            assert "results not cached" in worker.log.read_text()
        finally:
            stack.start_part("valkey")
        after = admitted(version)
        await desk.submit([after])
        await desk.results_of([after])
        await eventually(lambda: _cached(env, after), what="the cache to be used again")


async def _cached(env: dict[str, str], request: InferenceRequested) -> bool:
    settings = worker_settings(env)
    async with open_redis(settings.redis) as redis:
        value = await redis.get(RedisKeys(namespace=settings.redis.namespace).result(request.request_id))
    return isinstance(value, bytes) and decode(value, InferenceFinished).request_id == request.request_id


async def test_while_kafka_is_away_results_are_held_and_nothing_is_lost(
    env: dict[str, str], spawn: Spawn, version: str, stack: Stack
) -> None:
    async with open_desk(env) as desk:
        worker = start_worker(spawn, env, changed=SLOW_MODEL, INFERLOG_MAX_BATCH_ITEMS="8")
        requests = [admitted(version, within_s=300) for _ in range(100)]
        await desk.submit(requests)
        stack.stop_part("kafka", kill=True)
        stack.start_part("kafka")
        await desk.results_of(requests, timeout_s=120)
        assert worker.returncode is None, "it recovered without a restart"
