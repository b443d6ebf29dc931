"""Tensors to the store and back: verified, in bounded time, and without a wait for a store that is known to be away."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from uuid import UUID

import pytest

from infra import blobs as module
from infra.s3 import StoreUnavailable
from schemas.claims import BlobAltered, BlobLost
from schemas.tensors import Tensor
from tests.blob_store import LARGE, FakeBlobStore, claim_check
from tests.conditions import eventually

ID = UUID(int=7)
SMALL = Tensor(name="small", datatype="UINT8", shape=(1, 10), data=bytes(10))


async def test_large_tensors_go_and_come_back_and_small_ones_stay(store: FakeBlobStore) -> None:
    check = claim_check(store)
    assert not check.is_due([SMALL])
    assert check.is_due([SMALL, LARGE])
    carried = await check.hand_in([SMALL, LARGE], ID, within_s=5)
    assert [t.blob is None for t in carried] == [True, False]
    assert list(store.objects.values()) == [LARGE.data]
    assert await check.redeem(carried, ID, within_s=5) == (SMALL, LARGE)
    assert check.counts == {"blobs_kept": 1, "blobs_fetched": 1}
    assert await check.hand_in([SMALL, LARGE], ID, within_s=5) == carried, "again, after a crash"


async def test_lost_and_altered_bytes_are_told_at_once_and_the_store_is_not_blamed(store: FakeBlobStore) -> None:
    check = claim_check(store)
    carried = await check.hand_in([LARGE], ID, within_s=5)
    (key,) = store.objects
    store.objects[key] = b"\x02" * 2000
    with pytest.raises(BlobAltered, match="tensor 'large': expected sha256"):
        await check.redeem(carried, ID, within_s=60)
    store.objects[key] = b"\x01" * 5000
    with pytest.raises(BlobAltered, match="expected 2000 bytes"):
        await check.redeem(carried, ID, within_s=60)
    del store.objects[key]
    with pytest.raises(BlobLost, match=r"tensor 'large': s3://fake/blobs/.* does not exist"):
        await check.redeem(carried, ID, within_s=60)
    assert check.counts["blobs_broken"] == 3
    assert check.trouble() is None


async def test_while_the_store_is_away_only_one_call_in_a_while_asks_it(store: FakeBlobStore) -> None:
    check = claim_check(store)
    store.away = True
    for _ in range(20):
        with pytest.raises(StoreUnavailable, match="switched off"):
            await check.hand_in([LARGE], ID, within_s=5)
    assert store.calls == ["put"]
    assert check.counts["blobs_not_kept"] == 20
    assert "switched off" in str(check.trouble())


async def test_a_store_that_is_back_is_found_out_and_used(
    store: FakeBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", 0.05)
    check = claim_check(store)
    carried = await check.hand_in([LARGE], ID, within_s=5)
    store.away = True
    waiting = asyncio.create_task(check.redeem(carried, ID, within_s=60))
    await eventually(lambda: store.calls.count("get") >= 2)
    assert check.trouble()
    store.away = False
    assert await waiting == (LARGE,)
    assert check.trouble() is None


async def test_a_fetch_gives_up_when_its_time_is_over(store: FakeBlobStore) -> None:
    check = claim_check(store)
    carried = await check.hand_in([LARGE], ID, within_s=5)
    store.away = True
    with pytest.raises(StoreUnavailable):
        await check.redeem(carried, ID, within_s=0.05)
    assert check.counts["blobs_not_fetched"] == 1


async def test_a_store_that_hangs_is_not_waited_for_longer_than_allowed_and_then_not_asked(
    store: FakeBlobStore,
) -> None:
    check = claim_check(store, patience_s=0.05)
    store.open.clear()
    for _ in range(10):
        with pytest.raises(StoreUnavailable, match="no answer within"):
            await check.hand_in([LARGE], ID, within_s=5)
    assert store.calls == ["put"]


async def test_a_caller_with_just_the_time_that_counts_finds_a_store_that_hangs(store: FakeBlobStore) -> None:
    check = claim_check(store, patience_s=0.05)
    store.open.clear()
    with pytest.raises(StoreUnavailable):
        await check.hand_in([LARGE], ID, within_s=0.05)
    assert "no answer within" in str(check.trouble())


async def test_callers_in_a_hurry_do_not_make_the_store_look_away_to_others(store: FakeBlobStore) -> None:
    check = claim_check(store, patience_s=5)
    store.open.clear()
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await check.hand_in([LARGE], ID, within_s=0.01)
    store.open.set()
    assert check.trouble() is None
    assert (await check.hand_in([LARGE], ID, within_s=5))[0].blob is not None


async def test_no_more_is_fetched_than_the_loop_takes(store: FakeBlobStore) -> None:
    check = claim_check(store)
    carried = await check.hand_in([LARGE], ID, within_s=5)
    store.open.clear()
    calls = [asyncio.create_task(check.redeem(carried, ID, within_s=5)) for _ in range(20)]
    await eventually(lambda: store.calls.count("get") == 4)
    store.open.set()
    check._threads.submit(lambda: None).result()  # the loop stands still until all that was handed out is done
    assert store.calls.count("get") == 4
    assert await asyncio.gather(*calls) == [(LARGE,)] * 20


async def test_an_answer_that_breaks_off_is_asked_for_again(
    store: FakeBlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSE_S", 0.05)
    check = claim_check(store)
    carried = await check.hand_in([LARGE], ID, within_s=5)
    store.breaks_off = 1
    assert await check.redeem(carried, ID, within_s=60) == (LARGE,)
    assert check.counts["blobs_broken"] == 0


async def test_waiting_for_other_calls_says_nothing_about_the_store(store: FakeBlobStore) -> None:
    check = claim_check(store, patience_s=60)
    store.open.clear()
    working = [asyncio.create_task(check.hand_in([LARGE], UUID(int=i), within_s=60)) for i in range(4)]
    await eventually(lambda: len(store.calls) == 4)
    check._patience_s = 0.05  # far shorter than the wait for a turn
    with pytest.raises(StoreUnavailable, match="busy"):
        await check.hand_in([LARGE], ID, within_s=0.1)
    assert check.trouble() is None
    waiting = asyncio.create_task(check.hand_in([LARGE], ID, within_s=60))
    store.open.set()
    await asyncio.gather(waiting, *working)
    assert check.trouble() is None


async def test_a_thread_that_nobody_waits_for_any_more_is_still_taken(store: FakeBlobStore) -> None:
    check = claim_check(store)
    store.open.clear()
    for _ in range(4):
        with pytest.raises(StoreUnavailable, match="no answer"):
            await check.hand_in([LARGE], ID, within_s=0.01)
    with pytest.raises(StoreUnavailable, match="busy"):
        await check.hand_in([LARGE], ID, within_s=0.01)
    store.open.set()
    await check.hand_in([LARGE], ID, within_s=60)


async def test_those_that_wait_while_the_store_goes_away_do_not_ask_it_one_by_one(store: FakeBlobStore) -> None:
    check = claim_check(store)
    store.open.clear()
    store.away = True
    calls = [asyncio.create_task(check.hand_in([LARGE], ID, within_s=60)) for _ in range(20)]
    await eventually(lambda: len(store.calls) == 4)
    store.open.set()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(end, StoreUnavailable) for end in ends)
    assert len(store.calls) == 4


@pytest.mark.parametrize("key", ["blobs/x", "models/secret", f"blobs/{UUID(int=8)}/{'0' * 64}"])
async def test_a_forged_key_is_not_fetched_and_does_not_make_the_store_look_away(
    store: FakeBlobStore, key: str
) -> None:
    check = claim_check(store)
    (carried,) = await check.hand_in([LARGE], ID, within_s=5)
    assert carried.blob is not None
    forged = replace(carried, blob=replace(carried.blob, key=key))
    store.objects[key] = LARGE.data
    with pytest.raises(BlobAltered, match="tensor 'large': expected a key blobs/"):
        await check.redeem([forged], ID, within_s=60)
    with pytest.raises(BlobAltered):
        await check.redeem([carried], UUID(int=8), within_s=60)
    assert store.calls == ["put"]
    assert check.counts["blobs_broken"] == 2
    assert check.trouble() is None
