"""What a worker must find out about requests that it takes over, because an earlier owner may have ended some. Pure.

A result stands once it is on the log, before its usage and its offset are. Whoever takes over a partition therefore
looks for the first result of every record that an earlier owner may have touched, before it runs or expires any.
"""

from __future__ import annotations

from schemas.first_results import SLACK_MS, FirstResults, Recorded

__all__ = ["SLACK_MS", "FirstResults", "Recorded", "inherited"]


def inherited(committed: int | None, *, begin: int, end: int, reach: int) -> range:
    """The offsets of a partition that an earlier owner may have ended without committing them.

    `committed` is the group's position, None when there is none; `begin` and `end` are the log's. No owner ends a
    record `reach` or more past its position, so that ids of a long queue need not all be remembered.
    """
    start = max(begin, begin if committed is None else committed)
    return range(start, max(start, min(end, start + reach)))
