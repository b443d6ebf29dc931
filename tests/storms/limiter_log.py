"""The same admissions as records of the log, encoded and decoded, judged by the proof that `inferlog verify` makes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from schemas.codec import decode, encode
from schemas.ids import EPOCH
from schemas.records import BucketCharge, InferenceRequested, LimiterMode
from streams.replay.limits import LimitProof
from tests.factories import requested

#: So many admissions are judged, those of whole buckets; beyond, the time is better spent on the limiter.
_MOST = 20_000

Taken = tuple[int, int, int, int]


def verdict_of(
    buckets: Mapping[str, Sequence[Taken]], *, seed: int, lines: Iterable[tuple[int, dict[str, Any]]] = ()
) -> bool | None:
    """Whether I2 holds for these. `buckets`: (µs, cost, interval, burst) by name; `lines`: what gateways said, with
    their numbers."""
    proof, left = LimitProof(), _MOST
    names = sorted(buckets)
    random.Random(seed).shuffle(names)
    for name in names:
        if left <= 0:
            break
        for at, cost, interval_us, burst in buckets[name]:
            left -= 1
            b = BucketCharge(bucket=name, interval_us=interval_us, burst=burst, cost=cost, remaining=0)
            proof.add(_on_the_log(at, (b,), LimiterMode.SHARED, "c", "api-1"))
    for number, one in lines:
        charges = tuple(
            BucketCharge(bucket=name, interval_us=t, burst=b, cost=cost, remaining=left_over, shares=shares)
            for name, t, b, cost, left_over, shares in one["buckets"]
        )
        proof.add(_on_the_log(one["at"], charges, LimiterMode(one["mode"]), f"c{one['key']}", f"api-{number}"))
    return proof.finish().holds


def _on_the_log(
    at: int, buckets: tuple[BucketCharge, ...], mode: LimiterMode, customer_id: str, gateway: str
) -> InferenceRequested:
    record = requested(
        limiter_time=EPOCH + timedelta(microseconds=at),
        limiter_buckets=buckets,
        limiter=mode,
        customer_id=customer_id,
        reply_to=gateway,
        inputs=(),
    )
    return decode(encode(record), InferenceRequested)
