"""Those to blame are found, in few attempts; the others are taken, in the order in which they were given."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from streams.ledger.halving import refused_of


class Taken:
    """Takes numbers, all or none at a time; refuses those of `bad`."""

    def __init__(self, *bad: int) -> None:
        self.bad = set(bad)
        self.taken: list[int] = []
        self.attempts = 0

    async def take(self, numbers: Sequence[int]) -> None:
        self.attempts += 1
        if self.bad & set(numbers):
            raise ValueError(f"{self.bad & set(numbers)}")
        self.taken += numbers


@pytest.mark.parametrize("bad", [(), (0,), (37,), (63,), (0, 1, 62, 63), tuple(range(64))])
async def test_those_to_blame_are_found_and_the_others_taken_in_their_order(bad: tuple[int, ...]) -> None:
    taken = Taken(*bad)
    refused = await refused_of(range(64), taken.take, blames=lambda e: isinstance(e, ValueError))
    assert [(n, str(error)) for n, error in refused] == [(n, f"{{{n}}}") for n in bad]
    assert taken.taken == [n for n in range(64) if n not in bad]
    assert taken.attempts <= 1 + 2 * 6 * len(bad)  # 64 halves to one in six steps


async def test_what_blames_nothing_is_raised_at_once() -> None:
    taken = Taken(3)
    with pytest.raises(ValueError, match="3"):
        await refused_of(range(8), taken.take, blames=lambda _error: False)
    assert taken.attempts == 1
