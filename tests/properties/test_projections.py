"""However often and in whatever batches records arrive, the ledger ends the same."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.records import UsageRecorded
from streams.dead_letters import RawRecord
from streams.delivery import Delivery
from streams.projections import hourly_rows, next_offsets, processed_rows
from tests.conftest import run_apart
from tests.unit.streams.fake_ledger import FakeLedger
from tests.unit.streams.usage_samples import located, raw, usage

records = st.builds(
    usage,
    st.integers(0, 40),
    customer=st.sampled_from(["acme", "bolt", "cora"]),
    minutes=st.integers(-90, 90),
    quantities=st.dictionaries(st.sampled_from(["requests", "items", "tokens"]), st.integers(0, 50), min_size=1),
)
unique = st.lists(records, max_size=40, unique_by=lambda r: r.request_id)


def deliver(batches: list[list[RawRecord]]) -> FakeLedger:
    ledger = FakeLedger()
    delivery = Delivery(ledger, give_up_s=1)

    async def all_of_them() -> None:
        for batch in batches:
            await delivery.deliver(batch)

    run_apart(all_of_them())
    return ledger


@st.composite
def redeliveries(draw: st.DrawFn) -> tuple[list[UsageRecorded], list[list[RawRecord]]]:
    """Records, and batches that carry each of them at least once: with repetitions, cut anywhere, some going back."""
    once = draw(unique)
    log = [raw(r, offset) for offset, r in enumerate(once)]
    for r in draw(st.lists(st.sampled_from(once), max_size=30)) if once else []:
        log.append(raw(r, len(log)))
    batches: list[list[RawRecord]] = []
    at = 0
    while at < len(log):
        size = draw(st.integers(1, 12))
        batches.append(log[at : at + size])
        at = at + size if draw(st.booleans()) else max(at + 1, at + size - draw(st.integers(0, 6)))  # read again
    return once, batches


@given(redeliveries())
@settings(deadline=None)
def test_duplicates_and_batches_make_no_difference(case: tuple[list[UsageRecorded], list[list[RawRecord]]]) -> None:
    once, batches = case
    ledger = deliver(batches)
    expected: Counter[tuple[object, ...]] = Counter()
    for r in once:
        hour = r.occurred_at.replace(minute=0)
        for meter, quantity in r.quantities.items():
            expected[r.customer_id, hour, r.model, r.version, r.price_id, meter] += quantity
    assert ledger.sums == dict(expected)
    assert ledger.processed == {r.request_id for r in once}
    assert not ledger.dead
    assert ledger.positions == ({0: 1 + max(x.offset for b in batches for x in b)} if batches else {})


@given(unique)
def test_rows_come_sorted_by_their_keys_and_keep_the_sum(once: list[UsageRecorded]) -> None:
    usages = [located(r) for r in once]
    rows = hourly_rows(usages)
    keys = [row.values()[:6] for row in rows]
    assert keys == sorted(set(keys))
    assert sum(row.quantity for row in rows) == sum(sum(r.quantities.values()) for r in once)
    assert hourly_rows(list(reversed(usages))) == rows
    ids = [request_id for request_id, _ in processed_rows(usages)]
    assert ids == sorted(ids)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000)), min_size=1))
def test_the_position_is_one_past_the_highest_offset_of_each_partition(places: list[tuple[int, int]]) -> None:
    found = {o.partition: o.next_offset for o in next_offsets([raw(b"", o, partition=p) for p, o in places])}
    assert found == {p: 1 + max(o for q, o in places if q == p) for p, _ in places}
