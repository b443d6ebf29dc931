"""While S3 is away large tensors go over the log if it takes them; what waits for S3 waits alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from infra.local.stack import Stack
from tests.conditions import eventually
from tests.integration.api_desk import calling, customer, start_gateway
from tests.integration.blob_desk import Bucket, blob_keys, document, logged_requests, register_wide
from tests.integration.test_claim_check import id_of, outputs_of
from tests.integration.worker_desk import (
    constant_bundle,
    open_desk,
    start_worker,
    store_bundle,
    value_of,
    wait_for_s3_alone,
)
from tests.processes import Process

Spawn = Callable[..., Process]


async def test_without_s3_records_carry_their_tensors_and_with_it_they_do_not_any_more(
    env: dict[str, str], spawn: Spawn, tmp_path: Path, stack: Stack
) -> None:
    await register_wide(env, tmp_path / "wide")
    key = customer(env, "Acme")["key"]
    gateway = start_gateway(spawn, env)
    worker = start_worker(spawn, env)
    path = "/v2/models/wide/infer"
    async with calling(gateway, key) as caller, open_desk(env) as desk:
        before = await caller.call("POST", path, document(range(512)))
        stack.stop_part("s3", kill=True)
        try:
            during = [await caller.call("POST", path, document(range(512))) for _ in range(2)]
            too_large = await caller.call("POST", path, document(range(2048)), timeout_s=60)
            small = await caller.call("POST", path, document(range(2)))
        finally:
            stack.start_part("s3")
        assert outputs_of(before) == outputs_of(during[0]) == outputs_of(during[1])
        outputs_of(small)
        # Its inputs, 4 MiB, fit the log, its outputs do not.
        assert too_large.status == 503, too_large.text[:300]
        assert "S3 for large ones is away" in too_large.json["error"]
        assert "Retry-After" in too_large.headers
        for process in (gateway.process, worker):
            assert process.log.read_text().count("the store of large tensors is away") == 1, "once per outage"

        async def by_reference() -> bool:
            after = await caller.call("POST", path, document(range(512)))
            outputs_of(after)
            (result,) = (await desk.read()).results[id_of(after)]
            return bool((await logged_requests(env))[id_of(after)][1].inputs[0].blob and blob_keys(result))

        await eventually(by_reference, what="S3 to be used again")
        logged = await logged_requests(env)
        await desk.everything_committed(len(logged))
        seen = await desk.read()
        for reply in during:
            assert logged[id_of(reply)][1].inputs[0].blob is None
            (result,) = seen.results[id_of(reply)]
            assert blob_keys(result) == []
            assert len(seen.usage[id_of(reply)]) == 1
        assert id_of(too_large) not in seen.usage


async def test_requests_whose_inputs_are_in_s3_wait_for_it_until_their_deadline_and_hold_nobody_up(
    env: dict[str, str], spawn: Spawn, tmp_path: Path, stack: Stack
) -> None:
    version = store_bundle(env, constant_bundle(tmp_path / "v", 1.0))
    bucket = Bucket(env)
    async with open_desk(env) as desk:
        start_worker(spawn, env)
        served, succeeded = await wait_for_s3_alone(
            desk, stack, version, lambda within_s: bucket.referring(version, within_s=within_s)
        )
        assert value_of(served) == 1.0
        await desk.everything_committed(len(succeeded) + 1)
        assert (await desk.read()).usage.keys() == {r.request_id for r in succeeded}
