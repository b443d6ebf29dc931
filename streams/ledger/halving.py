"""Some of many were refused together: which ones is found by halves, until each to blame stands alone.

Pure; what is attempted, and which errors mean that a thing itself is to blame, is the caller's. A half that was taken
stays taken while the next is tried, in the order in which they were given: whoever locks rows by attempting gives them
in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def refused_of(
    things: Sequence[T], attempt: Callable[[Sequence[T]], Awaitable[object]], *, blames: Callable[[Exception], bool]
) -> list[tuple[T, Exception]]:
    """Attempt all of these, in as few attempts as may be; returns those that are to blame, each with its error.

    An attempt that raises must have left nothing behind. Raises what an attempt raises that blames no thing.
    """
    try:
        await attempt(things)
    except Exception as error:
        if not blames(error):
            raise
        if len(things) == 1:
            return [(things[0], error)]
    else:
        return []
    middle = len(things) // 2
    left = await refused_of(things[:middle], attempt, blames=blames)
    return left + await refused_of(things[middle:], attempt, blames=blames)
