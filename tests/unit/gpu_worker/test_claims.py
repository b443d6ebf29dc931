"""Large tensors at the worker: whose failure is whose, and what is kept or carried when."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from gpu_worker.claims import LargeTensors
from gpu_worker.endings import Ended
from gpu_worker.errors import InputAltered, InputLost, ItemError, MachineError
from schemas.claims import LARGEST_BYTES, checked_in
from schemas.records import InferenceFinished, InferenceRequested, Outcome
from schemas.tensors import Blob, Tensor
from schemas.topics import RESULTS
from tests.blob_store import LARGE, FakeBlobStore, claim_check
from tests.conditions import eventually
from tests.factories import finished, requested


def referring(store: FakeBlobStore) -> InferenceRequested:
    request = requested(inputs=(LARGE,))
    carried, kept = checked_in(request.inputs, request.request_id, inline_bytes=0)
    store.objects.update(kept)
    return replace(request, inputs=carried)


def end(record: InferenceFinished) -> Ended:
    return Ended(finished=record, reply_to="a", deadline_at=record.admitted_at + timedelta(seconds=10))


async def test_inputs_come_whole(store: FakeBlobStore) -> None:
    found = await LargeTensors(claim_check(store)).redeem(referring(store), within_s=5)
    assert found.inputs == (LARGE,)


async def test_lost_altered_and_absurd_inputs_are_faults_of_the_request(store: FakeBlobStore) -> None:
    large = LargeTensors(claim_check(store))
    request = referring(store)
    (key,) = store.objects
    store.objects[key] = b"\x02" * 2000
    with pytest.raises(InputAltered, match="tensor 'large'"):
        await large.redeem(request, within_s=5)
    del store.objects[key]
    with pytest.raises(InputLost, match="tensor 'large'"):
        await large.redeem(request, within_s=5)
    huge = replace(LARGE, data=b"", blob=Blob(key=key, sha256="0" * 64, size_bytes=LARGEST_BYTES + 1))
    with pytest.raises(ItemError, match="the most is"):
        await large.redeem(replace(request, inputs=(huge,)), within_s=5)
    assert (InputLost.code, InputAltered.code) == ("input_lost", "input_altered")


async def test_a_store_that_is_away_is_nobodys_fault_and_leaves_its_room_to_others(
    store: FakeBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.blobs._PAUSE_S", 0.05)
    large = LargeTensors(claim_check(store), room_bytes=2000)
    request = referring(store)
    store.away = True
    with pytest.raises(MachineError):
        await large.redeem(request, within_s=0.01)
    store.away = False
    assert (await large.redeem(request, within_s=60)).inputs == (LARGE,)


async def test_inputs_wait_for_room_until_others_have_run_and_no_longer_than_their_deadline(
    store: FakeBlobStore,
) -> None:
    large = LargeTensors(claim_check(store), room_bytes=3000)
    first, second = referring(store), referring(store)
    await large.redeem(first, within_s=5)
    with pytest.raises(MachineError, match="no room for 2000 bytes"):
        await large.redeem(second, within_s=0.01)
    waiting = asyncio.create_task(large.redeem(second, within_s=60))
    large.release(first)
    await waiting


async def test_large_outputs_are_kept_and_their_record_names_them(store: FakeBlobStore) -> None:
    large = LargeTensors(claim_check(store))
    ended = end(finished(outputs=(LARGE,)))
    assert large.is_large(ended)
    kept = await large.hand_in(ended, left_s=5)
    (output,) = kept.finished.outputs
    assert output.blob is not None
    assert store.objects == {output.blob.key: LARGE.data}
    assert str(ended.finished.request_id) in output.blob.key
    assert kept.finished.quantities == ended.finished.quantities


async def test_while_the_store_is_away_the_record_carries_its_outputs(store: FakeBlobStore) -> None:
    store.away = True
    ended = end(finished(outputs=(LARGE,)))
    assert await LargeTensors(claim_check(store)).hand_in(ended, left_s=5) == ended


async def test_what_is_small_or_on_the_log_is_not_touched(store: FakeBlobStore) -> None:
    large = LargeTensors(claim_check(store))
    assert not large.is_large(end(finished()))
    assert not large.is_large(replace(end(finished(outputs=(LARGE,))), logged=b"its bytes"))


async def test_outputs_above_the_bound_are_a_failure_that_is_not_billed(store: FakeBlobStore) -> None:
    data = bytes(LARGEST_BYTES + 1)
    huge = Tensor(name="huge", datatype="UINT8", shape=(len(data),), data=data)
    failed = (await LargeTensors(claim_check(store)).hand_in(end(finished(outputs=(huge,))), left_s=5)).finished
    assert (failed.outcome, failed.error_code) == (Outcome.FAILED, "result_too_large")
    assert (failed.outputs, failed.quantities, store.calls) == ((), {}, [])


async def test_outputs_that_the_log_does_not_take_wait_for_their_turn_until_the_deadline(
    store: FakeBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker.claims.KEEP_WITHIN_S", 0.01)
    large = LargeTensors(claim_check(store, patience_s=60))
    store.open.clear()
    others = [asyncio.create_task(large.hand_in(end(finished(outputs=(LARGE,))), left_s=60)) for _ in range(4)]
    await eventually(lambda: len(store.calls) == 4)
    await asyncio.gather(*others)
    data = bytes(RESULTS.max_message_bytes + 1)
    too_large = end(finished(outputs=(Tensor(name="y", datatype="UINT8", shape=(len(data),), data=data),)))
    waiting = asyncio.create_task(large.hand_in(too_large, left_s=60))
    await large.hand_in(end(finished(outputs=(LARGE,))), left_s=60)  # gives up, and is carried
    assert not waiting.done()
    store.open.set()
    assert (await waiting).finished.outputs[0].blob is not None
