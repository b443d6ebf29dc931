"""I3 and I4: honest logs are accepted, each planted violation is caught and named."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from schemas.ids import usage_id
from schemas.records import InferenceFinished, InferenceRequested, Outcome, UsageRecorded
from streams.replay.conservation import RequestBook
from streams.replay.proofs import Verdict
from tests.factories import NOON, finished, requested, usage

REQUESTS = "inference.requests.default.v1"
RESULTS = "inference.results.v1"


def usage_of(r: InferenceRequested, **changes: Any) -> UsageRecorded:
    fields: dict[str, Any] = {
        "event_id": usage_id(r.request_id),
        "request_id": r.request_id,
        "customer_id": r.customer_id,
        "occurred_at": r.occurred_at,
        "version": r.version,
        "quantities": {"requests": 1, "items": 1},
    }
    return usage(**{**fields, **changes})


def book(
    requests: Iterable[InferenceRequested] = (),
    results: Iterable[InferenceFinished] = (),
    usages: Iterable[UsageRecorded] = (),
    **options: Any,
) -> RequestBook:
    made = RequestBook(**options)
    for offset, request in enumerate(requests):
        made.add_request((REQUESTS, 0, offset), request)
    for offset, result in enumerate(results):
        made.add_result((RESULTS, 0, offset), result)
    for record in usages:
        made.add_usage(record)
    return made


def conservation(made: RequestBook, *, committed: int = 0) -> Verdict:
    return made.prove_conservation(committed={(REQUESTS, 0): committed})[0]


A, B, C = requested(), requested(occurred_at=NOON + timedelta(hours=1)), requested()


def test_an_honest_log_holds_hour_by_hour() -> None:
    expired = finished(B, outcome=Outcome.EXPIRED, quantities={}, outputs=())
    made = book([A, B, C], [finished(A), expired], [usage_of(A)])
    verdict, hours, open_ids = made.prove_conservation(committed={(REQUESTS, 0): 2})
    assert verdict.holds is True
    assert [(h["accepted"], h["succeeded"], h["expired"], h["open"]) for h in hours] == [(2, 1, 0, 1), (1, 0, 1, 0)]
    assert open_ids == [str(C.request_id)]
    assert made.prove_versions().holds is True
    assert not made.unsettled()


def test_repeated_records_change_nothing_and_are_counted() -> None:
    made = book([A, A], [finished(A), finished(A)], [usage_of(A), usage_of(A)])
    verdict = conservation(made, committed=2)
    assert verdict.holds is True
    assert verdict.figures["accepted"] == 1
    assert verdict.figures["repeated_requests"] == 1
    assert verdict.figures["repeated_results"] == 1


def test_the_first_result_by_place_counts_whatever_the_order_of_reading() -> None:
    made = book([A])
    made.add_result((RESULTS, 0, 7), finished(A, outcome=Outcome.EXPIRED, quantities={}))
    made.add_result((RESULTS, 0, 3), finished(A))
    made.add_usage(usage_of(A))
    verdict = conservation(made)
    assert verdict.holds is True
    assert verdict.figures["succeeded"] == 1


def test_another_version_than_admitted_is_caught() -> None:
    verdict = book([A], [finished(A, version="cd" * 32)], [usage_of(A)]).prove_versions()
    assert verdict.holds is False
    assert str(A.request_id) in verdict.findings[0].examples[0]


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("repeated", [False, True])
def test_a_batch_that_ran_two_versions_is_caught(outcome: Outcome, repeated: bool) -> None:
    """Whatever each of its records says of its own request, and also when a record is not its request's result."""
    batch = uuid4()
    first = [finished(B)] if repeated else []
    one = finished(A, batch_id=batch, batch_items=2)
    other = finished(replace(B, version="cd" * 32), batch_id=batch, batch_items=2, outcome=outcome)
    verdict = book([A, replace(B, version="cd" * 32) if not repeated else B], [*first, one, other]).prove_versions()
    assert verdict.holds is False
    found = {f.what: f.examples for f in verdict.findings}
    assert found["one batch ran several versions"] == (f"{batch}: {A.version[:12]}, {'cd' * 6}",)


def test_batches_of_one_version_each_hold_and_what_never_ran_has_no_batch() -> None:
    one, other = uuid4(), uuid4()
    moved = replace(C, version="cd" * 32)
    results = [finished(A, batch_id=one), finished(B, batch_id=one), finished(moved, batch_id=other)]
    verdict = book([A, B, moved], [*results, *results]).prove_versions()
    assert verdict.holds is True
    assert verdict.figures["batches"] == 2
    expired = [finished(r, batch_id=one, batch_items=0, outcome=Outcome.EXPIRED) for r in (A, moved)]
    verdict = book([A, moved], expired).prove_versions()
    assert verdict.holds is True
    assert verdict.figures["batches"] == 0


def test_a_failed_request_may_name_any_version() -> None:
    assert book([A], [finished(A, outcome=Outcome.FAILED, version="cd" * 32)]).prove_versions().holds is True


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (book([A], [finished(A)], []), "succeeded without usage"),
        (book([], [finished(A)], [usage_of(A)]), "result without a request"),
        (book([], [], [usage_of(A)]), "usage without a request"),
        (book([A], [], [usage_of(A)]), "usage without a result"),
        (
            book([A], [finished(A)], [usage_of(A, quantities={"requests": 1, "items": 2})]),
            "usage and result differ in quantities",
        ),
        (
            book([A], [finished(A, outcome=Outcome.FAILED, quantities={})], [usage_of(A)]),
            "usage of a request that did not succeed",
        ),
        (book([A], [finished(A, customer_id="eve")], [usage_of(A)]), "result belongs to another customer"),
        (book([A], [finished(A, outcome=Outcome.UNKNOWN, quantities={})]), "outcome is unknown here"),
    ],
)
def test_each_planted_violation_is_caught_and_named(made: RequestBook, kind: str) -> None:
    verdict = conservation(made)
    assert verdict.holds is False
    assert kind in [f.what for f in verdict.findings]
    found = next(f for f in verdict.findings if f.what == kind)
    assert found.examples == (str(A.request_id),)


def test_a_request_that_the_workers_went_past_without_a_result_is_lost() -> None:
    assert conservation(book([A]), committed=0).holds is True  # still waiting
    verdict = conservation(book([A]), committed=1)
    assert verdict.holds is False
    assert verdict.findings[0].what.startswith("lost")
    assert conservation(book([A, A]), committed=1).holds is True  # its second copy still waits


def test_unsettled_are_pairs_of_which_one_half_is_missing() -> None:
    made = book([A, B], [finished(A)], [usage_of(B)])
    assert made.unsettled() == {A.request_id, B.request_id}
    made.add_usage(usage_of(A))
    made.add_result((RESULTS, 0, 9), finished(B))
    assert not made.unsettled()
    assert conservation(made).holds is True


def test_usage_that_was_set_aside_is_no_usage_and_is_not_awaited() -> None:
    made = book([A, B], [finished(A), finished(B)], [usage_of(B)])
    made.add_aside(usage_of(A))
    made.add_aside(usage_of(B, quantities={"items": 9}))  # B was billed by its other record
    assert not made.unsettled()
    verdict = conservation(made)
    assert [(f.what, f.examples) for f in verdict.findings] == [
        ("succeeded, and its usage was set aside", (str(A.request_id),))
    ]


def test_usage_that_was_discarded_is_not_missed() -> None:
    made = book([A], [finished(A)], [])
    made.add_aside(usage_of(A), written_off=True)
    assert not made.unsettled()
    assert conservation(made).holds is True


def test_records_before_since_are_left_out() -> None:
    since = NOON + timedelta(hours=1)
    made = book([A, B], [finished(A), finished(B)], [usage_of(B)], since=since)
    verdict = conservation(made)
    assert verdict.holds is True
    assert verdict.figures["accepted"] == 1


def test_trimmed_topics_are_not_called_proved() -> None:
    made = book([], [finished(A)], [usage_of(A)])
    assert made.prove_conservation(committed={}, notes=["the head is gone"])[0].holds is None
