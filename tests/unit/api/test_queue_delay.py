"""How long a queue takes: what is known of it and when, then whole days of a pool in a simulation."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from api.admission.deadlines import Queues
from api.admission.queue_delay import Own, PoolQueue, delay_s, measured
from api.errors import Unavailable
from infra.lag import Queue
from tests.fakes import Clock

POOL, TOPIC = "default", "inference.requests.default.v1"


def after(*readings: tuple[float, int, int]) -> PoolQueue:
    """A queue as it looks after readings of (time, waiting, done)."""
    found: PoolQueue | None = None
    for at_s, waiting, done in readings:
        found = measured(found, Queue(partitions=8, waiting=waiting, done=done), at_s=at_s)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("readings", "rate"),
    [
        ([(0, 0, 0), (1, 3, 300)], None),  # an idle pool shows what came, not what it can do
        ([(0, 40, 0), (1, 45, 300)], None),  # a tenth of a second of work is no backlog: that is how offsets are read
        ([(0, 500, 0), (1, 600, 300)], 300),
        ([(0, 500, 0), (1, 600, 100), (2, 700, 300), (3, 700, 600)], 200),
        ([(t, 3, t // 2) for t in range(8)], None),  # too few were done to tell
        ([(t, 3, t // 2) for t in range(21)], 0.5),
        ([(0, 500, 0), (1, 500, 100), (2, 0, 600), (30, 0, 600)], 500),  # believed for a while after it was emptied
        ([(0, 500, 0), (1, 500, 100), (2, 0, 600), (90, 0, 600)], None),
        ([(0, 500, 900), (1, 500, 1000), (2, 10, 5)], None),  # another topic by the same name
    ],
)
def test_a_rate_is_known_only_from_a_queue_that_was_never_empty(
    readings: list[tuple[float, int, int]], rate: float | None
) -> None:
    assert after(*readings).served_per_s == (None if rate is None else pytest.approx(rate))


@pytest.mark.parametrize("readings", range(4, 30))
def test_large_batches_done_much_at_once_and_then_nothing_are_a_rate_too(readings: int) -> None:
    rate = after(*((t, 500, 64 * (t // 2)) for t in range(readings))).served_per_s
    assert rate is not None
    assert 20 < rate < 50  # 64 every other second


def test_workers_that_were_fast_and_stop_are_noticed_at_once_and_slow_ones_later() -> None:
    fast = after((0, 40, 0), (1, 40, 300), (2, 300, 300), (3, 600, 300))
    assert delay_s(fast, Own(), now_s=3) > 100
    slow = after((0, 0, 0), (1, 1, 1), (2, 2, 1), (3, 3, 1))
    assert delay_s(slow, Own(), now_s=3) == 4  # still for 2 s, and as long again and again
    assert delay_s(after((0, 0, 0), (1, 1, 0)), Own(), now_s=1) == 0


def test_a_short_queue_with_an_unknown_rate_speaks_against_nothing() -> None:
    assert delay_s(after((0, 60, 0)), Own(), now_s=0.5) == 0
    assert delay_s(after((0, 0, 0), (1, 60, 1)), Own(), now_s=1.5) == 0


def test_an_old_measurement_says_nothing() -> None:
    queue = after((0, 500, 0), (1, 6000, 300))
    assert delay_s(queue, Own(), now_s=1) == pytest.approx(20)
    assert delay_s(queue, Own(), now_s=7) == 0


def test_what_was_let_in_since_the_measurement_counts_less_what_was_served_meanwhile() -> None:
    queue = after((0, 500, 0), (1, 600, 300))
    own = Own(let_in=1200)
    assert delay_s(queue, own, now_s=1) == pytest.approx(6)
    assert delay_s(queue, own, now_s=2) == pytest.approx(5)


def test_one_record_that_holds_back_offsets_does_not_stop_those_who_are_answered() -> None:
    held_back = after((0, 40, 0), (1, 40, 300), *((t, 300 * t, 300) for t in range(2, 9)))
    own = Own(outstanding=15, answers=deque((8 - n / 300, 0.05) for n in range(500, 0, -1)))
    assert delay_s(held_back, Own(), now_s=8) > 100
    assert delay_s(held_back, own, now_s=8) < 0.2
    # With few of its own it is the last answer's time that counts, and once none comes any more the log's view.
    assert delay_s(held_back, Own(answers=deque([(7.5, 9.5)])), now_s=8) == 9.5
    assert delay_s(held_back, Own(answers=deque([(3.0, 0.1)])), now_s=8) > 100


class Pool:
    """A simulated pool: `per_s` requests a second in the order of their arrival, offsets committed ten times a second,
    its queue measured by every gateway once a second, and requests that are late not run."""

    STEP_S = 0.01

    def __init__(self, *, per_s: float, gateways: int, deadline_s: float = 10.0) -> None:
        self.per_s, self.deadline_s = per_s, deadline_s
        self.clock = Clock()
        self.began_s = self.clock.now_s
        self.gateways = [
            Queues(namespace="", max_queued=100_000, deadline_s=deadline_s, clock=self.clock) for _ in range(gateways)
        ]
        self.line: deque[tuple[float, Queues, object]] = deque()
        self.ended = self.committed = self.written = 0
        self.credit = 0.0
        self.counts: Counter[str] = Counter()
        self.longest_s = 0.0
        #: When each gateway changed its mind, in seconds since the start.
        self.turns: list[float] = []
        self._refuses = dict.fromkeys(self.gateways, False)

    @property
    def now_s(self) -> float:
        return self.clock.now_s - self.began_s

    async def read(self, groups: object) -> dict[str, Queue]:
        return {TOPIC: Queue(partitions=8, waiting=self.written - self.committed, done=self.committed)}

    def arrive(self, count: int) -> None:
        for number in range(count):
            queues = self.gateways[number % len(self.gateways)]
            try:
                queues.check(POOL, within_s=self.deadline_s)
            except Unavailable as refused:
                self.counts["refused"] += 1
                self.counts["refused for long"] += not 1 <= float(refused.headers["Retry-After"]) <= 60
                refuses = True
            else:
                passing = queues.passing(POOL)
                passing.__enter__()
                self.line.append((self.now_s, queues, passing))
                self.written += 1
                refuses = False
            if refuses != self._refuses[queues]:
                self._refuses[queues] = refuses
                self.turns.append(self.now_s)

    def serve(self) -> None:
        self.credit = min(self.credit + self.per_s * self.STEP_S, max(1.0, self.per_s * self.STEP_S) + len(self.line))
        while self.line and self.credit >= 1:
            since_s, _, passing = self.line.popleft()
            waited_s = self.now_s - since_s
            self.ended += 1
            if waited_s > self.deadline_s:
                self.counts["late"] += 1
                passing.__exit__(TimeoutError, TimeoutError("late"), None)
                continue
            self.credit -= 1
            self.counts["answered"] += 1
            self.longest_s = max(self.longest_s, waited_s)
            passing.__exit__(None, None, None)

    async def run(self, seconds: float, *, arrivals_per_s: float, seed: random.Random) -> None:
        steps = round(seconds / self.STEP_S)
        owed = 0.0
        for _ in range(steps):
            at = round(self.now_s / self.STEP_S)
            owed += arrivals_per_s * self.STEP_S * seed.choice((0.5, 1.0, 1.5))
            self.arrive(int(owed))
            owed -= int(owed)
            self.serve()
            if at % 10 == 0:
                self.committed = self.ended
            if at % 100 == 50:
                for queues in self.gateways:
                    await queues.measure(self, [POOL])
            self.clock.now_s += self.STEP_S


@pytest.mark.parametrize("gateways", [1, 4])
@pytest.mark.parametrize("per_s", [20, 300])
async def test_a_burst_of_five_times_the_rate_is_shed_before_deadlines_are_lost(per_s: int, gateways: int) -> None:
    chance = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")  # noqa: T201
    pool = Pool(per_s=per_s, gateways=gateways)
    await pool.run(20, arrivals_per_s=per_s / 3, seed=chance)
    assert pool.counts["refused"] == pool.counts["late"] == 0
    await pool.run(60, arrivals_per_s=5 * per_s, seed=chance)
    # What can be done is done, hardly anybody who is let in waits in vain, and nobody's mind changes all the time.
    assert pool.counts["answered"] > 0.97 * per_s * (20 / 3 + 60)
    # Four gateways that see five answers a second each know less: of 40 seeds the worst had 8.3 %, one alone had none.
    most_late = 0.03 if per_s / gateways >= 20 else 0.12
    assert pool.counts["late"] < most_late * pool.counts["answered"]
    assert len(pool.turns) < 1.5 * 60 * gateways
    await pool.run(10, arrivals_per_s=per_s / 3, seed=chance)
    refused = pool.counts["refused"]
    await pool.run(20, arrivals_per_s=per_s / 3, seed=chance)
    assert pool.counts["refused"] == refused
    assert pool.counts["refused for long"] == 0


@pytest.mark.parametrize(("arrivals_per_s", "lost_s"), [(200, 3.5), (2, 7.5)])
async def test_workers_that_stop_are_noticed_before_a_deadline_has_passed_and_when_they_are_back(
    arrivals_per_s: float, lost_s: float
) -> None:
    chance = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")  # noqa: T201
    pool = Pool(per_s=300, gateways=1)
    await pool.run(20, arrivals_per_s=arrivals_per_s, seed=chance)
    pool.per_s = pool.credit = 0
    await pool.run(8, arrivals_per_s=arrivals_per_s, seed=chance)
    assert next(at_s for at_s in pool.turns if at_s > 20) < 20 + lost_s
    await pool.run(12, arrivals_per_s=arrivals_per_s, seed=chance)
    assert pool.counts["late"] < arrivals_per_s * (lost_s + 0.5) + 2
    pool.per_s = 300
    await pool.run(8, arrivals_per_s=arrivals_per_s, seed=chance)
    assert pool._refuses == {pool.gateways[0]: False}
    assert pool.counts["answered"] > arrivals_per_s * 22
