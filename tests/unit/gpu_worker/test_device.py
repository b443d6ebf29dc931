"""What leaves the device when room is needed, and what may not."""

from __future__ import annotations

import pytest

from gpu_worker.device import FRESH_FOR_S, Shelf
from gpu_worker.errors import MachineError, ModelError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shelf(clock: Clock) -> Shelf[str]:
    return Shelf(100, clock=clock)


def put(shelf: Shelf[str], version: str, size_bytes: int, *, ran: bool = True) -> list[str]:
    left = shelf.make_room(size_bytes)
    shelf.put(version, version.upper(), size_bytes=size_bytes)
    if ran:
        with shelf.use(version):
            pass
    return left


def test_the_least_recently_used_leave_and_no_more_than_needed(shelf: Shelf[str]) -> None:
    for version in "abc":
        put(shelf, version, 30)
    with shelf.use("a"):
        pass
    assert put(shelf, "d", 50) == ["b", "c"]
    assert "a" in shelf


def test_a_version_in_use_stays(shelf: Shelf[str]) -> None:
    put(shelf, "a", 60)
    put(shelf, "b", 40)
    with shelf.use("a") as model:
        assert model == "A"
        with pytest.raises(MachineError):
            shelf.make_room(60)
        assert "b" in shelf, "nothing leaves for a version that does not fit anyway"
        assert shelf.make_room(40) == ["b"]


def test_a_version_that_has_not_run_yet_keeps_its_place_for_a_while(shelf: Shelf[str], clock: Clock) -> None:
    put(shelf, "a", 60, ran=False)
    with pytest.raises(MachineError):
        shelf.make_room(60)
    clock.now = FRESH_FOR_S
    assert shelf.make_room(60) == ["a"]


def test_a_version_larger_than_the_device_is_its_own_fault(shelf: Shelf[str]) -> None:
    with pytest.raises(ModelError, match="needs 101 bytes"):
        shelf.make_room(101)
