"""How long a request that is admitted now would wait in its pool's queue. Pure: time comes in as a number of seconds.

Two views are compared, and the more hopeful one counts. The log's: records that wait, by the rate at which offsets are
committed. This process's own: its requests that are unanswered, by the rate at which answers come. One record that
waits for something else keeps the offsets behind it from being committed although they are served; own answers show it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from infra.lag import Queue

#: How far back the rate of a busy queue is measured: this long, and longer until so many were done or so long passed.
_WINDOW_S, _ENOUGH, _LONGEST_S = 3.0, 8, 10.0
#: A queue is busy when, at both ends of an interval, at least so many waited and this much of the interval's work.
_LEAST_BACKLOG, _BACKLOG_S = 2, 0.25
#: What a busy queue has shown is believed so long after it was emptied.
_BELIEVED_S = 60.0
#: Work that was to be expected and did not happen is as good as work that did.
_EXPECTED = 40
_FADES = 0.95
#: What has stood still for some time is expected to stand still for this many times as long.
_STILL_FACTOR = 2.0
#: A measurement older than this says nothing.
_STALE_S = 5.0
_MOST_ANSWERS = 512
_REMEMBERED = 0.7
_MOST_OTHERS = 64.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolQueue:
    """A pool's queue as last measured.

    `served_per_s` is what its workers can do, None when that is unknown: it shows only while work waits all the time.
    `shown_per_s` is what they were seen to do lately, and may be far less than they can. `still_since_s` is since when
    requests wait and none is done. `readings` are (time, done) of the present busy stretch, oldest first.
    """

    partitions: int
    waiting: int
    done: int
    measured_s: float
    served_per_s: float | None = None
    shown_per_s: float = 0.0
    busy_s: float = float("-inf")
    still_since_s: float | None = None
    readings: tuple[tuple[float, int], ...] = ()


def measured(before: PoolQueue | None, now: Queue, *, at_s: float) -> PoolQueue:
    """The next measurement of a queue."""
    if before is None or now.done < before.done or at_s <= before.measured_s:  # the first, or another topic by the name
        return PoolQueue(
            partitions=now.partitions,
            waiting=now.waiting,
            done=now.done,
            measured_s=at_s,
            still_since_s=at_s if now.waiting else None,
            readings=((at_s, now.done),),
        )
    latest = (now.done - before.done) / (at_s - before.measured_s)
    is_busy = min(before.waiting, now.waiting) >= max(_LEAST_BACKLOG, _BACKLOG_S * latest)
    readings = (*(before.readings if is_busy else ()), (at_s, now.done))
    readings = tuple(r for r in readings if at_s - r[0] <= _LONGEST_S + 1)
    known = before.served_per_s
    if is_busy:
        rate = _rate(readings, expected_per_s=max(before.shown_per_s, known or 0.0))
        served = rate if rate is not None else known
    elif known is not None and at_s - before.busy_s <= _BELIEVED_S:
        served = max(known, latest)
    else:
        served = None
    is_still = latest == 0 and before.waiting > 0 and now.waiting > 0
    return PoolQueue(
        partitions=now.partitions,
        waiting=now.waiting,
        done=now.done,
        measured_s=at_s,
        served_per_s=served,
        shown_per_s=max(latest, _FADES * before.shown_per_s),
        busy_s=at_s if is_busy else before.busy_s,
        still_since_s=before.still_since_s if is_still else (at_s if now.waiting else None),
        readings=readings,
    )


def _rate(readings: tuple[tuple[float, int], ...], *, expected_per_s: float) -> float | None:
    """Work a second over the readings of a busy queue, None while too little was seen to tell."""
    at_s, done = readings[-1]
    for since_s, then in reversed(readings[:-1]):
        took_s, much = at_s - since_s, done - then
        if took_s < min(_WINDOW_S, at_s - readings[0][0]):
            continue
        if much >= _ENOUGH or took_s >= _LONGEST_S or expected_per_s * took_s >= _EXPECTED:
            return max(much, 1) / took_s
    return None


@dataclass(slots=True)
class Own:
    """What one process sees of its own requests in one pool."""

    outstanding: int = 0
    #: Requests let in since the last measurement of the pool's queue was begun.
    let_in: int = 0
    #: Lately, how many requests were written to the pool's queue by all, and how many of them by this process.
    written: float = 0.0
    mine: float = 0.0
    answers: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MOST_ANSWERS))

    def counted(self, *, written: int, mine: int) -> None:
        """Between two measurements so many were written by all, and so many let in here."""
        if written > 0:
            self.written = written + _REMEMBERED * self.written
            self.mine = mine + _REMEMBERED * self.mine

    @property
    def let_in_by_all(self) -> float:
        """Requests let in since the last measurement by all processes, if this one has the share it had lately."""
        return self.let_in * min(_MOST_OTHERS, max(1.0, self.written / self.mine)) if self.mine >= 1 else self.let_in

    def answered(self, at_s: float, took_s: float) -> None:
        """One of them was answered, so long after it was let in."""
        self.answers.append((at_s, took_s))

    def delay_s(self, now_s: float) -> float | None:
        """How long the next one should wait, by those before it; None when none was answered lately."""
        while self.answers and now_s - self.answers[0][0] > _WINDOW_S:
            self.answers.popleft()
        if not self.answers:
            return None
        span_s = _WINDOW_S if len(self.answers) < _MOST_ANSWERS else max(now_s - self.answers[0][0], 1e-3)
        return max(self.outstanding * span_s / len(self.answers), self.answers[-1][1])


def waiting_now(queue: PoolQueue, own: Own, *, now_s: float) -> float:
    """Requests in the queue now, as far as this process can know: others' newest ones are guessed from its own."""
    served = (queue.served_per_s or queue.shown_per_s) * (now_s - queue.measured_s)
    return max(0.0, queue.waiting + own.let_in_by_all - served)


def delay_s(queue: PoolQueue, own: Own, *, now_s: float) -> float:
    """Seconds a request that is let in now would wait before it is run; 0 where nothing speaks against it."""
    if now_s - queue.measured_s > _STALE_S:
        return 0.0
    seen_s = own.delay_s(now_s)
    still_s = 0.0
    if queue.still_since_s is not None and seen_s is None:
        still_s = _STILL_FACTOR * (queue.measured_s - queue.still_since_s)
    by_log_s = still_s
    if queue.served_per_s is not None:
        by_log_s = max(still_s, waiting_now(queue, own, now_s=now_s) / queue.served_per_s)
    return by_log_s if seen_s is None else min(by_log_s, seen_s)
