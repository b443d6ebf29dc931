"""Whatever a request holds: what its record carries is within the threshold, no more leaves than must, and nothing of
it is changed on the way."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from schemas.claims import checked_in, data_bytes, leaving, redeemed
from schemas.tensors import Tensor

sizes = st.lists(st.integers(0, 10_000), max_size=12)
limits = st.integers(0, 20_000)


@given(sizes, limits)
def test_as_few_leave_as_possible_and_the_rest_is_within_the_threshold(found: list[int], inline_bytes: int) -> None:
    gone = leaving(found, inline_bytes=inline_bytes)
    rest = sum(size for i, size in enumerate(found) if i not in gone)
    assert rest <= inline_bytes
    if gone:
        smallest = min(found[i] for i in gone)
        assert rest + smallest > inline_bytes, "the last to leave had to"
        assert all(found[i] <= smallest for i in range(len(found)) if i not in gone), "the largest leave first"


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(0, 600))
def test_what_is_checked_in_comes_back_as_it_was(datas: list[bytes], inline_bytes: int) -> None:
    tensors = tuple(
        Tensor(name=f"t{i}", datatype="UINT8", shape=(len(data),), data=data) for i, data in enumerate(datas)
    )
    carried, kept = checked_in(tensors, UUID(int=1), inline_bytes=inline_bytes)
    assert data_bytes(carried) <= inline_bytes
    assert {t.blob.key for t in carried if t.blob} == kept.keys()
    assert tuple(redeemed(t, t.blob, kept[t.blob.key]) if t.blob else t for t in carried) == tensors
