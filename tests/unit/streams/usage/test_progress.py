"""A moment is passed once all that was on the log by then has been read, and not before."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from streams.usage.progress import ADMISSION, LONGEST_LIFE, MOST_MOMENTS, Progress, settled_until

NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)


def at(seconds: int) -> datetime:
    return NOON + seconds * SECOND


def test_a_moment_is_passed_when_every_partition_is_read_up_to_its_end_then() -> None:
    progress: Progress[str] = Progress()
    progress.note(at(0), {"a": 5, "b": 3})
    progress.note(at(1), {"a": 9, "b": 3})
    assert progress.read_up_to({"a": 9, "b": 2}) is None
    assert progress.read_up_to({"a": 5, "b": 3}) == at(0)
    assert progress.read_up_to({"a": 8, "b": 3}) == at(0)
    assert progress.read_up_to({"a": 9, "b": 3}) == at(1)


def test_a_reader_that_stands_still_with_all_read_is_up_to_date() -> None:
    progress: Progress[str] = Progress()
    for second in range(5):
        progress.note(at(second), {"a": 7})
        assert progress.read_up_to({"a": 7}) == at(second)


def test_an_empty_partition_is_read_by_whoever_has_read_nothing() -> None:
    progress: Progress[str] = Progress()
    progress.note(at(0), {"a": 0})
    assert progress.read_up_to({}) == at(0)


def test_what_was_passed_stays_passed_when_a_reader_goes_back_or_the_clock_does() -> None:
    progress: Progress[str] = Progress()
    progress.note(at(9), {"a": 7})
    assert progress.read_up_to({"a": 7}) == at(9)
    progress.note(at(3), {"a": 8})
    assert progress.read_up_to({"a": 1}) == at(9)
    assert progress.read_up_to({"a": 8}) == at(9)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3 * MOST_MOMENTS))
def test_it_never_runs_ahead_and_comes_to_the_end_with_its_reader(steps: list[tuple[int, int]]) -> None:
    """Whatever comes and is read between looks, nothing written at or before the moment reached is unread."""
    progress: Progress[str] = Progress()
    ends, read = [0], 0
    for second, (written, taken) in enumerate(steps):
        ends.append(ends[-1] + written)
        progress.note(at(second), {"a": ends[-1]})
        read = min(ends[-1], read + taken)
        reached = progress.read_up_to({"a": read})
        if reached is not None:
            assert ends[(reached - NOON) // SECOND + 1] <= read
        assert len(progress._ahead) <= MOST_MOMENTS
    progress.note(at(len(steps)), {"a": ends[-1]})
    assert progress.read_up_to({"a": ends[-1]}) == at(len(steps))


def test_a_reader_far_behind_does_not_fill_memory_and_is_told_of_moments_on_its_way() -> None:
    progress: Progress[str] = Progress()
    for second in range(10 * MOST_MOMENTS):
        progress.note(at(second), {"a": second + 1})
    assert len(progress._ahead) <= MOST_MOMENTS
    half = 5 * MOST_MOMENTS
    reached = progress.read_up_to({"a": half})
    assert reached is not None
    assert at(half - half // 4) <= reached < at(half)


def test_requests_are_settled_as_far_as_the_workers_are_and_at_the_latest_when_they_are_dead() -> None:
    assert settled_until(at(0), now=at(5)) == at(0) - ADMISSION
    assert settled_until(None, now=at(5)) == at(5) - LONGEST_LIFE - ADMISSION
    assert settled_until(at(0), now=at(0) + 2 * LONGEST_LIFE) == at(0) + LONGEST_LIFE - ADMISSION
