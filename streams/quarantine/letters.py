"""Dead letters as an operator meets them: which place on the log, in what state, and which of them are meant.

Pure. A letter is called by its place, `usage/3/41`: topic (short or full), partition and offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Final

from schemas.topics import Topic, UnknownTopic, find_topic, short_name
from streams.ledger.raw import RawRecord

_LARGEST_PARTITION: Final = 2**31 - 1
_LARGEST_OFFSET: Final = 2**63 - 1


class State(str, Enum):
    """What became of a letter."""

    OPEN = "open"
    REDRIVEN = "redriven"
    DISCARDED = "discarded"


class PlaceError(ValueError):
    """A text that names no place on the log; the message says what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Place:
    """Where the record lies; `topic` is the full name, with the installation's namespace."""

    topic: str
    partition: int
    offset: int

    @classmethod
    def parse(cls, text: str, *, namespace: str) -> Place:
        """The place called `topic/partition/offset`. Raises PlaceError."""
        parts = text.strip().rsplit("/", 2)
        if len(parts) != 3 or not all(n.isascii() and n.isdigit() for n in parts[1:]):
            raise PlaceError(f"expected topic/partition/offset, like usage/3/41, found {text[:80]!r}")
        partition, offset = int(parts[1]), int(parts[2])
        if partition > _LARGEST_PARTITION or offset > _LARGEST_OFFSET:
            raise PlaceError(f"{text[:80]!r}: no partition or offset is that large")
        return cls(topic=topic_named(parts[0], namespace=namespace).name, partition=partition, offset=offset)

    def short(self, *, namespace: str) -> str:
        """The place as commands take it, with the topic's short name."""
        return f"{short_name(self.topic, namespace=namespace)}/{self.partition}/{self.offset}"


def topic_named(name: str, *, namespace: str) -> Topic:
    """The topic of a short or full name, in its namespace. Raises PlaceError."""
    try:
        return find_topic(name, namespace=namespace)
    except UnknownTopic as error:
        raise PlaceError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A letter without its bytes; `size_bytes` is the value's length, None when it had none or nobody noted it."""

    place: Place
    kind: str | None
    state: State
    reason: str
    seen_at: datetime
    size_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A letter with what is kept of the record. `value_sha256` is set when its bytes were left on the log."""

    letter: Letter
    key: bytes | None
    value: bytes | None
    value_sha256: str | None

    def record(self, value: bytes | None) -> RawRecord:
        """The record as it was read, with these bytes as its value."""
        p = self.letter.place
        return RawRecord(
            topic=p.topic, partition=p.partition, offset=p.offset, follows=p.offset, key=self.key, value=value
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which letters: of one topic (full name), state and kind, set aside in [since, until). None: any."""

    topic: str | None = None
    state: State | None = State.OPEN
    kind: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def values(self) -> tuple[str | None, str | None, str | None, datetime | None, datetime | None]:
        """In the order of the statements' parameters."""
        return self.topic, None if self.state is None else self.state.value, self.kind, self.since, self.until
