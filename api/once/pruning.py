"""Lets go of claims that nobody can come back to, a slice at a time; of several processes one does it."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from api.once.claims import COUNTED_HORIZON_S, Book, BookAway

logger = logging.getLogger(__name__)

ROUND_S: Final = 30.0
_SLICE: Final = 5_000
_SLICE_PAUSE_S: Final = 0.2


async def prune(book: Book, *, horizon_s: float) -> None:
    """For ever; `horizon_s` is how long an Idempotency-Key is known. While the book is away this waits."""
    while True:
        await asyncio.sleep(ROUND_S)
        try:
            for is_keyed, older_than_s in ((False, COUNTED_HORIZON_S), (True, horizon_s)):
                await _let_go(book, is_keyed=is_keyed, older_than_s=older_than_s)
        except BookAway as error:
            logger.info("letting go of claims waits", extra={"fields": {"why": error}})


async def _let_go(book: Book, *, is_keyed: bool, older_than_s: float) -> None:
    gone: int | None = _SLICE
    while gone == _SLICE:
        gone = await book.prune(is_keyed=is_keyed, older_than_s=older_than_s, at_most=_SLICE)
        await asyncio.sleep(_SLICE_PAUSE_S)
