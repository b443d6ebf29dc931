"""What the calls of one key to one model have in common for the limiter: their buckets, and the words that are sent.

Made once and kept, because making them costs more than the rest of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property, lru_cache
from uuid import UUID

from api.admission.buckets import UNITS, Limit
from api.admission.caller import Caller, Concurrency
from api.admission.demand import Cost, Demand
from api.errors import BadInput
from infra.redis import LuaCall, LuaScript, LuaStart, lua
from schemas.ids import EPOCH
from schemas.keys import RedisKeys

#: Clocks differ, and the last answer of a request takes its time: its place is free so long after its deadline.
PLACE_AFTER_S = 1
_MICROSECOND = timedelta(microseconds=1)
_SECOND = timedelta(seconds=1)
_MOST_PLANS = 10_000
_MOST_LOOKS = 1_000

DECIDE, RELEASE, SETTLE = (lua("api.limits", name) for name in ("limits", "release", "settle"))


def place_us(demand: Demand) -> int:
    """Microseconds from its admission for which a request's place is taken when nobody frees it."""
    return (demand.until - demand.admitted_at) // _MICROSECOND + PLACE_AFTER_S * 1_000_000


class Plan:
    """One key's calls of one model. `limits` are the buckets that such calls take from."""

    def __init__(
        self,
        keys: RedisKeys,
        caller: Caller,
        limits: Sequence[Limit],
        *,
        has_money: bool = False,
        parts: int = 1,
        script: LuaScript = DECIDE,
    ) -> None:
        self.caller = caller
        self._parts = parts
        self.limits = tuple(limits)
        self.has_money = has_money
        self._units = tuple(UNITS.index(b.unit) for b in self.limits)
        places = caller.concurrency
        names = [keys.revoked_keys(caller.customer_id), *(keys.bucket(caller.customer_id, b.name) for b in self.limits)]
        self.places = [keys.places(caller.customer_id, c.name) for c in places]
        names += self.places
        args: list[str | int] = [caller.key_id, len(self.limits), len(places), int(has_money)]
        for b, unit in zip(self.limits, self._units, strict=True):
            args += (b.interval_us, b.burst, unit + 1)
        args += [c.most for c in places]
        more = 3 + 2 * bool(places)
        if has_money:
            names.append(keys.money(caller.customer_id))
            more += 4
        #: The words of a call that are the same every time.
        self.start = script.start(names, args, more=more)
        bursts = [[b.burst for b in self.limits if b.unit == unit] for unit in UNITS]
        self._most = tuple(min(found) if found else 2**53 for found in bursts)
        self.look = look_of(self.limits)

    def costs(self, cost: Cost) -> list[int]:
        """Units of this call, bucket by bucket."""
        of = (cost.requests, cost.items, cost.tokens)
        return [of[unit] for unit in self._units]

    def require_possible(self, cost: Cost) -> None:
        """Raise BadInput when a bucket never holds enough for this call, however long it waits."""
        requests, items, tokens = self._most
        if cost.items <= items and cost.tokens <= tokens and cost.requests <= requests:
            return
        tightest = min(
            (b for b in self.limits if cost.of(b.unit) > b.burst), key=lambda b: b.burst / max(1, cost.of(b.unit))
        )
        unit = tightest.unit
        raise BadInput(
            f"this call comes to {cost.of(unit)} {unit}, more than {tightest.owner} limit lets through at once "
            f"({tightest.burst} {unit}); send fewer in one call",
            code="cost_exceeds_limit",
        )

    def call(self, demand: Demand) -> LuaCall:
        """One run of `limits.lua`."""
        cost = demand.cost
        args: tuple[str | int, ...] = (cost.requests, cost.items, cost.tokens)
        if self.places:
            args += (demand.request_id.hex, place_us(demand))
        if demand.spending is not None:
            spending = demand.spending
            args += (
                spending.left_micros,
                (spending.settled_at - EPOCH) // _SECOND,
                (demand.admitted_at - EPOCH) // _SECOND,
                spending.cost_micros,
            )
        return self.start.call(*args)

    @cached_property
    def _release(self) -> LuaStart:
        return RELEASE.start(self.places, (), more=1)

    def release(self, request_id: UUID) -> LuaCall:
        """One run of `release.lua`."""
        return self._release.call(request_id.hex)

    def full(self, number: int) -> Concurrency:
        """The places that the script counts as `number`, from 1."""
        return self.caller.concurrency[number - 1]

    @cached_property
    def share(self) -> Share:
        """The part of these buckets and places that one of `parts` gateways may use by itself."""
        return Share(self, self._parts)


class Look:
    """How buckets are told to callers: the texts that are the same every time."""

    def __init__(self, buckets: Sequence[tuple[str, int, int, str]]) -> None:
        """`buckets`: label, burst, interval in microseconds, unit."""
        self.windows_us = [max(1, burst * interval_us) for _, burst, interval_us, _ in buckets]
        self.policy = ", ".join(
            f'"{label}";q={burst};w={-(-burst * interval_us // 1_000_000)}'
            + ("" if unit == "requests" else f';qu="{unit}"')
            for label, burst, interval_us, unit in buckets
        )
        self.labels = [label for label, *_ in buckets]
        self.bursts = [str(burst) for _, burst, *_ in buckets]
        #: For the units that clients read headers of: the unit, and which buckets count it.
        self.units = [
            (unit, at) for unit in ("requests", "tokens") if (at := [i for i, b in enumerate(buckets) if b[3] == unit])
        ]


def look_of(limits: Sequence[Limit]) -> Look:
    """How these buckets look; one object for all keys with limits of the same size."""
    return _look(tuple((b.label, b.burst, b.interval_us, b.unit) for b in limits))


@lru_cache(maxsize=_MOST_LOOKS)
def _look(buckets: tuple[tuple[str, int, int, str], ...]) -> Look:
    return Look(buckets)


class Share:
    """A part of a plan."""

    def __init__(self, plan: Plan, parts: int) -> None:
        self.parts = parts
        self.plan = plan
        self.limits = tuple(b.share(parts) for b in plan.limits)
        self.look = look_of(self.limits)
        self.places = [(c.name, c.most // parts) for c in plan.caller.concurrency]


class Plans:
    """The plans of the keys that called lately. `parts`: among how many gateways limits are divided when need be."""

    def __init__(self, keys: RedisKeys, *, parts: int, script: LuaScript = DECIDE) -> None:
        self.keys = keys
        self._parts = parts
        self._script = script
        self._plans: dict[tuple[str, str, bool, bool, bool], Plan] = {}

    def of(self, demand: Demand) -> Plan:
        """The plan for this call; the same object until the key is looked up again. Raises BadInput when the call
        could never pass."""
        caller, cost = demand.caller, demand.cost
        name = (caller.key_id, demand.model, cost.items > 0, cost.tokens > 0, demand.spending is not None)
        plan = self._plans.get(name)
        if plan is None or plan.caller is not caller:
            if len(self._plans) >= _MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            plan = Plan(
                self.keys,
                caller,
                [b for b in caller.limits if b.model in (None, demand.model) and cost.of(b.unit) > 0],
                has_money=demand.spending is not None,
                parts=self._parts,
                script=self._script,
            )
            self._plans[name] = plan
        plan.require_possible(cost)
        return plan
