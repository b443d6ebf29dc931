"""The limiter's answer to one call, as evidence and headers, or as a refusal with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from api.admission.buckets import Limit
from api.admission.demand import Demand
from api.errors import ApiError, RateLimited, Unauthorized, retry_after
from api.limits.plans import Look, Plan, Share
from api.spend.spend import SpendUnknown, cap_reached
from schemas.ids import EPOCH
from schemas.records import BucketCharge, LimiterMode

#: On every answer that a gateway decided from its own share.
LOCAL_HEADER: Mapping[str, str] = {"x-inferlog-limits": "local"}
_PLACES_RETRY_S = 1.0
_WINDOWS_US = {"s": 1_000_000, "minute": 60_000_000, "hour": 3_600_000_000, "day": 86_400_000_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What was taken: the evidence for the log, and the headers that tell the caller what is left."""

    at: datetime
    buckets: tuple[BucketCharge, ...]
    headers: Mapping[str, str]
    mode: LimiterMode = LimiterMode.SHARED


def judge(answer: Sequence[int], plan: Plan, demand: Demand) -> Charge:
    """The answer of `limits.lua` as a Charge.

    Raises RateLimited with the headers of the tightest bucket, Unauthorized (revoked key), PaymentRequired (spend cap),
    Unavailable (what was spent is not known).
    """
    state = answer[0]
    if state == 1:
        return _charge(answer, plan.limits, plan.look, plan.costs(demand.cost))
    raise _refusal(answer, plan, demand)


def judge_share(answer: Sequence[int], share: Share, demand: Demand) -> Charge:
    """The same of a gateway's share; an answer has the same form. Raises RateLimited."""
    if answer[0] == 1:
        costs = share.plan.costs(demand.cost)
        return _charge(answer, share.limits, share.look, costs, mode=LimiterMode.LOCAL, parts=share.parts)
    costs = share.plan.costs(demand.cost)
    raise _over(answer, share.limits, share.look, costs, "; limits are kept by this gateway alone now")


def _charge(
    answer: Sequence[int],
    limits: Sequence[Limit],
    look: Look,
    costs: Sequence[int],
    *,
    mode: LimiterMode = LimiterMode.SHARED,
    parts: int = 1,
) -> Charge:
    told = headers(look, answer[3::2], answer[4::2])
    if mode is LimiterMode.LOCAL:
        told.update(LOCAL_HEADER)
    return Charge(
        at=EPOCH + timedelta(microseconds=answer[1]),
        buckets=tuple(
            [
                BucketCharge(
                    bucket=b.name,
                    interval_us=b.interval_us,
                    burst=b.burst,
                    cost=cost,
                    remaining=left,
                    shares=parts,
                )
                for b, cost, left in zip(limits, costs, answer[3::2], strict=True)
            ]
        ),
        headers=told,
        mode=mode,
    )


def _refusal(answer: Sequence[int], plan: Plan, demand: Demand) -> ApiError:
    state = answer[0]
    if state == 0:
        return _over(answer, plan.limits, plan.look, plan.costs(demand.cost))
    if state == -1:
        return Unauthorized("this key was revoked", code="revoked_api_key")
    if state == -2:
        full = plan.full(answer[2])
        return crowded(full.name, full.most)
    cap, spending = demand.caller.cap, demand.spending
    if state == -3 and cap is not None and spending is not None:
        return cap_reached(cap, spending, reserved_micros=answer[2])
    if state == -4:
        since = EPOCH + timedelta(seconds=answer[2])
        return SpendUnknown(f"what is reserved is known from {since:%H:%M:%SZ} on, and the ledger is not there yet")
    raise ValueError(f"an answer of the limiter that nobody knows: {list(answer)}")


def crowded(name: str, most: int) -> RateLimited:
    """The refusal of a call for which there is no place among the unfinished of `name`."""
    kind = name.partition(":")[0]
    return RateLimited(
        f"the {kind}'s limit of {most} unfinished requests at once is reached; retry when one of them has ended",
        code="concurrency_limit_exceeded",
        headers=retry_after(_PLACES_RETRY_S),
    )


def _over(
    answer: Sequence[int], limits: Sequence[Limit], look: Look, costs: Sequence[int], more: str = ""
) -> RateLimited:
    remaining, reset_us, wait_s = answer[3::2], answer[4::2], answer[2] / 1_000_000
    # The bucket that the call would be furthest over is the one to wait for.
    worst = max(range(len(limits)), key=lambda i: reset_us[i] + costs[i] * limits[i].interval_us - look.windows_us[i])
    short = limits[worst]
    return RateLimited(
        f"{short.owner} limit of {_rate(short)}, {short.burst} at once, is used up; retry in {wait_s:.3f} s{more}",
        headers={**headers(look, remaining, reset_us, named=worst), **retry_after(wait_s)},
    )


def _rate(limit: Limit) -> str:
    """The rate as it was most likely given: a whole number in the shortest usual time that comes to its interval."""
    unit, interval_us = limit.unit, limit.interval_us
    for name, window_us in _WINDOWS_US.items():
        least = window_us // interval_us
        for amount in (least, least + 1):  # intervals are rounded up
            if amount and -(-window_us // amount) == interval_us:
                return f"{amount} {unit if amount > 1 else unit[:-1]} per {name}"
    return f"1 {unit[:-1]} per {interval_us / 1_000_000:g} s"


def headers(
    look: Look, remaining: Sequence[int], reset_us: Sequence[int], *, named: int | None = None
) -> dict[str, str]:
    """What is left, for callers. The bucket with the least share left is named, unless another is to be; of each unit
    that clients know, the one with the least share left has headers of its own."""
    if not look.labels:
        return {}
    windows_us = look.windows_us
    told = {"RateLimit-Policy": look.policy, "RateLimit": ""}
    fullest = -1.0
    for unit, at in look.units:
        tightest, most = at[0], -1.0
        for i in at:
            used = reset_us[i] / windows_us[i]
            if used > most:
                tightest, most = i, used
        told[f"x-ratelimit-limit-{unit}"] = look.bursts[tightest]
        told[f"x-ratelimit-remaining-{unit}"] = str(remaining[tightest])
        told[f"x-ratelimit-reset-{unit}"] = f"{-(-reset_us[tightest] // 1000)}ms"
    if named is None:
        for i, window_us in enumerate(windows_us):
            used = reset_us[i] / window_us
            if used > fullest:
                named, fullest = i, used
    at_us = reset_us[named or 0]
    told["RateLimit"] = f'"{look.labels[named or 0]}";r={remaining[named or 0]};t={-(-at_us // 1_000_000)}'
    return told
