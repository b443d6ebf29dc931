"""However often and in whatever batches records arrive, the ledger ends the same."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.records import UsageRecorded
from streams.ledger.delivery import Delivery
from streams.ledger.projections import content_digest, hourly_rows, processed_rows
from streams.ledger.raw import RawRecord
from streams.replay.proofs import LedgerProof, Verdict
from tests.conftest import run_apart
from tests.unit.streams.ledger.fake_ledger import FakeLedger
from tests.unit.streams.usage_samples import NOON, located, raw, usage

HOUR = timedelta(hours=1)

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
    assert ledger.processed.keys() == {r.request_id for r in once}
    assert not ledger.dead
    assert ledger.positions == ({0: 1 + max(x.offset for b in batches for x in b)} if batches else {})


contradicting = st.lists(
    st.builds(
        usage,
        st.integers(0, 3),
        customer=st.sampled_from(["acme", ""]),  # nobody can be billed for the second
        minutes=st.sampled_from([0, 70]),
        quantities=st.sampled_from([{"items": 1}, {"items": 2}, {"items": 3, "requests": 1}]),
    ),
    max_size=12,
)


def judged(ledger: FakeLedger, log: list[UsageRecorded], since: datetime | None) -> Verdict:
    """I1 of what a ledger made of a log."""
    proof = LedgerProof(next_offsets={0: len(log)}, dead=ledger.dead.keys(), since=since)
    for offset, record in enumerate(log):
        proof.add(0, offset, record)
    first_hour = NOON - timedelta(days=1) if since is None else since
    rows = {k: q for k, q in ledger.sums.items() if k[1] >= first_hour}  # type: ignore[operator]
    occurred = {content_digest(r): r.occurred_at for r in log}
    processed = [i for i, digest in ledger.processed.items() if digest and occurred[digest] >= first_hour]
    return proof.finish(rows=rows, processed=processed, aside_billed=proof.aside & ledger.processed.keys())  # type: ignore[arg-type]


@given(contradicting, st.lists(st.integers(1, 12), min_size=12, max_size=12), st.sampled_from([None, NOON + HOUR]))
@settings(deadline=None)
def test_contradictions_end_the_same_wherever_batches_end(
    log: list[UsageRecorded], sizes: list[int], since: datetime | None
) -> None:
    places = [raw(r, offset) for offset, r in enumerate(log)]
    one_by_one = deliver([[place] for place in places])
    cut = deliver([places[sum(sizes[:n]) : sum(sizes[: n + 1])] for n in range(len(sizes))])
    whole = deliver([places, places])  # and read again
    for ledger in (cut, whole):
        assert ledger.sums == one_by_one.sums
        assert ledger.processed == one_by_one.processed
        assert ledger.dead.keys() == one_by_one.dead.keys()
        assert judged(ledger, log, since) == judged(one_by_one, log, since)
    # What was set aside is no violation by itself; a request that nobody was billed for is.
    looked_at = [r for r in log if since is None or r.occurred_at >= since]
    unbilled = {r.request_id for r in looked_at} - one_by_one.processed.keys()
    verdict = judged(one_by_one, log, since)
    assert [f.what for f in verdict.findings] == (["set aside and never billed"] if unbilled else [])
    assert sum(f.count for f in verdict.findings) == len(unbilled)


@given(unique)
def test_rows_come_sorted_by_their_keys_and_keep_the_sum(once: list[UsageRecorded]) -> None:
    usages = [located(r) for r in once]
    rows = hourly_rows(usages)
    keys = [row.values()[:6] for row in rows]
    assert keys == sorted(set(keys))
    assert sum(row.quantity for row in rows) == sum(sum(r.quantities.values()) for r in once)
    assert hourly_rows(list(reversed(usages))) == rows
    ids = [request_id for request_id, _, _ in processed_rows(usages)]
    assert ids == sorted(ids)
