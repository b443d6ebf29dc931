"""Stripe's counterparts of our meters and customers: found, or made exactly once.

Metadata at Stripe says which customer of ours one of theirs is, so that a crash between their creation and our note
of it is healed by looking; the idempotency key covers the moment in which looking does not yet show it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from streams.billing.reports import OpenIntent, Reports
from streams.billing.stripe_gateway import CallFailed, Meter, Rejected, Retryable, StripeGateway, StripeUnusable

T = TypeVar("T")
_log = logging.getLogger(__name__)
# How often a creation is tried anew under another key after Stripe stored a failure under the last one.
_KEYS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ensured(Generic[T]):
    """What Stripe has for each of our names, and Stripe's reason for each name that it refused."""

    found: Mapping[str, T]
    refused: Mapping[str, str]


def event_name(environment: str, meter: str) -> str:
    """What a meter of this installation is called in Stripe's events."""
    return f"inferlog_{environment}_{meter}"


def idempotency_key(kind: str, environment: str, name: str, attempt: int) -> str:
    """The key of the `attempt`-th creation of one thing (from 0); the same after a crash."""
    digest = hashlib.sha256(json.dumps([kind, environment, name, attempt]).encode()).hexdigest()
    return f"inferlog-{kind}-{digest[:32]}"


async def ensure_meters(gateway: StripeGateway, names: Iterable[str], *, environment: str) -> Ensured[Meter]:
    """Stripe's meter for each of ours, made where there is none. Raises CallFailed when Stripe cannot answer, and
    StripeUnusable for a meter that is deactivated or does not sum: a second one of its name would split the sums.

    1. List the meters.                 Die after: nothing happened.
    2. Create the missing ones.         Die after: the next list shows it; nothing is remembered on our side.
    """
    existing: dict[str, Meter] = {}
    for meter in await gateway.meters():
        if meter.event_name not in existing or meter.is_active:
            existing[meter.event_name] = meter
    found, refused = {}, {}
    for name in sorted(set(names)):
        at_stripe = existing.get(event_name(environment, name))
        if at_stripe is None:
            try:
                at_stripe = await _create_meter(gateway, name, environment)
            except CallFailed as failed:
                if not isinstance(failed.answer, Rejected):
                    raise
                refused[name] = failed.answer.reason
                continue
            _log.info("meter created at Stripe", extra={"fields": {"meter": name, "id": at_stripe.meter_id}})
        if not at_stripe.is_active:
            raise StripeUnusable(f"the meter {at_stripe.event_name} is deactivated at Stripe: reactivate it there")
        if not at_stripe.adds_up:
            raise StripeUnusable(
                f"the meter {at_stripe.event_name} at Stripe must sum every event by the payload keys "
                "'stripe_customer_id' and 'value'; deactivate and rename it, and a right one will be made"
            )
        found[name] = at_stripe
    return Ensured(found=found, refused=refused)


async def ensure_customers(
    gateway: StripeGateway, reports: Reports, intents: Iterable[OpenIntent], *, environment: str
) -> Ensured[str]:
    """Stripe's id of each intent's customer, made where there is none. Raises CallFailed when Stripe cannot answer; a
    customer that Stripe refuses to create is in `refused` and holds nobody else up.

    1. List Stripe's customers that carry our ids.   Die after: nothing happened.
    2. Create the missing one.                       Die after: the next list shows it.
    3. Write its id into our row.                    Die after: done.
    """
    names = {intent.key.customer_id: intent.customer_name for intent in intents}
    known = {i.key.customer_id: i.stripe_customer_id for i in intents if i.stripe_customer_id is not None}
    missing = sorted(set(names) - set(known))
    refused: dict[str, str] = {}
    if missing:
        at_stripe = await gateway.customers(environment)
        for customer_id in missing:
            if customer_id not in at_stripe:
                try:
                    at_stripe[customer_id] = await _create_customer(
                        gateway, customer_id, names[customer_id], environment
                    )
                except CallFailed as failed:
                    if not isinstance(failed.answer, Rejected):
                        raise
                    refused[customer_id] = failed.answer.reason
                    continue
            await reports.set_stripe_customer(customer_id, at_stripe[customer_id])
            known[customer_id] = at_stripe[customer_id]
    return Ensured(found=known, refused=refused)


async def _create_meter(gateway: StripeGateway, name: str, environment: str) -> Meter:
    async def create(key: str) -> Meter:
        return await gateway.create_meter(event_name(environment, name), idempotency_key=key)

    async def find() -> Meter | None:
        meters = [m for m in await gateway.meters() if m.event_name == event_name(environment, name)]
        return meters[0] if meters else None

    return await _once(create, find, kind="meter", environment=environment, name=name)


async def _create_customer(gateway: StripeGateway, customer_id: str, name: str, environment: str) -> str:
    async def create(key: str) -> str:
        return await gateway.create_customer(customer_id, name=name, environment=environment, idempotency_key=key)

    async def find() -> str | None:
        return (await gateway.customers(environment)).get(customer_id)

    return await _once(create, find, kind="customer", environment=environment, name=customer_id)


async def _once(
    create: Callable[[str], Awaitable[T]],
    find: Callable[[], Awaitable[T | None]],
    *,
    kind: str,
    environment: str,
    name: str,
) -> T:
    for attempt in range(_KEYS):
        try:
            return await create(idempotency_key(kind, environment, name, attempt))
        except CallFailed as failed:
            if not (isinstance(failed.answer, Retryable) and failed.answer.remembered):
                raise
            # Stripe keeps that answer for a day and would repeat it under this key. The thing may have been made all
            # the same, so look before asking under the next key.
            found = await find()
            if found is not None:
                return found
            refusal = failed
    raise refusal
