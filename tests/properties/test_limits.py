"""The judge of rates and the model of the limiter, against each other and against a slow, obvious judge."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from api.admission.buckets import limit
from tests.gcra import Bucket, Model, excess_us

times = st.lists(st.integers(0, 5_000), max_size=40)
intervals = st.integers(1, 300)
bursts = st.integers(1, 8)


@given(times, intervals, bursts)
def test_the_judge_finds_what_looking_at_every_window_finds(admitted: list[int], interval_us: int, burst: int) -> None:
    ordered = sorted(admitted)
    windows = [
        (j - i + 1 - burst) * interval_us - (ordered[j] - ordered[i]) for j in range(len(ordered)) for i in range(j + 1)
    ]
    assert excess_us(admitted, interval_us=interval_us, burst=burst) == max([-burst * interval_us, *windows])


@given(
    times,
    st.lists(
        st.builds(Bucket, st.sampled_from("abc"), intervals, bursts), min_size=1, max_size=3, unique_by=lambda b: b.name
    ),
)
def test_what_the_model_admits_is_within_every_rate(attempts: list[int], buckets: list[Bucket]) -> None:
    model = Model()
    admitted = [at for at in sorted(attempts) if model.take(buckets, at)[0]]
    for b in buckets:
        assert excess_us(admitted, interval_us=b.interval_us, burst=b.burst) <= 0


@given(intervals, bursts, st.integers(2, 60))
def test_a_caller_that_keeps_its_pace_is_never_refused(interval_us: int, burst: int, calls: int) -> None:
    model, bucket = Model(), Bucket("a", interval_us, burst)
    assert all(model.take([bucket], n * interval_us)[0] for n in range(calls))


@given(times, intervals, bursts)
def test_coming_back_when_told_to_succeeds(attempts: list[int], interval_us: int, burst: int) -> None:
    model, bucket = Model(), Bucket("a", interval_us, burst)
    for at in sorted(attempts):
        retry_us = model.take([bucket], at)[2]
        if retry_us:
            assert model.take([bucket], at + retry_us - 1)[0] == 0
            assert model.take([bucket], at + retry_us)[0] == 1
            return


@given(times, st.integers(1, 100), bursts)
def test_a_refused_call_consumes_nothing(attempts: list[int], interval_us: int, burst: int) -> None:
    model, buckets = Model(), [Bucket("a", interval_us, burst), Bucket("b", interval_us * 3, 1)]
    for at in sorted(attempts):
        before = dict(model.arrival_us)
        if not model.take(buckets, at)[0]:
            assert model.arrival_us == before


@given(st.integers(1, 1_000_000))
def test_no_rate_is_exceeded_by_rounding(requests_per_s: int) -> None:
    interval_us = limit("x", requests_per_s=requests_per_s, burst=1).interval_us
    assert (interval_us - 1) * requests_per_s < 1_000_000 <= interval_us * requests_per_s
