"""The batcher loses and duplicates nothing, never mixes, keeps its bounds, and lets nothing wait past its time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.batching import Batch, Batcher, Limits, Waiting

LIMITS = Limits(max_items=8, max_cost_bytes=1000, linger_s=0.010, deadline_margin_s=0.005)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrive:
    version: str
    lane: int
    items: int
    cost_bytes: int
    lives_ms: int
    idle: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    version: str


versions = st.sampled_from(["a", "b", "c"])
arrivals = st.builds(
    Arrive,
    version=versions,
    lane=st.integers(0, 1),
    items=st.integers(1, 12),
    cost_bytes=st.integers(1, 1200),
    lives_ms=st.integers(0, 100),
    idle=st.booleans(),
)
steps = st.lists(
    st.one_of(arrivals, arrivals, st.builds(Pass, ms=st.integers(0, 20)), st.builds(Drop, version=versions)),
    max_size=60,
)
ready_sets = st.sets(versions)


class Play:
    """Runs steps and keeps what went in and what came out."""

    def __init__(self, batcher: Batcher[int], ready: set[str]) -> None:
        self.batcher = batcher
        self.ready = ready
        self.now_ms = 0
        self.inside: dict[int, Waiting[int]] = {}
        self.out: list[int] = []
        self.batches: list[Batch[int]] = []

    def step(self, step: Arrive | Pass | Drop) -> None:
        if isinstance(step, Pass):
            self.now_ms += step.ms
        elif isinstance(step, Drop):
            self.out += self.batcher.drop(step.version)
        else:
            number = len(self.inside)
            now_s = self.now_ms / 1000
            one = Waiting(
                what=number,
                version=step.version,
                lane=step.lane,
                items=step.items,
                cost_bytes=step.cost_bytes,
                arrived_s=now_s,
                deadline_s=now_s + step.lives_ms / 1000,
            )
            self.inside[number] = one
            self.batcher.add(one, idle=step.idle)

    def take_all(self) -> None:
        now_s = self.now_ms / 1000
        self.out += self.batcher.expired(now_s)
        while (batch := self.batcher.take(now_s, ready=self.ready.__contains__)) is not None:
            self.batches.append(batch)
            self.out += batch.members

    def waits(self) -> list[Waiting[int]]:
        gone = set(self.out)
        return [one for number, one in self.inside.items() if number not in gone]


def played(moves: list[Arrive | Pass | Drop], ready: set[str], batcher: Batcher[int] | None = None) -> Play:
    play = Play(Batcher(LIMITS) if batcher is None else batcher, ready)
    for move in moves:
        play.step(move)
        play.take_all()
    return play


@given(steps, ready_sets)
def test_nothing_is_lost_and_nothing_comes_twice(moves: list[Arrive | Pass | Drop], ready: set[str]) -> None:
    play = played(moves, ready)
    rest = [number for version in "abc" for number in play.batcher.drop(version)]
    assert sorted(play.out + rest) == list(range(len(play.inside)))
    assert len(play.batcher) == 0


@given(steps, ready_sets)
def test_a_batch_holds_one_version_and_one_lane_in_order_of_arrival(
    moves: list[Arrive | Pass | Drop], ready: set[str]
) -> None:
    play = played(moves, ready)
    assert_unmixed(play)
    for batch in play.batches:
        assert batch.version in ready
        assert list(batch.members) == sorted(batch.members)


def assert_unmixed(play: Play) -> None:
    for batch in play.batches:
        assert len({(play.inside[m].version, play.inside[m].lane) for m in batch.members}) == 1


class Unversioned(Batcher[int]):
    """The mechanism removed: lanes are no longer told apart by version."""

    def add(self, one: Waiting[int], *, idle: bool) -> None:
        super().add(replace(one, version="a"), idle=idle)


def test_without_versions_in_the_lane_key_a_batch_mixes_versions() -> None:
    first = Arrive(version="a", lane=0, items=1, cost_bytes=1, lives_ms=100, idle=False)
    play = played([first, replace(first, version="b"), Pass(ms=20)], {"a", "b"}, Unversioned(LIMITS))
    with pytest.raises(AssertionError):
        assert_unmixed(play)


@given(steps, ready_sets)
def test_a_batch_keeps_its_bounds_unless_one_request_alone_is_over_them(
    moves: list[Arrive | Pass | Drop], ready: set[str]
) -> None:
    play = played(moves, ready)
    for batch in play.batches:
        members = [play.inside[m] for m in batch.members]
        assert batch.items == sum(m.items for m in members)
        assert batch.cost_bytes == sum(m.cost_bytes for m in members)
        if len(members) > 1:
            assert batch.items <= LIMITS.max_items
            assert batch.cost_bytes <= LIMITS.max_cost_bytes


@given(steps, ready_sets)
def test_what_waits_is_neither_late_nor_expired(moves: list[Arrive | Pass | Drop], ready: set[str]) -> None:
    play = played(moves, ready)
    now_s = play.now_ms / 1000
    for one in play.waits():
        assert one.deadline_s > now_s
        if one.version in ready:
            assert one.arrived_s + LIMITS.linger_s > now_s


@given(steps, ready_sets)
def test_the_next_moment_is_when_something_comes_out_and_not_before(
    moves: list[Arrive | Pass | Drop], ready: set[str]
) -> None:
    play = played(moves, ready)
    next_s = play.batcher.next_at_s(ready=ready.__contains__)
    if next_s is None:
        assert not play.waits()
        return
    assert next_s > play.now_ms / 1000
    assert play.batcher.expired(next_s) or play.batcher.take(next_s, ready=ready.__contains__)
