"""The usage that every contender reads, drawn from one seed, and what its sums must be.

Pure. A share of the records is there twice, as a retried writer leaves them, and a share is late by up to two hours, as
where a worker comes back; the others are in order of time.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from uuid import UUID

from schemas.codec import encode
from schemas.ids import usage_id
from schemas.records import UsageRecorded

#: (customer, start of the UTC hour in Unix seconds, meter) to a sum.
Sums = Counter[tuple[str, int, str]]

CUSTOMERS = 400
DUPLICATES = 0.01
_SPAN_S = 3 * 3600
LATE = 0.05
_LATE_S = 2 * 3600
_REPEATED_WITHIN = 10_000
_MODELS = (("digits", "d1" * 32), ("minilm", "e5" * 32))


@dataclass(kw_only=True)
class Generated:
    """Framed records by the customer that they are keyed by. Sums are complete once all were drawn.

    `begins` is when event time does. The ledger quarantines what is older than its horizon, and what is in the future.
    """

    events: int
    seed: int
    begins: datetime
    once: Sums = field(default_factory=Counter)
    read: Sums = field(default_factory=Counter)  # duplicates counted as often as they are there

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """(key, value) of `events` records, in the order in which they are to be written."""
        draw = random.Random(self.seed)
        recent: deque[tuple[bytes, bytes, list[tuple[tuple[str, int, str], int]]]] = deque(maxlen=_REPEATED_WITHIN)
        for number in range(self.events):
            if recent and draw.random() < DUPLICATES:
                key, value, adds = recent[draw.randrange(len(recent))]
            else:
                late_s = draw.random() * _LATE_S if draw.random() < LATE else 0.0
                at_s = _SPAN_S * number / self.events - late_s
                record = usage_event(draw, occurred_at=self.begins + timedelta(seconds=at_s))
                key, value, adds = record.customer_id.encode(), encode(record), _adds(record)
                recent.append((key, value, adds))
                for place, quantity in adds:
                    self.once[place] += quantity
            for place, quantity in adds:
                self.read[place] += quantity
            yield key, value


def recently() -> datetime:
    """The start of an hour from which event time ends before now."""
    return (datetime.now(timezone.utc) - timedelta(hours=5)).replace(minute=0, second=0, microsecond=0)


def usage_event(draw: random.Random, *, occurred_at: datetime) -> UsageRecorded:
    """One request's usage; ids are in order of time, as real ones are."""
    request_id = _request_id(draw, occurred_at)
    customer = draw.randrange(CUSTOMERS)
    model, version = _MODELS[customer % len(_MODELS)]
    return UsageRecorded(
        event_id=usage_id(request_id),
        occurred_at=occurred_at,
        request_id=request_id,
        customer_id=f"cust_{customer:04d}",
        model=model,
        version=version,
        price_id="standard-v1",
        quantities={"requests": 1, "items": draw.randrange(1, 9), "tokens": draw.randrange(1, 2000)},
    )


def _request_id(draw: random.Random, at: datetime) -> UUID:
    """A UUID of version 7 for this moment."""
    ms = int(at.timestamp() * 1000)
    return UUID(int=ms << 80 | 0x7 << 76 | draw.getrandbits(12) << 64 | 0b10 << 62 | draw.getrandbits(62))


def _adds(record: UsageRecorded) -> list[tuple[tuple[str, int, str], int]]:
    hour = int(record.occurred_at.timestamp()) // 3600 * 3600
    return [((record.customer_id, hour, meter), quantity) for meter, quantity in record.quantities.items()]


def differences(expected: Sums, found: Sums) -> list[str]:
    """What does not agree, in words: at most three places, and how many there are. Empty when all does."""
    places = sorted(p for p in expected.keys() | found.keys() if expected[p] != found[p])
    shown = [f"{c}, hour {h}, {m}: expected {expected[c, h, m]}, found {found[c, h, m]}" for c, h, m in places[:3]]
    return [*shown, f"{len(places)} sums differ"] if places else []
