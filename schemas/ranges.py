"""What a field of a record may hold beyond its type: numbers, texts and moments as the schemas' docs bound them.

A bound is part of the field's type hint, and is checked when the record is written and when it is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """The integers from `low` to `high`, both included, without `never`."""

    low: int
    high: int
    never: int | None = None

    @property
    def words(self) -> str:
        """What is expected, in words."""
        but = "" if self.never is None else f", and not {self.never}"
        return f"an integer from {self.low} to {self.high}{but}"


@dataclass(frozen=True, slots=True)
class Text:
    """Texts that match `pattern` as a whole; `words` say what that is, and `example` is one."""

    pattern: re.Pattern[str]
    words: str
    example: str


@dataclass(frozen=True, slots=True)
class Moments:
    """The moments from `low` to `high`, both included; with `whole_hours` only those that begin an hour in UTC."""

    low: datetime
    high: datetime
    whole_hours: bool = False

    @property
    def words(self) -> str:
        """What is expected, in words."""
        whole = ", a whole hour in UTC" if self.whole_hours else ""
        return f"a time from {self.low:%Y-%m-%d} to {self.high:%Y-%m-%d} UTC{whole}"


#: Avro int, at least 0 or at least 1.
Count = Annotated[int, Range(0, INT_MAX)]
PositiveCount = Annotated[int, Range(1, INT_MAX)]
#: Avro long, at least 0, at least 1, or of either sign and never 0.
Quantity = Annotated[int, Range(0, LONG_MAX)]
PositiveQuantity = Annotated[int, Range(1, LONG_MAX)]
Percent = Annotated[int, Range(1, 100)]
Correction = Annotated[int, Range(-LONG_MAX, LONG_MAX, never=0)]

#: Every moment of a record. Nobody lived to write an earlier one, and libraries differ in what they make of years far
#: away: asyncpg stores the year 1 as -infinity, which nothing can add up again.
FIRST_MOMENT = datetime(2000, 1, 1, tzinfo=timezone.utc)
LAST_MOMENT = datetime(2200, 1, 1, tzinfo=timezone.utc)
MOMENTS = Moments(FIRST_MOMENT, LAST_MOMENT)
Hour = Annotated[datetime, Moments(FIRST_MOMENT, LAST_MOMENT, whole_hours=True)]

Sha256 = Annotated[str, Text(re.compile(r"[0-9a-f]{64}"), "64 hex digits in lower case", "0a" * 32)]
Crc64 = Annotated[str, Text(re.compile(r"[0-9a-f]{16}"), "16 hex digits in lower case", "0a" * 8)]
Currency = Annotated[str, Text(re.compile(r"[a-z]{3}"), "a currency's three letters in lower case", "eur")]
LimitUnit = Annotated[str, Text(re.compile(r"requests|items|tokens"), "requests, items or tokens", "items")]
Words = Annotated[str, Text(re.compile(r"\s*\S.*", re.DOTALL), "text that is not blank", "words")]
