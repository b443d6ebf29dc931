from __future__ import annotations

from streams.billing.pacing import Backoff, Pace


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s


async def test_turns_are_spaced_and_idle_time_is_not_saved_up() -> None:
    time = FakeTime()
    pace = Pace(calls_per_s=20, monotonic=time.monotonic, sleep=time.sleep)
    for _ in range(41):
        await pace.turn()
    assert round(time.now_s, 6) == 102.0
    time.now_s += 60
    for _ in range(3):
        await pace.turn()
    assert round(time.now_s, 6) == 162.1


def test_pauses_double_to_a_limit_and_vary_by_up_to_half() -> None:
    backoff = Backoff(first_s=1, longest_s=60)
    assert [backoff.pause_s(n, chance=lambda: 0.0) for n in (1, 2, 3, 7, 5000)] == [1, 2, 4, 60, 60]
    assert backoff.pause_s(3, chance=lambda: 1.0) == 2
    assert backoff.pause_s(1, at_least_s=30, chance=lambda: 0.0) == 30
