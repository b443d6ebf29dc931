"""Says to Stripe what the ledger says, hour by hour, until both sides' sums agree.

One pass, and what dying after each step costs:

1. Write the intents that are owed, in one transaction.     Die before: nothing. Die after: step 3 finds them.
2. Find or make meters and customers at Stripe.             Die in it: found by looking (`accounts`).
3. Mark the intent as sending, with the time.               Die after: it is sent later under the same identifier;
                                                            when that is late, the sums are read first.
4. Send the event.                                          Die after: it is sent again; "duplicate" means delivered.
5. Mark the intent by the answer.                           Die after: done.
6. Read the sums and confirm the hours that agree.          Die in it: read again.

Nobody else sends meanwhile: the lock is held by the connection that writes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from functools import partial
from typing import TypeVar

from streams.billing.accounts import ensure_customers, ensure_meters
from streams.billing.intents import State, last_sealed_hour
from streams.billing.outcome import PassReport, Policy, Tally
from streams.billing.reconcile import by_pair, prove_pair
from streams.billing.sender import Edge, Sender
from streams.billing.stripe_gateway import CallFailed, CustomerGone, Retryable

T = TypeVar("T")
_log = logging.getLogger(__name__)
_ROUNDS = 3


class Reporter:
    """Runs passes; keeps between them only which customer-meters are to be left alone for a while."""

    def __init__(self, edge: Edge, policy: Policy) -> None:
        self._edge = edge
        self._reports = edge.reports
        self._gateway = edge.gateway
        self._policy = policy
        self._sender = Sender(edge, policy)

    async def run_once(self) -> PassReport:
        """One pass. Stripe being away is no exception but intents that wait; raises StripeUnusable when a person must
        act first, and what infra.postgres raises when the database is away."""
        tally = Tally()
        ends_s = self._edge.monotonic() + self._policy.patience_s
        try:
            await self._report(tally, ends_s)
            await self._prove(tally, ends_s)
        except CallFailed as failed:
            if not isinstance(failed.answer, Retryable):
                tally.alert(f"Stripe refused a call of ours: {failed}")
            _log.warning("pass ended early", extra={"fields": {"reason": failed}})
        tally.counts["waiting"] = len(await self._reports.open_intents())
        tally.open_sums = await self._reports.open_sums(last_hour=self._last_hour())
        for customer_id, reason in (await self._reports.quarantined()).items():
            tally.alert(f"customer {customer_id} is in quarantine: {reason}")
        if any(tally.counts.values()):
            _log.info("pass done", extra={"fields": {word: n for word, n in sorted(tally.counts.items()) if n}})
        return tally.report()

    async def _report(self, tally: Tally, ends_s: float) -> None:
        # An intent that was in doubt kept its hour from being planned; once settled, what is still owed follows.
        for round_number in range(_ROUNDS):
            await self._plan(tally, is_first=round_number == 0)
            if self._edge.stopping() or not await self._send(tally, ends_s):
                return

    async def _plan(self, tally: Tally, *, is_first: bool) -> None:
        now, policy = self._edge.clock(), self._policy
        planned = await self._reports.plan(
            last_hour=self._last_hour(),
            environment=policy.environment,
            now=now,
            retry_rejected=policy.retry_rejected and is_first,
        )
        tally.counts["planned"] += len(planned.intents)
        for intent in planned.intents:
            if intent.state is State.CARRIED:
                tally.carried(intent.key, intent.delta_units)
        if not is_first:
            return
        for key in planned.refused:
            tally.alert(
                f"{key.meter} of customer {key.customer_id} in {key.hour:%Y-%m-%dT%H}:00Z were refused by Stripe "
                "and are not said again; remove the cause and use --retry-rejected"
            )
        for sentence in planned.outside:
            tally.alert(sentence)
        for customer_id in planned.unknown_customers:
            tally.alert(f"customer {customer_id} has usage but is not registered; register it and run again")

    def _last_hour(self) -> datetime:
        """The newest hour that this pass may report."""
        policy = self._policy
        return last_sealed_hour(
            self._edge.clock(), seal_after_s=policy.seal_after_s, include_open_hours=policy.include_open_hours
        )

    async def _send(self, tally: Tally, ends_s: float) -> bool:
        """True when anything was settled, so that there may be more to plan."""
        intents = await self._reports.open_intents()
        if not intents:
            return False
        environment = self._policy.environment
        names = {intent.key.meter for intent in intents}
        meters = await self._patiently(lambda: ensure_meters(self._gateway, names, environment=environment), ends_s)
        customers = await self._patiently(
            lambda: ensure_customers(self._gateway, self._reports, intents, environment=environment), ends_s
        )
        for kind, refused in (("meter", meters.refused), ("customer", customers.refused)):
            for name, reason in refused.items():
                tally.alert(f"Stripe refuses to create {kind} {name}: {reason}")
        possible = [i for i in intents if i.key.meter in meters.found and i.key.customer_id in customers.found]
        return await self._sender.send_all(possible, meters.found, customers.found, tally, ends_s=ends_s)

    async def _prove(self, tally: Tally, ends_s: float) -> None:
        now, policy = self._edge.clock(), self._policy
        hours = await self._reports.unconfirmed(delivered_before=now - timedelta(seconds=policy.confirm_after_s))
        if not hours or self._edge.stopping():
            return
        names = {hour.key.meter for hour in hours}
        meters = await self._patiently(
            lambda: ensure_meters(self._gateway, names, environment=policy.environment), ends_s
        )
        for pair in by_pair(hours):
            meter = meters.found.get(pair[0].key.meter)
            if meter is None:
                continue
            if self._edge.stopping():
                return
            prove = partial(prove_pair, self._gateway, self._reports, meter, pair, now=now)
            try:
                proof = await self._patiently(prove, ends_s)
            except CallFailed as failed:
                if not isinstance(failed.answer, CustomerGone):
                    raise
                await self._reports.quarantine(pair[0].key.customer_id, failed.answer.reason)
                continue
            tally.counts["confirmed"] += proof.confirmed
            tally.counts["unconfirmed"] += proof.pending + len(proof.differences)
            tally.differences.extend(proof.differences)

    async def _patiently(self, call: Callable[[], Awaitable[T]], ends_s: float) -> T:
        failures = 0
        while True:
            try:
                return await call()
            except CallFailed as failed:
                if not isinstance(failed.answer, Retryable):
                    raise
                failures += 1
                pause_s = self._policy.backoff.pause_s(failures, at_least_s=failed.answer.after_s)
                if self._edge.monotonic() + pause_s > ends_s or self._edge.stopping():
                    raise
                await self._edge.sleep(pause_s)
