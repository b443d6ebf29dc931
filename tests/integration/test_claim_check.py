"""Large tensors go to S3 and back unnoticed; what happens to a blob happens to its request alone."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from infra.s3 import RuleDiffers, Store, StoreUnavailable
from infra.settings import S3Settings
from schemas.codec import decode
from schemas.records import InferenceFinished, Outcome
from tests.conditions import eventually
from tests.integration.api_desk import Reply, calling, customer, start_gateway
from tests.integration.blob_desk import (
    INLINE_ITEMS,
    OUTPUTS,
    Bucket,
    blob_keys,
    cached,
    document,
    logged_requests,
    register_wide,
)
from tests.integration.worker_desk import (
    admitted,
    constant_bundle,
    open_desk,
    start_worker,
    store_bundle,
    value_of,
)
from tests.processes import Process

Spawn = Callable[..., Process]


def id_of(reply: Reply) -> UUID:
    return UUID(reply.headers["x-request-id"])


def outputs_of(reply: Reply) -> list[float]:
    assert reply.status == 200, reply.text[:300]
    (output,) = reply.json["outputs"]
    found: list[float] = output["data"]
    assert len(found) == output["shape"][0] * OUTPUTS
    return found


async def test_a_large_request_answers_as_small_ones_do_and_its_records_are_small(
    env: dict[str, str], spawn: Spawn, tmp_path: Path
) -> None:
    await register_wide(env, tmp_path / "wide")
    key = customer(env, "Acme")["key"]
    gateway = start_gateway(spawn, env)
    start_worker(spawn, env)
    async with calling(gateway, key) as caller, open_desk(env) as desk:

        async def infer(rows: range, **settings: Any) -> Reply:
            return await caller.call("POST", "/v2/models/wide/infer", document(rows), **settings)

        large = await infer(range(512))
        small = [await infer(range(at, at + 64)) for at in (0, 64)]
        expected = [number for reply in small for number in outputs_of(reply)]
        assert outputs_of(large)[: len(expected)] == pytest.approx(expected, rel=1e-4, abs=1e-5)

        within, beyond = await infer(range(INLINE_ITEMS)), await infer(range(INLINE_ITEMS + 1))
        # 8 MiB of outputs: more than the topic takes.
        largest = await infer(range(2048), timeout_s=60)
        looked_up = await caller.call("GET", f"/v1/requests/{id_of(largest)}", timeout_s=60)
        assert outputs_of(looked_up) == outputs_of(largest)
        await desk.everything_committed(6)
        await desk.read()

        logged, bucket = await logged_requests(env), Bucket(env)
        for reply, items in ((large, 512), (beyond, INLINE_ITEMS + 1), (largest, 2048)):
            size_bytes, request = logged[id_of(reply)]
            (tensor,) = request.inputs
            assert size_bytes < 2000
            assert tensor.blob is not None
            assert tensor.blob.size_bytes == items * 2048
            assert tensor.blob.key == f"blobs/{request.request_id}/{tensor.blob.sha256}"
            (result,) = desk.seen.results[request.request_id]
            copy = await cached(env, request.request_id)
            assert copy is not None
            assert len(copy) < 2000
            assert decode(copy, InferenceFinished) == result
            assert sorted(bucket.keys(request.request_id)) == sorted([tensor.blob.key, *blob_keys(result)])
            (usage,) = desk.seen.usage[request.request_id]
            assert usage.quantities == {"requests": 1, "items": items}

        assert logged[id_of(within)][1].inputs[0].blob is None, "the threshold itself still fits the record"
        (result,) = desk.seen.results[id_of(small[0])]
        assert blob_keys(result) == []
        assert bucket.keys(id_of(small[0])) == [], "small requests never touch S3"


async def test_a_lost_or_altered_input_fails_its_request_alone(
    env: dict[str, str], spawn: Spawn, tmp_path: Path
) -> None:
    version = store_bundle(env, constant_bundle(tmp_path / "v", 1.0))
    bucket = Bucket(env)
    lost, altered, longer, *whole = (bucket.referring(version) for _ in range(6))
    small = [admitted(version) for _ in range(3)]
    for broken, act in (
        (lost, bucket.delete),
        (altered, lambda key: bucket.overwrite(key, bytes(256))),
        (longer, lambda key: bucket.overwrite(key, bytes(5000))),
    ):
        (key,) = bucket.keys(broken.request_id)
        act(key)
    async with open_desk(env) as desk:
        await desk.submit([lost, *whole, altered, *small, longer], partition=0)
        start_worker(spawn, env)
        results = await desk.results_of([lost, altered, longer])
        assert [r.error_code for r in results] == ["input_lost", "input_altered", "input_altered"]
        assert {r.outcome for r in results} == {Outcome.FAILED}
        assert all("tensor 'pixels'" in (r.error_message or "") for r in results)
        assert [value_of(r) for r in await desk.results_of([*whole, *small])] == [1.0] * 6
        await desk.everything_committed(9)
        seen = await desk.read()
        assert seen.usage.keys() == {r.request_id for r in [*whole, *small]}
        assert await desk.violations() == []


# Nothing of a large result is recorded / it is recorded, and nothing that follows from it.
STOPS_AFTER_BLOBS = """
import asyncio
from gpu_worker.outcomes import KafkaRedisOutcomes
async def never(self, ended):
    await asyncio.Event().wait()
KafkaRedisOutcomes._record = never
"""
STOPS_AFTER_RESULTS = """
import asyncio
from gpu_worker.outcomes import KafkaRedisOutcomes
KafkaRedisOutcomes._log_usage = lambda self, billed: asyncio.get_running_loop().create_future()
async def never(self, ends):
    await asyncio.Event().wait()
KafkaRedisOutcomes._cache = never
"""


@pytest.mark.parametrize("stops", [STOPS_AFTER_BLOBS, STOPS_AFTER_RESULTS], ids=["after blobs", "after results"])
async def test_a_worker_killed_after_its_blobs_leaves_one_result_that_is_billed_once(
    env: dict[str, str], spawn: Spawn, tmp_path: Path, stops: str
) -> None:
    version = store_bundle(env, constant_bundle(tmp_path / "v", 1.0))
    bucket = Bucket(env)
    request = bucket.referring(version, items=8, within_s=120)
    small = {"INFERLOG_CLAIM_CHECK_BYTES": "100"}
    async with open_desk(env) as desk:
        first = start_worker(spawn, env, changed=stops, INFERLOG_WORKER="first", **small)
        await desk.submit([request])

        async def reached() -> bool:
            if stops is STOPS_AFTER_BLOBS:
                return len(bucket.keys(request.request_id)) == 2
            return bool((await desk.read()).results)

        await eventually(reached, what="the first worker to stop where it should")
        first.kill()
        start_worker(spawn, env, INFERLOG_WORKER="second", **small)
        await desk.everything_committed(1)
        seen = await desk.read()
        (result,) = seen.results[request.request_id]
        assert result.worker == ("second" if stops is STOPS_AFTER_BLOBS else "first")
        (key,) = blob_keys(result)
        assert set(struct.unpack("<80f", bucket.store.get(key))) == {1.0}
        assert len(bucket.keys(request.request_id)) == 2, "one of inputs, one of outputs: the second run found it"
        (usage,) = seen.usage[request.request_id]
        assert usage.quantities == {"requests": 1, "items": 8}
        copy = await cached(env, request.request_id)
        assert copy is not None
        assert decode(copy, InferenceFinished) == result
        assert await desk.violations() == []


KEEPS_WRONG_BYTES = """
from infra.s3 import Store
put = Store.put_once
def lose_or_alter(self, key, data):
    return len(data) > 600_000 or put(self, key, data[::-1])
Store.put_once = lose_or_alter
"""


async def test_a_result_whose_outputs_are_lost_or_cannot_be_reached_is_told_with_its_id_and_is_billed(
    env: dict[str, str], spawn: Spawn, tmp_path: Path
) -> None:
    await register_wide(env, tmp_path / "wide")
    key = customer(env, "Acme")["key"]
    gateway = start_gateway(spawn, env)
    no_s3 = start_gateway(spawn, env, INFERLOG_S3_ENDPOINT="http://127.0.0.1:9", INFERLOG_DEADLINE_S="5")
    start_worker(spawn, env, changed=KEEPS_WRONG_BYTES)
    async with calling(gateway, key) as caller, calling(no_s3, key) as cut_off, open_desk(env) as desk:
        path = "/v2/models/wide/infer"
        altered = await caller.call("POST", path, document(range(100)))
        lost = await caller.call("POST", path, document(range(160)))
        away = await cut_off.call("POST", path, document(range(160)))
        inline = await cut_off.call("POST", path, document(range(64)))
        outputs_of(inline)
        assert [r.status for r in (altered, lost, away)] == [502, 502, 503]
        words = ["not the one it made", "its output is lost", "S3, which does not answer"]
        for reply, said in zip((altered, lost, away), words, strict=True):
            assert said in reply.json["error"]
            assert f"request {id_of(reply)} has run and is billed" in reply.json["error"]
            assert reply.headers["x-should-retry"] == "false"
        looks = [await c.call("GET", f"/v1/requests/{id_of(r)}") for c, r in ((caller, lost), (cut_off, away))]
        assert [(r.status, r.json["code"]) for r in looks] == [(502, "output_lost"), (503, "outputs_away")]
        assert looks[1].headers["Retry-After"], "unlike the call, the look may be repeated"
        # Its inputs, 320 KiB, went over the log instead, and /readyz says so and stays ready.
        size_bytes, request = (await logged_requests(env))[id_of(away)]
        assert request.inputs[0].blob is None
        assert size_bytes > 300_000
        ready = await cut_off.call("GET", "/readyz")
        assert ready.status == 200
        assert "the store of large tensors did not answer" in ready.json["degraded"]["s3"]
        assert ready.json["counts"]["blobs_not_kept"] >= 1
        await desk.everything_committed(4)
        assert (await desk.read()).usage.keys() == {id_of(r) for r in (altered, lost, away, inline)}


def test_the_bucket_lets_blobs_go_and_another_rule_is_left_alone(servers: dict[str, str]) -> None:
    bucket = Bucket({**servers, "INFERLOG_S3_BUCKET": f"rules-{uuid4().hex[:12]}"})
    store = bucket.store
    store.create_bucket()
    other = {"ID": "o", "Filter": {"Prefix": "other/"}, "Status": "Enabled", "Expiration": {"Days": 3}}
    bucket.set_rules([other])
    assert store.expire("blobs/", after_days=41)
    assert not store.expire("blobs/", after_days=41)
    with pytest.raises(RuleDiffers, match="41"):
        store.expire("blobs/", after_days=9)
    assert {r["Filter"]["Prefix"]: r["Expiration"]["Days"] for r in bucket.rules()} == {"other/": 3, "blobs/": 41}
    bucket.drop()


@contextmanager
def answering(body: Iterable[bytes], length: int) -> Iterator[str]:
    """An S3 of one answer: these bytes as they come, and then the end of the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as caller, suppress(OSError):
                caller.recv(65536)
                caller.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode())
                for part in body:
                    caller.sendall(part)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(30)


def test_answers_that_break_off_or_drip_are_outages_that_end() -> None:
    never = threading.Event()

    def drip() -> Iterator[bytes]:
        while not never.wait(0.1):
            yield b"x"

    for body, words in (([b"x" * 500], "500"), (drip(), "bytes in 0.4 s")):
        with answering(body, 1000) as endpoint:
            settings = S3Settings(endpoint=endpoint, bucket="b", access_key="k", secret_key="s")
            with pytest.raises(StoreUnavailable, match=words):
                Store(settings, timeout_s=0.4, attempts=1).get_at_most("k", 1000)
