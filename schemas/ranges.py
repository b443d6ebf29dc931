"""Integers as the records bound them: what a field may hold is part of its type, and checked when it is encoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """The integers from `low` to `high`, both included."""

    low: int
    high: int


#: Avro int, at least 0 or at least 1.
Count = Annotated[int, Range(0, INT_MAX)]
PositiveCount = Annotated[int, Range(1, INT_MAX)]
#: Avro long, at least 0, at least 1, or of either sign.
Quantity = Annotated[int, Range(0, LONG_MAX)]
PositiveQuantity = Annotated[int, Range(1, LONG_MAX)]
SignedQuantity = Annotated[int, Range(-LONG_MAX, LONG_MAX)]
