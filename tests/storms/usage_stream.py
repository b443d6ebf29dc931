"""Usage as a busy month makes it, from a seed: skewed customers, late arrivals, repetitions, and the sums of it all.

Event `n` is a function of the seed and `n`, so a million of them need no memory; the sums are kept as they are sent.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from uuid import UUID

from schemas.ids import usage_id
from schemas.records import UsageRecorded

#: customer, hour, model, version, price, meter.
HourKey = tuple[str, datetime, str, str, str, str]

_MODELS = ("digits", "minilm", "ranker")
_LATEST_REPEAT = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What a stream is made of. `late_s`: events are up to this old when sent; `repeated`: share that is sent twice.

    `apart_s`: how much later each event is than the one before, were none late. `hot`: all customers are equally busy.
    """

    events: int
    customers: int = 400
    repeated: float = 0.05
    late_s: float = 7200.0
    apart_s: float = 0.0005
    hot: bool = False


class UsageStream:
    """Usage records in the order of sending. `sums`, `unique` and `repeats` grow with what was taken from `records`."""

    def __init__(self, seed: int, mix: Mix, *, began: datetime) -> None:
        self._key = seed.to_bytes(8, "big", signed=False)
        self.mix = mix
        self._began = began
        self.sums: Counter[HourKey] = Counter()
        self.unique = 0
        self.repeats = 0

    def event(self, number: int) -> UsageRecorded:
        """The record of one request; equal however often it is asked for."""
        d = hashlib.blake2b(number.to_bytes(8, "big"), key=self._key, digest_size=32).digest()
        spread = int.from_bytes(d[:4], "big") / 2**32
        late_s = self.mix.late_s * int.from_bytes(d[4:8], "big") / 2**32
        at = self._began + timedelta(seconds=number * self.mix.apart_s - late_s)
        millis = int(at.timestamp() * 1000)
        bits = int.from_bytes(d[8:18], "big")
        request_id = UUID(int=millis << 80 | 0x7 << 76 | (bits >> 68) << 64 | 0b10 << 62 | bits & (2**62 - 1))
        model = d[18] % len(_MODELS)
        quantities = {"requests": 1, "items": d[19] % 32 + 1}
        if model == 1:
            quantities["tokens"] = int.from_bytes(d[20:22], "big") % 4096 + 1
        return UsageRecorded(
            event_id=usage_id(request_id),
            occurred_at=at,
            request_id=request_id,
            customer_id=f"cust_{int(self.mix.customers * (spread if self.mix.hot else spread * spread)):04d}",
            model=_MODELS[model],
            version=f"{model:02d}{d[22] % 3:02d}" * 16,
            price_id=("standard-v1", "volume-v2")[d[23] % 8 == 0],
            quantities=quantities,
        )

    def records(self) -> Iterator[UsageRecorded]:
        """Every event once, and some of them again: next to the first, or up to 50,000 records later."""
        again: list[tuple[int, int]] = []
        for number in range(self.mix.events):
            record = self.event(number)
            self._count(record)
            yield record
            choice = int.from_bytes(
                hashlib.blake2b(b"again" + number.to_bytes(8, "big"), digest_size=8).digest(), "big"
            )
            if choice % 10_000 < 10_000 * self.mix.repeated:
                gap = choice // 10_000 % _LATEST_REPEAT if choice & 1 else 1
                heapq.heappush(again, (number + gap, number))
            while again and again[0][0] <= number:
                self.repeats += 1
                yield self.event(heapq.heappop(again)[1])
        while again:
            self.repeats += 1
            yield self.event(heapq.heappop(again)[1])

    def _count(self, record: UsageRecorded) -> None:
        self.unique += 1
        hour = record.occurred_at.astimezone(timezone.utc).replace(minute=0, second=0, microsecond=0)
        for meter, quantity in record.quantities.items():
            self.sums[record.customer_id, hour, record.model, record.version, record.price_id, meter] += quantity
