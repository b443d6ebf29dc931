"""I1 and I2: honest logs are accepted, each planted violation is caught and named."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from schemas.records import BucketCharge, InferenceRequested, LimiterMode, UsageRecorded
from streams.replay.limits import LimitProof, least_spare
from streams.replay.proofs import DISCARDED, LedgerKey, LedgerProof, Verdict
from tests.factories import NOON, requested
from tests.unit.streams.usage_samples import usage

HOUR = NOON.replace(minute=0)


def key(meter: str, *, customer: str = "acme", hours: int = 0) -> LedgerKey:
    return (customer, HOUR + timedelta(hours=hours), "digits", "a" * 64, "standard-v1", meter)


def judge(
    records: list[UsageRecorded],
    rows: dict[LedgerKey, int],
    processed: list[UUID],
    *,
    next_offset: int | None = None,
    dead: frozenset[tuple[int, int]] = frozenset(),
    aside_billed: frozenset[UUID] = frozenset(),
    **options: Any,
) -> Verdict:
    position = len(records) if next_offset is None else next_offset
    proof = LedgerProof(next_offsets={0: position}, dead=dead, **options)
    for offset, record in enumerate(records):
        proof.add(0, offset, record)
    return proof.finish(rows=rows, processed=processed, aside_billed=aside_billed)


THREE = [usage(1), usage(2), usage(3)]
IDS = [u.request_id for u in THREE]
ROWS = {key("items"): 12, key("requests"): 3}


def kinds(verdict: Verdict) -> list[str]:
    return [f.what for f in verdict.findings]


def test_an_honest_ledger_holds() -> None:
    verdict = judge(THREE, ROWS, IDS)
    assert verdict.holds is True
    assert verdict.figures["requests"] == 3


def test_duplicates_on_the_topic_are_counted_and_change_nothing() -> None:
    verdict = judge([*THREE, *THREE, THREE[0]], ROWS, IDS)
    assert verdict.holds is True
    assert verdict.figures["duplicates"] == 4


def test_records_past_the_ledgers_position_are_not_demanded() -> None:
    verdict = judge([*THREE, usage(4)], ROWS, IDS, next_offset=3)
    assert verdict.holds is True
    assert verdict.figures["not_yet_read"] == 1


def test_records_before_since_are_not_looked_at() -> None:
    early = usage(9, minutes=-1)
    assert judge([early, *THREE], ROWS, IDS, since=HOUR).holds is True


def test_a_set_aside_record_of_a_billed_request_is_not_demanded() -> None:
    other = usage(3, quantities={"items": 9})
    verdict = judge([*THREE, other], ROWS, IDS, dead=frozenset({(0, 3)}), aside_billed=frozenset({other.request_id}))
    assert verdict.holds is True
    assert verdict.figures["set_aside"] == 1


@pytest.mark.parametrize("lost", [usage(4), usage(4, quantities={"items": -1}), usage(4, customer="")])
def test_a_request_whose_only_record_was_set_aside_was_never_billed(lost: UsageRecorded) -> None:
    verdict = judge([*THREE, lost, lost], ROWS, IDS, dead=frozenset({(0, 3), (0, 4)}))
    assert verdict.holds is False
    assert kinds(verdict) == ["set aside and never billed"]
    assert verdict.findings[0].examples == (str(lost.request_id),)  # once, however often it was set aside
    assert verdict.figures["set_aside"] == 2


def test_a_redriven_record_must_be_billed_and_a_discarded_one_need_not() -> None:
    aside = {"dead": frozenset({(0, 2), (0, 3)}), "settled": {(0, 2): "redriven", (0, 3): "discarded"}}
    discarded = usage(4)
    verdict = judge([*THREE, discarded], ROWS, IDS, **aside)  # type: ignore[arg-type]
    assert verdict.holds is True
    figures = verdict.figures
    assert (figures["set_aside"], figures["redriven"], figures["discarded"]) == (2, 1, 1)
    unbilled = judge([*THREE, discarded], {key("items"): 8, key("requests"): 2}, IDS[:2], **aside)  # type: ignore[arg-type]
    assert kinds(unbilled) == ["request on the topic was never billed", "ledger and topic differ"]
    counted = judge([*THREE, discarded], ROWS, [*IDS, discarded.request_id], **aside)  # type: ignore[arg-type]
    assert kinds(counted) == ["billed request is not on the topic"]


def test_a_redriven_record_that_does_not_decode_here_is_a_gap_and_no_violation() -> None:
    proof = LedgerProof(next_offsets={0: 2}, dead={(0, 0), (0, 1)}, settled={(0, 0): "redriven", (0, 1): "discarded"})
    proof.add_undecodable(0, 0)
    proof.add_undecodable(0, 1)
    verdict = proof.finish(rows=ROWS, processed=IDS, aside_billed=frozenset())
    assert verdict.holds is None
    assert "a newer inferlog has to verify it" in verdict.notes[0]


def test_a_request_set_aside_here_and_billed_in_an_hour_not_looked_at_was_billed() -> None:
    early, late = usage(4, minutes=-90), usage(4, minutes=1)
    options = {"since": HOUR, "dead": frozenset({(0, 4)}), "aside_billed": frozenset({late.request_id})}
    assert judge([*THREE, early, late], ROWS, IDS, **options).holds is True


@pytest.mark.parametrize(
    ("records", "rows", "processed", "kind", "example"),
    [
        (THREE, {**ROWS, key("items"): 16}, IDS, "ledger and topic differ", "items: ledger 16, topic 12"),
        (THREE, {key("items"): 12}, IDS, "ledger and topic differ", "requests: ledger 0, topic 3"),
        (THREE, {**ROWS, key("items", hours=1): 4}, IDS, "ledger and topic differ", "2026-03-01T13Z"),
        (THREE, {**ROWS, key("items", customer="eve"): 4}, IDS, "ledger and topic differ", "eve"),
        (THREE, ROWS, IDS[:2], "request on the topic was never billed", str(IDS[2])),
        (THREE, ROWS, [*IDS, UUID(int=99)], "billed request is not on the topic", str(UUID(int=99))),
        (
            [*THREE, usage(3, quantities={"requests": 1, "items": 5})],
            ROWS,
            IDS,
            "usage records of one request differ",
            str(IDS[2]),
        ),
    ],
)
def test_each_planted_violation_is_caught_and_named(
    records: list[UsageRecorded], rows: dict[LedgerKey, int], processed: list[UUID], kind: str, example: str
) -> None:
    verdict = judge(records, rows, processed)
    assert verdict.holds is False
    assert kinds(verdict) == [kind]
    assert example in verdict.findings[0].examples[0]


def test_an_undecodable_record_must_have_been_set_aside() -> None:
    for dead, holds in ((frozenset[tuple[int, int]](), False), (frozenset({(0, 0)}), True)):
        proof = LedgerProof(next_offsets={0: 1}, dead=dead)
        proof.add_undecodable(0, 0)
        proof.add_undecodable(0, 1)  # not yet read by the ledger
        verdict = proof.finish(rows={}, processed=[], aside_billed=frozenset())
        assert verdict.holds is holds
        assert verdict.figures["undecodable"] == 1


def test_an_undecodable_record_that_was_discarded_is_a_decision_and_no_open_question() -> None:
    proof = LedgerProof(next_offsets={0: 2}, dead=frozenset({(0, 0), (0, 1)}), settled={(0, 0): DISCARDED})
    proof.add_undecodable(0, 0)
    proof.add_undecodable(0, 1)
    verdict = proof.finish(rows={}, processed=[], aside_billed=frozenset())
    assert (verdict.figures["undecodable"], verdict.figures[DISCARDED]) == (1, 1)


def test_a_trimmed_topic_is_not_called_proved() -> None:
    proof = LedgerProof(next_offsets={0: 3}, dead=frozenset())
    gap = proof.finish(rows=ROWS, processed=IDS, aside_billed=frozenset(), notes=["the head is gone"])
    assert gap.holds is None


def test_only_the_first_ten_examples_are_kept_and_all_are_counted() -> None:
    verdict = judge([], {}, [UUID(int=n) for n in range(1, 26)])
    assert verdict.findings[0].count == 25
    assert len(verdict.findings[0].examples) == 10


def admission(micros: int, *, cost: int = 1, interval_us: int = 100, burst: int = 2, bucket: str = "key:k1") -> Any:
    return requested(
        limiter_time=NOON + timedelta(microseconds=micros),
        limiter_buckets=(BucketCharge(bucket=bucket, interval_us=interval_us, burst=burst, cost=cost, remaining=0),),
    )


def limits(*records: InferenceRequested) -> Verdict:
    proof = LimitProof()
    for record in records:
        proof.add(record)
    return proof.finish()


def test_a_full_burst_and_then_the_rate_holds_with_nothing_to_spare() -> None:
    verdict = limits(admission(200), admission(0), admission(0), admission(100))  # order of arrival is no matter
    assert verdict.holds is True
    assert verdict.figures["least_spare_us"] == 0


def test_one_microsecond_too_soon_is_caught_with_its_pair() -> None:
    first, last = admission(0), admission(99)
    verdict = limits(first, admission(0), last)
    assert verdict.holds is False
    assert verdict.figures["least_spare_us"] == -1
    assert "1 µs too soon" in verdict.findings[0].examples[0]
    assert str(last.request_id) in verdict.findings[0].examples[0]


def test_buckets_are_judged_apart_and_cost_counts() -> None:
    assert limits(admission(0), admission(0), admission(0, bucket="key:k2"), admission(0, bucket="key:k2")).holds
    assert limits(admission(0, cost=2), admission(99)).holds is False
    assert limits(admission(0, cost=2), admission(100)).holds is True


def test_a_redelivered_admission_counts_once_and_another_admission_of_it_again() -> None:
    a = admission(0, burst=1)
    assert limits(a, a).holds is True
    again = admission(50, burst=1)
    object.__setattr__(again, "request_id", a.request_id)
    assert limits(a, again).holds is False


@pytest.mark.parametrize("with_evidence", [0, 1, 5])
@pytest.mark.parametrize("without", [1, 3])
def test_admissions_without_evidence_are_a_gap_and_not_a_proof(with_evidence: int, without: int) -> None:
    bare = [requested(limiter_buckets=(), request_id=uuid4()) for _ in range(without)]
    verdict = limits(*[admission(1000 * n) for n in range(with_evidence)], *bare)
    assert verdict.holds is None
    assert verdict.figures["without_evidence"] == without
    assert f"{without} of {without + with_evidence} admissions name no limiter bucket" in verdict.notes[0]


def test_a_bucket_over_its_rate_outweighs_missing_evidence() -> None:
    assert limits(admission(0, burst=1), admission(1, burst=1), requested(limiter_buckets=())).holds is False


def test_no_admissions_at_all_keep_every_rate() -> None:
    verdict = limits()
    assert verdict.holds is True
    assert verdict.figures["least_spare_us"] is None
    assert least_spare([]) is None


def test_a_customers_bucket_of_a_model_is_not_anothers() -> None:
    one, other = admission(0, bucket="model:digits", burst=1), admission(0, bucket="model:digits", burst=1)
    object.__setattr__(other, "customer_id", "somebody else")
    assert limits(one, other).holds is True


def test_a_limit_that_was_changed_keeps_what_was_used() -> None:
    raised = [admission(0), admission(0), admission(10, burst=20, interval_us=10)]
    assert limits(*raised, *[admission(10, burst=20, interval_us=10) for _ in range(17)]).holds is True
    # Ten microseconds at the new pace gave one unit back, and no more.
    assert limits(*raised, *[admission(10, burst=20, interval_us=10) for _ in range(19)]).holds is False


def alone(micros: int, gateway: str, *, shares: int = 4, burst: int = 2) -> Any:
    evidence = BucketCharge(bucket="key:k1", interval_us=100 * shares, burst=burst, cost=1, remaining=0, shares=shares)
    return requested(
        limiter=LimiterMode.LOCAL,
        limiter_time=NOON + timedelta(microseconds=micros),
        limiter_buckets=(evidence,),
        reply_to=gateway,
    )


def test_what_gateways_decided_alone_is_held_to_their_shares() -> None:
    every = [alone(0, f"api-{n}") for n in range(4) for _ in range(2)]
    assert limits(*every).holds is True
    assert limits(*every).figures["by_gateways_alone"] == 8
    one_more = limits(*every, alone(399, "api-0"))
    assert one_more.holds is False
    assert one_more.findings[0].what == "share over its rate"
    assert "at api-0" in one_more.findings[0].examples[0]


def test_more_gateways_than_there_are_shares_are_over_the_rate_together() -> None:
    crowd = limits(*[alone(0, f"api-{n}") for n in range(5) for _ in range(2)])
    assert crowd.holds is False
    assert [f.what for f in crowd.findings] == ["shares together over the rate"]


def test_an_admission_by_a_limiter_of_a_newer_release_proves_nothing() -> None:
    unknown = admission(0)
    object.__setattr__(unknown, "limiter", LimiterMode.UNKNOWN)
    assert limits(unknown).holds is None
