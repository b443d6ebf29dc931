"""A stall is lag without movement for a while; anything else restarts the clock."""

from __future__ import annotations

from streams.watchdog import StallDetector, Standing


def standing(next_offset: int, end: int) -> dict[int, Standing]:
    return {0: Standing(next_offset=next_offset, end=end)}


def test_lag_without_movement_is_a_stall_after_its_time() -> None:
    detector = StallDetector(stall_s=10)
    assert detector.observe(standing(5, 9), now_s=100) == {}
    assert detector.observe(standing(5, 20), now_s=109) == {}
    assert detector.observe(standing(5, 20), now_s=110) == {0: 10}


def test_movement_restarts_the_clock() -> None:
    detector = StallDetector(stall_s=10)
    detector.observe(standing(5, 9), now_s=100)
    detector.observe(standing(6, 9), now_s=109)
    assert detector.observe(standing(6, 9), now_s=118) == {}
    assert detector.observe(standing(6, 9), now_s=119) == {0: 10}


def test_nothing_to_read_is_never_a_stall() -> None:
    detector = StallDetector(stall_s=10)
    for now_s in range(0, 1000, 5):
        assert detector.observe(standing(9, 9), now_s=now_s) == {}
    assert detector.observe(standing(9, 10), now_s=1001) == {}


def test_a_partition_that_was_given_back_starts_anew() -> None:
    detector = StallDetector(stall_s=10)
    detector.observe(standing(5, 9), now_s=100)
    detector.observe({}, now_s=105)
    assert detector.observe(standing(5, 9), now_s=111) == {}


def test_an_explained_pause_starts_anew() -> None:
    detector = StallDetector(stall_s=10)
    detector.observe(standing(5, 9), now_s=100)
    detector.forget()
    assert detector.observe(standing(5, 9), now_s=111) == {}
