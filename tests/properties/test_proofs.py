"""The proofs agree with slow and obvious ones, on honest logs and on tampered ones."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from itertools import pairwise
from math import floor

from hypothesis import assume, given
from hypothesis import strategies as st

from schemas.records import UsageRecorded
from streams.replay.limits import Taken, least_spare
from streams.replay.proofs import LedgerKey, LedgerProof, hour_start
from tests.gcra import Bucket, Model, excess_of_changing_us
from tests.unit.streams.usage_samples import usage

admissions = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 4)), min_size=1, max_size=25).map(sorted)


def brute_force(log: list[tuple[int, int]], interval_us: int, burst: int) -> int:
    return min(
        (log[j][0] - log[i][0]) - (sum(cost for _, cost in log[i : j + 1]) - burst) * interval_us
        for j in range(len(log))
        for i in range(j + 1)
    )


def taken(log: list[tuple[int, int]], interval_us: int, burst: int) -> list[Taken]:
    return [Taken(at_us=at, cost=cost, interval_us=interval_us, burst=burst) for at, cost in log]


@given(admissions, st.integers(1, 40), st.integers(1, 6))
def test_one_pass_finds_the_worst_of_all_pairs(log: list[tuple[int, int]], interval_us: int, burst: int) -> None:
    found = least_spare(taken(log, interval_us, burst))
    assert found is not None
    assert found.spare_us == brute_force(log, interval_us, burst)
    run = log[found.first : found.last + 1]
    pair = (run[-1][0] - run[0][0]) - (sum(cost for _, cost in run) - burst) * interval_us
    assert pair == found.spare_us


def gcra(arrivals: list[tuple[int, int]], interval_us: int, burst: int) -> list[tuple[int, int]]:
    """What an honest limiter admits of these (time, cost) arrivals."""
    arrival_time = 0
    admitted = []
    for now, cost in arrivals:
        new = max(arrival_time, now) + cost * interval_us
        if new - now <= burst * interval_us:
            arrival_time = new
            admitted.append((now, cost))
    return admitted


@given(admissions, st.integers(1, 40), st.integers(1, 6))
def test_an_honest_limiter_always_passes(arrivals: list[tuple[int, int]], interval_us: int, burst: int) -> None:
    found = least_spare(taken(gcra(arrivals, interval_us, burst), interval_us, burst))
    assert found is None or found.spare_us >= 0


@given(admissions, st.integers(2, 40), st.integers(1, 6))
def test_a_limiter_that_admits_what_gcra_refuses_is_caught(
    arrivals: list[tuple[int, int]], interval_us: int, burst: int
) -> None:
    assume(gcra(arrivals, interval_us, burst) != arrivals)
    found = least_spare(taken(arrivals, interval_us, burst))
    assert found is not None
    assert found.spare_us < 0


changing = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 4), st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=40
)


@given(changing)
def test_a_limiter_whose_limits_change_at_every_call_passes_and_both_judges_say_the_same(
    steps: list[tuple[int, int, int, int]],
) -> None:
    """The proof of the log, the tests' own judge and the model were written apart."""
    model, at, asked, admitted = Model(), 0, [], []
    for step, cost, interval_us, burst in steps:
        at += step
        one = Taken(at_us=at, cost=min(cost, burst), interval_us=interval_us, burst=burst)
        asked.append(one)
        if model.take([Bucket("a", interval_us, burst, one.cost)], at)[0]:
            admitted.append(one)
    found = least_spare(admitted)
    assert found is None or found.spare_us >= 0
    for log in (asked, admitted):
        found, excess = least_spare(log), excess_of_changing_us((t.at_us, t.cost, t.interval_us, t.burst) for t in log)
        if not any(a.at_us == b.at_us for a, b in pairwise(log)):  # whose order the judges may see differently
            assert (0 if found is None else found.spare_us) == floor(-excess)


records = st.lists(
    st.builds(
        usage,
        st.integers(0, 60),
        customer=st.sampled_from(["acme", "bolt"]),
        minutes=st.integers(-90, 90),
        quantities=st.dictionaries(st.sampled_from(["requests", "items"]), st.integers(0, 9), min_size=1),
    ),
    min_size=1,
    max_size=30,
    unique_by=lambda r: r.request_id,
)


def ledger_of(once: list[UsageRecorded]) -> dict[LedgerKey, int]:
    sums: Counter[LedgerKey] = Counter()
    for r in once:
        for meter, quantity in r.quantities.items():
            sums[r.customer_id, hour_start(r.occurred_at), r.model, r.version, r.price_id, meter] += quantity
    return dict(sums)


def proof_of(log: list[UsageRecorded]) -> LedgerProof:
    proof = LedgerProof(next_offsets={0: len(log)}, dead=frozenset())
    for offset, record in enumerate(log):
        proof.add(0, offset, record)
    return proof


@given(records, st.data())
def test_i1_accepts_any_repetition(once: list[UsageRecorded], data: st.DataObject) -> None:
    log = once + data.draw(st.lists(st.sampled_from(once), max_size=20))
    verdict = proof_of(log).finish(
        rows=ledger_of(once), processed=[r.request_id for r in once], aside_billed=frozenset()
    )
    assert verdict.holds is True
    assert verdict.figures["duplicates"] == len(log) - len(once)


@given(records, st.data())
def test_i1_catches_any_tampered_row(once: list[UsageRecorded], data: st.DataObject) -> None:
    rows = ledger_of(once)
    key = data.draw(st.sampled_from(sorted(rows)))
    by = data.draw(st.integers(-5, 5).filter(bool))
    moved = (key[0], key[1] + timedelta(hours=24), *key[2:])
    tampered = data.draw(
        st.sampled_from([{**rows, key: rows[key] + by}, {**{k: q for k, q in rows.items() if k != key}, moved: by}])
    )
    assert (
        proof_of(once).finish(rows=tampered, processed=[r.request_id for r in once], aside_billed=frozenset()).holds
        is False
    )


@given(records, st.data())
def test_i1_catches_a_request_billed_never_or_from_nowhere(once: list[UsageRecorded], data: st.DataObject) -> None:
    left_out = data.draw(st.sampled_from(once)).request_id
    others = [r.request_id for r in once if r.request_id != left_out]
    assert proof_of(once).finish(rows=ledger_of(once), processed=others, aside_billed=frozenset()).holds is False
    foreign = usage(1000).request_id
    ids = [*others, left_out, foreign]
    assert proof_of(once).finish(rows=ledger_of(once), processed=ids, aside_billed=frozenset()).holds is False
