"""Large tensors at the gateway: what is published, and how a result that cannot be fetched is told."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from api.errors import AnswerLost, ResultLost, TooLarge
from api.large_tensors import LargeTensors
from schemas.claims import LARGEST_BYTES, checked_in
from schemas.records import InferenceFinished
from schemas.tensors import Tensor
from tests.blob_store import LARGE, FakeBlobStore, claim_check
from tests.factories import finished, requested


def referring(store: FakeBlobStore) -> InferenceFinished:
    whole = finished(outputs=(LARGE,))
    carried, kept = checked_in(whole.outputs, whole.request_id, inline_bytes=0)
    store.objects.update(kept)
    return replace(whole, outputs=carried)


async def told(large: LargeTensors, result: InferenceFinished, *, within_s: float = 5) -> InferenceFinished:
    async with large.whole(result, within_s=within_s) as whole:
        return whole


async def test_small_requests_and_results_never_touch_the_store(store: FakeBlobStore) -> None:
    store.away = True
    large = LargeTensors(claim_check(store))
    record, result = requested(), finished()
    assert await large.hand_in(record) is record
    assert await told(large, result) is result
    assert store.calls == []


async def test_large_inputs_are_kept_before_the_record_names_them(store: FakeBlobStore) -> None:
    large = LargeTensors(claim_check(store))
    record = requested(inputs=(LARGE,))
    published = await large.hand_in(record)
    (sent,) = published.inputs
    assert sent.blob is not None
    assert store.objects == {sent.blob.key: LARGE.data}
    assert not large.is_large(published)
    assert replace(published, inputs=record.inputs) == record


async def test_while_the_store_is_away_the_record_carries_its_inputs(store: FakeBlobStore) -> None:
    store.away = True
    large = LargeTensors(claim_check(store))
    record = requested(inputs=(LARGE,))
    assert await large.hand_in(record) is record
    assert large.is_large(record)


async def test_inputs_above_the_bound_are_refused(store: FakeBlobStore) -> None:
    data = bytes(LARGEST_BYTES + 1)
    huge = Tensor(name="huge", datatype="UINT8", shape=(len(data),), data=data)
    with pytest.raises(TooLarge, match="send fewer items"):
        await LargeTensors(claim_check(store)).hand_in(requested(inputs=(huge,)))


async def test_a_result_comes_whole(store: FakeBlobStore) -> None:
    assert (await told(LargeTensors(claim_check(store)), referring(store))).outputs == (LARGE,)


async def test_a_lost_or_altered_output_is_told_with_the_request_and_what_it_cost(store: FakeBlobStore) -> None:
    result = referring(store)
    large = LargeTensors(claim_check(store))
    (key,) = store.objects
    store.objects[key] = b"\x02" * 2000
    with pytest.raises(ResultLost) as altered:
        await told(large, result)
    del store.objects[key]
    with pytest.raises(ResultLost) as lost:
        await told(large, result)
    assert [e.value.code for e in (altered, lost)] == ["output_altered", "output_lost"]
    for error in (altered.value, lost.value):
        assert error.status == 502
        assert f"request {result.request_id} has run and is billed" in error.message
        assert "tensor 'large'" in error.message
        assert error.headers["x-should-retry"] == "false"


async def test_an_output_in_a_store_that_stays_away_is_told_as_such(store: FakeBlobStore) -> None:
    result = referring(store)
    store.away = True
    with pytest.raises(AnswerLost, match=f"request {result.request_id} has run and is billed") as away:
        await told(LargeTensors(claim_check(store)), result, within_s=0.01)
    assert (away.value.status, away.value.code) == (503, "outputs_away")
    assert away.value.headers["x-should-retry"] == "false"


async def test_large_answers_wait_for_room_until_others_are_told_and_no_longer_than_their_deadline(
    store: FakeBlobStore,
) -> None:
    large = LargeTensors(claim_check(store), room_bytes=3000)
    first, second = referring(store), referring(store)
    carried = finished(outputs=(LARGE,))  # as while the store is away
    async with large.whole(first, within_s=5):
        for waits in (second, carried):
            with pytest.raises(AnswerLost, match="has run and is billed, but other large answers") as crowded:
                await told(large, waits, within_s=0.01)
            assert (crowded.value.status, crowded.value.code) == (503, "outputs_crowded")
            assert crowded.value.headers["x-should-retry"] == "false"
        waiting = asyncio.create_task(told(large, second, within_s=60))
        assert (await told(large, finished(), within_s=0)).outputs, "small ones do not wait"
        assert not waiting.done()
    assert (await waiting).outputs == (LARGE,)
    assert large.is_large_answer(await told(large, carried))


async def test_room_comes_back_from_answers_that_fail(store: FakeBlobStore) -> None:
    large = LargeTensors(claim_check(store), room_bytes=2000)
    result = referring(store)
    kept = dict(store.objects)
    store.objects.clear()
    with pytest.raises(ResultLost):
        await told(large, result)
    store.objects.update(kept)
    with pytest.raises(RuntimeError):
        async with large.whole(result, within_s=5):
            raise RuntimeError("while it is told")
    assert (await told(large, result)).outputs == (LARGE,)


async def test_a_result_that_names_more_than_any_may_take_is_refused_without_a_wait(store: FakeBlobStore) -> None:
    result = referring(store)
    (output,) = result.outputs
    assert output.blob is not None
    huge = replace(output, blob=replace(output.blob, size_bytes=LARGEST_BYTES * 10))
    with pytest.raises(ResultLost) as refused:
        await told(LargeTensors(claim_check(store)), replace(result, outputs=(huge,)), within_s=60)
    assert refused.value.code == "output_altered"
