"""The judges of rates, the model of the limiter and a gateway's own share, against each other and against slow ones."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from uuid import uuid4

from hypothesis import assume, given
from hypothesis import strategies as st

from api.admission.buckets import Limit, limit
from api.admission.caller import Caller
from api.admission.demand import Cost, Demand
from api.limits.local_share import LocalShare
from api.limits.plans import Plan
from schemas.keys import RedisKeys
from tests.gcra import Bucket, Model, excess_beyond_losses_us, excess_of_changing_us, excess_us

times = st.lists(st.integers(0, 5_000), max_size=40)
intervals = st.integers(1, 300)
bursts = st.integers(1, 8)
#: A call: how long after the one before, its cost, and the limit that holds then.
calls = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 5), intervals, st.integers(1, 12)), max_size=40)


def moments(steps: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    at, found = 1_000_000, []
    for step, cost, interval_us, burst in steps:
        at += step
        found.append((at, min(cost, burst), interval_us, burst))
    return found


@given(times, intervals, bursts)
def test_the_judge_finds_what_looking_at_every_window_finds(admitted: list[int], interval_us: int, burst: int) -> None:
    ordered = sorted(admitted)
    windows = [
        (j - i + 1 - burst) * interval_us - (ordered[j] - ordered[i]) for j in range(len(ordered)) for i in range(j + 1)
    ]
    assert excess_us(admitted, interval_us=interval_us, burst=burst) == max([-burst * interval_us, *windows])
    if admitted:
        same = excess_of_changing_us((at, 1, interval_us, burst) for at in admitted)
        assert same == max(windows)


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


@given(times, intervals, bursts, st.lists(st.integers(0, 5_000), max_size=3, unique=True))
def test_a_limiter_that_forgets_admits_one_burst_more_each_time_and_no_more(
    attempts: list[int], interval_us: int, burst: int, forgets: list[int]
) -> None:
    model, bucket, admitted, left = Model(), Bucket("a", interval_us, burst), [], sorted(forgets)
    for at in sorted(attempts):
        while left and left[0] <= at:
            model.arrival_us.clear()
            left.pop(0)
        if model.take([bucket], at)[0]:
            admitted.append((at, 1))
    limit_of = {"interval_us": interval_us, "burst": burst}
    assert excess_beyond_losses_us(admitted, **limit_of, losses=[(at, at) for at in forgets]) <= 0
    plain = excess_us([at for at, _ in admitted], **limit_of)
    assert excess_beyond_losses_us(admitted, **limit_of, losses=[]) == max(plain, -burst * interval_us)


@given(calls, st.sampled_from([0, 1, 50]))
def test_limits_that_change_at_every_call_are_kept_to_the_unit(
    steps: list[tuple[int, int, int, int]], expires_us: int
) -> None:
    """Also when the bucket's key goes as soon as it is full, or a while later, as it does in Redis."""
    model, admitted = Model(), []
    for at, cost, interval_us, burst in moments(steps):
        if at >= model.arrival_us.get("a", (0, 0, 0))[0] + expires_us:
            model.arrival_us.clear()
        if model.take([Bucket("a", interval_us, burst, cost)], at)[0] == 1:
            admitted.append((at, cost, interval_us, burst))
    assert excess_of_changing_us(admitted) <= 0


@given(calls)
def test_from_the_first_call_under_a_limit_on_it_is_kept_as_if_it_had_always_been_so(
    steps: list[tuple[int, int, int, int]],
) -> None:
    assume(steps)
    model, admitted = Model(), []
    half = len(steps) // 2
    _, _, interval_us, burst = steps[-1]
    for n, (at, cost, old_us, old) in enumerate(moments(steps)):
        now = (interval_us, burst) if n >= half else (old_us, old)
        b = Bucket("a", *now, min(cost, now[1]))
        if model.take([b], at)[0] == 1 and n >= half:
            admitted.append((at, b.cost, *now))
    assert excess_of_changing_us(admitted) <= 0


@given(intervals, bursts, st.integers(2, 300))
def test_a_raised_limit_is_felt_at_the_next_call(interval_us: int, burst: int, times_as_much: int) -> None:
    slow, fast = Bucket("a", interval_us * times_as_much, burst), Bucket("a", interval_us, burst + 1)
    model = Model()
    while model.take([slow], 1_000)[0]:
        pass
    assert model.take([fast], 1_000)[0] == 1, "one unit more than was used fits at once"
    assert model.take([fast], 1_000 + interval_us)[0] == 1, "and the next ones come at the new pace"


@given(intervals, bursts, st.integers(2, 60))
def test_a_caller_that_keeps_its_pace_is_never_refused(interval_us: int, burst: int, calls: int) -> None:
    model, bucket = Model(), Bucket("a", interval_us, burst)
    assert all(model.take([bucket], n * interval_us)[0] for n in range(calls))


@given(calls)
def test_coming_back_when_told_to_succeeds(steps: list[tuple[int, int, int, int]]) -> None:
    model = Model()
    for at, cost, interval_us, burst in moments(steps):
        bucket = Bucket("a", interval_us, burst, cost)
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


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 64))
def test_shares_together_are_never_more_than_the_bucket(interval_us: int, burst: int, parts: int) -> None:
    whole = Limit(name="key:k", interval_us=interval_us, burst=burst)
    share = whole.share(parts)
    assert share.burst * parts <= burst
    assert share.interval_us == parts * interval_us


def asked(limits: list[tuple[str, int, int]], cost: int) -> Demand:
    now = datetime.now(timezone.utc)
    made = tuple(Limit(name=n, interval_us=t, burst=b) for n, t, b in limits)
    return Demand(
        caller=Caller(customer_id="c", key_id="k", limits=made),
        model="m",
        cost=Cost(items=1, requests=cost),
        request_id=uuid4(),
        admitted_at=now,
        until=now + timedelta(seconds=1),
    )


class Hand:
    """A clock in microseconds that a test moves."""

    def __init__(self) -> None:
        self.now_us = 5_000_000

    def __call__(self) -> int:
        return self.now_us


def gateway(clock: Callable[[], int]) -> LocalShare:
    return LocalShare(RedisKeys(), clock=clock, wall=clock)


@given(calls, st.integers(1, 4))
def test_a_share_decides_as_the_model_of_a_smaller_bucket_that_began_empty(
    steps: list[tuple[int, int, int, int]], parts: int
) -> None:
    clock, model = Hand(), Model()
    share_of = gateway(clock)
    share_of.enter(clock.now_us)
    for step, cost, interval_us, burst in steps:
        clock.now_us += step
        demand = asked([("key:k", interval_us, burst * parts)], min(cost, burst))
        plan = Plan(RedisKeys(), demand.caller, demand.caller.limits, parts=parts)
        b = Bucket("key:k", interval_us * parts, burst, min(cost, burst))
        if not model.arrival_us:
            # Seen for the first time, it is empty as of the moment at which Redis was gone.
            model.arrival_us["key:k"] = (5_000_000 + b.burst * b.interval_us, b.interval_us, 5_000_000)
            answer = share_of.take(plan.share, demand)
            assert answer == model.take([b], clock.now_us)
            if answer[0] == 0:
                model.arrival_us.clear()
            continue
        assert share_of.take(plan.share, demand) == model.take([b], clock.now_us)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3), st.booleans()), max_size=80),
    st.integers(1, 60),
    st.integers(1, 30),
)
def test_gateways_that_come_and_go_never_have_more_than_the_bucket_together(
    steps: list[tuple[int, int, bool]], interval_us: int, burst: int
) -> None:
    """Each loses Redis and finds it again whenever it likes; what they admit by themselves is within one bucket."""
    clock, admitted = Hand(), []
    gateways = [gateway(clock) for _ in range(4)]
    demand = asked([("key:k", interval_us, burst)], 1)
    plan = Plan(RedisKeys(), demand.caller, demand.caller.limits, parts=4)
    for step, which, flaps in steps:
        clock.now_us += step
        if flaps:
            gateways[which].leave()
        gateways[which].enter(clock.now_us)
        if plan.share.limits[0].burst and gateways[which].take(plan.share, demand)[0]:
            admitted.append(clock.now_us)
    assert excess_us(admitted, interval_us=interval_us, burst=burst) <= 0


@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 3)), max_size=60),
    st.integers(1_000, 60_000),
    st.integers(4, 30),
)
def test_what_was_decided_apart_is_charged_when_they_are_together_again(
    steps: list[tuple[int, int]], interval_us: int, burst: int
) -> None:
    """Gateways lose Redis at once and come back up to a second apart: in all no more than one burst beyond the rate."""
    clock, model, admitted = Hand(), Model(), []
    gateways = [gateway(clock) for _ in range(4)]
    demand = asked([("key:k", interval_us, burst)], 1)
    plan = Plan(RedisKeys(), demand.caller, demand.caller.limits, parts=4)
    whole = Bucket("key:k", interval_us, burst)
    for _ in range(burst):  # the shared bucket was used up just before
        assert model.take([whole], clock.now_us)[0]
        admitted.append(clock.now_us)
    for one in gateways:
        one.enter(clock.now_us)
    back_us = {i: 5_000_000 + 1_500_000 + 250_000 * i for i in range(4)}
    for step, which in steps:
        clock.now_us += step
        one = gateways[which]
        if clock.now_us >= back_us[which]:
            one.leave()
            for settling in one.settlement(10):
                assert settling.debt is not None
                units = int(settling.call.start.args[2])
                used_us, _ = model.used(whole, clock.now_us)
                used_us += units * interval_us
                model.arrival_us["key:k"] = (clock.now_us + used_us, interval_us, clock.now_us)
            taken = model.take([whole], clock.now_us)[0] == 1
        else:
            taken = one.take(plan.share, demand)[0] == 1
        if taken:
            admitted.append(clock.now_us)
    assert excess_us(admitted, interval_us=interval_us, burst=2 * burst) <= 0
