"""Sends open intents: customer-meters side by side, the hours of each one after another.

Steps 3 to 5 of the reporter's write order; a customer-meter that Stripe puts off waits without holding up the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

from streams.billing.intents import HOUR, State, Step, Verdict, event_time, is_too_old, judge, next_step
from streams.billing.outcome import Policy, Tally
from streams.billing.pacing import Sleep
from streams.billing.reports import OpenIntent, Reports
from streams.billing.stripe_gateway import (
    Answer,
    CallFailed,
    CustomerGone,
    Delivered,
    Duplicate,
    Meter,
    MeterEvent,
    Retryable,
    StripeGateway,
)

Pair = tuple[str, str]
Group = list[OpenIntent]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Everything outside the sender: the table, Stripe, time. `clock` tells UTC, `monotonic` seconds for pauses;
    `sleep` may return early once `stopping` is true."""

    reports: Reports
    gateway: StripeGateway
    clock: Callable[[], datetime]
    monotonic: Callable[[], float]
    sleep: Sleep
    stopping: Callable[[], bool]


class Sender:
    """Remembers between passes how often each customer-meter was put off, and until when it is left alone."""

    def __init__(self, edge: Edge, policy: Policy) -> None:
        self._edge = edge
        self._policy = policy
        self._failures: Counter[Pair] = Counter()
        self._due_s: dict[Pair, float] = {}

    async def send_all(
        self,
        intents: Sequence[OpenIntent],
        meters: Mapping[str, Meter],
        stripe_ids: Mapping[str, str],
        tally: Tally,
        *,
        ends_s: float,
    ) -> bool:
        """Settle intents, sorted by customer and meter, until none is left or waiting would pass `ends_s`.

        Says whether any was settled. Raises StripeUnusable, and what infra.postgres raises when the database is away;
        intents on their way are then left as sending.
        """
        gone: set[str] = set()
        settled = False

        async def work(group: Group) -> Group:
            nonlocal settled
            for place, intent in enumerate(group):
                if intent.key.customer_id in gone:
                    return []
                if self._edge.stopping():
                    return group[place:]
                stripe_id = stripe_ids[intent.key.customer_id]
                answer = await self._settle(intent, meters[intent.key.meter], stripe_id, tally)
                if isinstance(answer, Retryable):
                    self._put_off(_pair(intent), answer)
                    tally.counts["retried"] += 1
                    return group[place:]
                settled = True
                self._failures.pop(_pair(intent), None)
                if isinstance(answer, CustomerGone):
                    gone.add(intent.key.customer_id)
            return []

        waiting: list[Group] = [list(group) for _, group in groupby(intents, key=_pair)]
        while waiting and not self._edge.stopping():
            now_s = self._edge.monotonic()
            pause_s = min(self._due(group) for group in waiting) - now_s
            if pause_s > 0:
                if now_s + pause_s > ends_s:
                    break
                await self._edge.sleep(pause_s)
                now_s = self._edge.monotonic()
            due = [group for group in waiting if self._due(group) <= now_s]
            later = [group for group in waiting if self._due(group) > now_s]
            left = await _side_by_side(work, due, self._policy.concurrency)
            waiting = later + [group for group in left if group]
        return settled

    def _due(self, group: Group) -> float:
        return self._due_s.get(_pair(group[0]), float("-inf"))

    def _put_off(self, pair: Pair, answer: Retryable) -> None:
        self._failures[pair] += 1
        pause_s = self._policy.backoff.pause_s(self._failures[pair], at_least_s=answer.after_s)
        self._due_s[pair] = self._edge.monotonic() + pause_s

    async def _settle(self, intent: OpenIntent, meter: Meter, stripe_id: str, tally: Tally) -> Answer | None:
        now = self._edge.clock()
        if intent.first_sent_at is None and is_too_old(intent.key.hour, now):
            await self._edge.reports.end_send(intent.identifier, State.CARRIED, now=now, reason="older than 35 days")
            tally.carried(intent.key, intent.delta_units)
            return None
        step = next_step(intent.first_sent_at, now)
        if step is Step.WAIT:
            return None
        if step is Step.LOOK:
            return await self._look(intent, meter, stripe_id, tally)
        # 3. Mark as sending. Die after: sent later under the same identifier, or looked for when that is late.
        if await self._edge.reports.begin_send(intent.identifier, now=now) is None:
            return None
        # 4. Send. Die after: sent again, and "duplicate" says that it was delivered.
        answer = await self._edge.gateway.send(
            MeterEvent(
                event_name=meter.event_name,
                stripe_customer_id=stripe_id,
                units=intent.delta_units,
                identifier=intent.identifier,
                at=event_time(intent.key.hour, now),
            )
        )
        # 5. Mark by the answer. Die after: done.
        await self._record(intent, answer, tally)
        return answer

    async def _record(self, intent: OpenIntent, answer: Answer, tally: Tally) -> None:
        reports, key, now = self._edge.reports, intent.key, self._edge.clock()
        if isinstance(answer, (Delivered, Duplicate)):
            await reports.end_send(intent.identifier, State.DELIVERED, now=now)
            tally.counts["delivered" if isinstance(answer, Delivered) else "duplicate"] += 1
        elif isinstance(answer, Retryable):
            await reports.note_error(intent.identifier, answer.reason)
        elif isinstance(answer, CustomerGone):
            await reports.note_error(intent.identifier, answer.reason)
            await reports.quarantine(key.customer_id, answer.reason)
            _log.error("customer in quarantine", extra={"fields": {"customer": key.customer_id, "why": answer.reason}})
        elif answer.code.startswith("timestamp_") and intent.first_sent_at is not None:
            # An earlier try may have been accepted while its time was still good: only the sums can tell.
            await reports.note_error(intent.identifier, f"{answer.code}: {answer.reason}")
        elif answer.code == "timestamp_too_far_in_past":
            await reports.end_send(intent.identifier, State.CARRIED, now=now, reason=answer.reason)
            tally.carried(key, intent.delta_units)
        else:
            reason = f"{answer.code}: {answer.reason}"
            await reports.end_send(intent.identifier, State.REJECTED, now=now, reason=reason)
            tally.counts["rejected"] += 1
            tally.alert(f"Stripe refuses rev {intent.rev} of {_where(intent)}: {reason}")

    async def _look(self, intent: OpenIntent, meter: Meter, stripe_id: str, tally: Tally) -> Answer | None:
        reports, hour, now = self._edge.reports, intent.key.hour, self._edge.clock()
        try:
            sums = await self._edge.gateway.hour_sums(meter.meter_id, stripe_id, start=hour, end=hour + HOUR)
        except CallFailed as failed:
            await self._record(intent, failed.answer, tally)
            return failed.answer
        at_stripe = sums.get(hour, 0)
        verdict = judge(at_stripe, prior_units=intent.prior_units, delta_units=intent.delta_units)
        if verdict is Verdict.ARRIVED:
            await reports.end_send(intent.identifier, State.CONFIRMED, now=now)
            tally.counts["confirmed"] += 1
        elif verdict is Verdict.LOST:
            reason = "not in Stripe's sum long after it was first sent; replaced by the next rev"
            await reports.end_send(intent.identifier, State.LOST, now=now, reason=reason)
            tally.counts["lost"] += 1
        else:
            reason = (
                f"Stripe's sum is {at_stripe:g}: neither {intent.prior_units} without this intent "
                f"nor {intent.prior_units + intent.delta_units} with it"
            )
            await reports.note_error(intent.identifier, reason)
            tally.alert(f"rev {intent.rev} of {_where(intent)} is unclear: {reason}")
        return None


def _pair(intent: OpenIntent) -> Pair:
    return intent.key.customer_id, intent.key.meter


def _where(intent: OpenIntent) -> str:
    key = intent.key
    return f"{key.meter} of customer {key.customer_id} in {key.hour:%Y-%m-%dT%H}:00Z"


async def _side_by_side(
    work: Callable[[Group], Awaitable[Group]], groups: Sequence[Group], concurrency: int
) -> list[Group]:
    slots = asyncio.Semaphore(concurrency)

    async def one(group: Group) -> Group:
        async with slots:
            return await work(group)

    tasks = [asyncio.ensure_future(one(group)) for group in groups]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        # When one of them failed the others stop too: none may go on writing behind the caller's back.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
