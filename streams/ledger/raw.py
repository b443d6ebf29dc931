"""A record as it was read from the usage topic: its place, and bytes that nobody has judged yet.

No code. Whatever becomes of it, counted, repeated or set aside, it is known by its place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRecord:
    """A record as read from the log, with its place. `follows` is the position of its reader just before it."""

    topic: str
    partition: int
    offset: int
    follows: int
    key: bytes | None
    value: bytes | None
