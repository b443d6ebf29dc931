"""Wires the reporter: settings, the one connection, the gateway, time, and the signal that ends it.

The only module of billing that knows all the others.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from typing import Final

from infra.postgres import is_outage, open_connection
from infra.settings import BillingSettings
from streams.billing.intents import last_sealed_hour
from streams.billing.outcome import PassReport, Policy
from streams.billing.pacing import Pace
from streams.billing.reconcile import Compared, compare
from streams.billing.reporter import Reporter
from streams.billing.reports import Reports
from streams.billing.sender import Edge
from streams.billing.stripe_gateway import StripeUnusable, open_gateway

_log = logging.getLogger(__name__)
# Stripe allows tens of calls a second in its sandbox and a hundred live; an hour of 400 customers takes a minute.
CALLS_PER_S: Final = 20.0
# In the loop, sums are read twice a day: early enough for any invoice, and within the allowance for reads.
CONFIRM_AFTER_S: Final = 12 * 3600.0
_LOCK_WAIT_S: Final = 3.0


class AnotherSender(RuntimeError):
    """Another process reports for this database; two would be one too many."""


class Stop:
    """Set by SIGTERM and SIGINT; whoever sleeps wakes up."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def listen(self) -> None:
        """Take over the two signals from now on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._event.set)

    def is_set(self) -> bool:
        """True once the process was asked to end."""
        return self._event.is_set()

    async def sleep(self, pause_s: float) -> None:
        """Return after the pause, or as soon as the process is asked to end."""
        try:
            await asyncio.wait_for(self._event.wait(), pause_s)
        except asyncio.TimeoutError:
            return


def utc_now() -> datetime:
    """The clock that first_sent_at is written and read by."""
    return datetime.now(timezone.utc)


@asynccontextmanager
async def open_reporter(
    settings: BillingSettings, policy: Policy, *, stop: Stop, lock_wait_s: float = _LOCK_WAIT_S
) -> AsyncIterator[Reporter]:
    """A reporter that is the only sender of its database. Raises AnotherSender when it cannot be within the wait."""
    pace = Pace(calls_per_s=CALLS_PER_S, monotonic=time.monotonic, sleep=stop.sleep)
    async with open_connection(settings.postgres) as connection, open_gateway(settings.stripe, pace=pace) as gateway:
        reports = Reports(connection)
        # A sender that was just killed keeps its lock until Postgres has noticed.
        ends_s = time.monotonic() + lock_wait_s
        while not await reports.take_sender_lock():
            if time.monotonic() > ends_s or stop.is_set():
                raise AnotherSender("another reporter is at work on this database; stop it, or let it do the work")
            await stop.sleep(0.1)
        edge = Edge(
            reports=reports,
            gateway=gateway,
            clock=utc_now,
            monotonic=time.monotonic,
            sleep=stop.sleep,
            stopping=stop.is_set,
        )
        yield Reporter(edge, policy)


async def run_once(settings: BillingSettings, *, include_open_hours: bool, retry_rejected: bool) -> PassReport:
    """One pass. Raises AnotherSender, StripeUnusable, and what infra.postgres raises."""
    stop = Stop()
    stop.listen()
    policy = Policy(
        environment=settings.environment,
        seal_after_s=settings.seal_after_s,
        include_open_hours=include_open_hours,
        retry_rejected=retry_rejected,
    )
    async with open_reporter(settings, policy, stop=stop) as reporter:
        return await reporter.run_once()


async def run(settings: BillingSettings, *, include_open_hours: bool, each: Callable[[PassReport], None]) -> None:
    """Pass after pass, `interval_s` apart, until SIGTERM; a step that has begun is finished first.

    Waits for the database, for Stripe and for the lock as long as it takes; what needs a person is logged each time.
    """
    stop = Stop()
    stop.listen()
    policy = Policy(
        environment=settings.environment,
        seal_after_s=settings.seal_after_s,
        include_open_hours=include_open_hours,
        confirm_after_s=CONFIRM_AFTER_S,
    )
    while not stop.is_set():
        try:
            async with open_reporter(settings, policy, stop=stop, lock_wait_s=0) as reporter:
                _log.info("reporting to Stripe", extra={"fields": {"interval_s": settings.interval_s}})
                while not stop.is_set():
                    each(await reporter.run_once())
                    await stop.sleep(settings.interval_s)
        except (AnotherSender, StripeUnusable) as error:
            _log.error("not reporting", extra={"fields": {"why": error}})
        except Exception as error:
            if not is_outage(error):
                raise
            _log.warning("Postgres is away", extra={"fields": {"why": repr(error)}})
        await stop.sleep(settings.interval_s)


async def compare_all(settings: BillingSettings) -> Compared:
    """The ledger against Stripe. Needs no lock and changes nothing. Raises CallFailed, StripeUnusable."""
    pace = Pace(calls_per_s=CALLS_PER_S, monotonic=time.monotonic, sleep=asyncio.sleep)
    now = utc_now()
    async with open_connection(settings.postgres) as connection, open_gateway(settings.stripe, pace=pace) as gateway:
        return await compare(
            connection,
            gateway,
            environment=settings.environment,
            last_sealed=last_sealed_hour(now, seal_after_s=settings.seal_after_s, include_open_hours=False),
            now=now,
        )
