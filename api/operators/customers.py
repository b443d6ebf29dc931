"""Customers as rows: created, limited, capped; each change and the fact of it are one transaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime

from api.operators.rates import read_limits, write_limits
from infra.actor import COMMAND_STAMP, Author
from infra.outbox import add_facts
from infra.postgres import Connection, is_unique_violation, queries
from schemas.facts import CustomerChange, CustomerChanged, RateLimit, SpendCap
from schemas.ids import new_event_id
from schemas.topics import CUSTOMERS


class NameTaken(ValueError):
    """There is a customer of this name."""


class NoSuchCustomer(LookupError):
    """There is no customer with this id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Customer:
    """A customer as its rows describe it. Rates in requests and requests per second of all its keys together."""

    customer_id: str
    name: str
    requests_per_s: int
    burst: int
    created_at: datetime
    limits: tuple[RateLimit, ...] = ()
    max_concurrent: int | None = None
    spend_cap: SpendCap | None = None


async def create_customer(
    connection: Connection,
    *,
    customer_id: str,
    name: str,
    requests_per_s: int,
    burst: int,
    limits: tuple[RateLimit, ...] = (),
    max_concurrent: int | None = None,
    spend_cap: SpendCap | None = None,
    by: Author,
) -> Customer:
    """A customer from now on. Raises NameTaken."""
    async with connection.transaction():
        made = Customer(
            customer_id=customer_id,
            name=name,
            requests_per_s=requests_per_s,
            burst=burst,
            created_at=await _now(connection),
            limits=limits,
            max_concurrent=max_concurrent,
            spend_cap=spend_cap,
        )
        try:
            await connection.execute(
                queries("api.operators")["insert_customer"],
                customer_id,
                name,
                requests_per_s,
                burst,
                max_concurrent,
                *_cap(spend_cap),
                made.created_at,
            )
        except Exception as error:
            if is_unique_violation(error):
                raise NameTaken(f"there is a customer named '{name}' already") from error
            raise
        await write_limits(connection, customer_id, None, limits)
        await _tell(connection, made, CustomerChange.CREATED, at=made.created_at, by=by)
    return made


async def change_customer(
    connection: Connection,
    customer_id: str,
    kind: CustomerChange,
    change: Callable[[Customer], Customer],
    *,
    by: Author,
) -> tuple[Customer, bool]:
    """The customer after `change`, and whether that was another one; when it was not, there is no fact.

    Changes of one customer take turns, so `change` sees all that came before it. Raises NoSuchCustomer, and what
    `change` raises.
    """
    async with connection.transaction():
        found = await _locked(connection, customer_id)
        wanted = change(found)
        if wanted == found:
            return found, False
        now = await _now(connection)
        await connection.execute(
            queries("api.operators")["update_customer"],
            customer_id,
            wanted.requests_per_s,
            wanted.burst,
            wanted.max_concurrent,
            *_cap(wanted.spend_cap),
        )
        if wanted.limits != found.limits:
            await write_limits(connection, customer_id, None, wanted.limits)
        await _tell(connection, wanted, kind, at=now, by=by)
    return wanted, True


async def _locked(connection: Connection, customer_id: str) -> Customer:
    """The customer's row, which nobody else changes until the transaction ends."""
    row = await connection.fetchrow(queries("api.operators")["lock_customer"], customer_id)
    if row is None:
        raise NoSuchCustomer(f"there is no customer '{customer_id}'; see  inferlog customers list")
    described = dict(row)
    limits = await read_limits(connection, customer_id, None)
    return Customer(
        spend_cap=spend_cap_of(described.pop("cap_micros"), described.pop("cap_currency")), limits=limits, **described
    )


def spend_cap_of(amount_micros: int | None, currency: str | None) -> SpendCap | None:
    """Two columns as a value."""
    if amount_micros is None or currency is None:
        return None
    return SpendCap(amount_micros=amount_micros, currency=currency)


def _cap(cap: SpendCap | None) -> tuple[int | None, str | None]:
    return (None, None) if cap is None else (cap.amount_micros, cap.currency)


async def _now(connection: Connection) -> datetime:
    """The server's time, asked for under the lock, so that the times of a customer's facts follow their order."""
    now: datetime = await connection.fetchval(queries("api.operators")["now"])
    return now


async def _tell(
    connection: Connection, customer: Customer, change: CustomerChange, *, at: datetime, by: Author
) -> None:
    described = asdict(customer) | {"limits": customer.limits, "spend_cap": customer.spend_cap}
    del described["created_at"]
    fact = CustomerChanged(
        event_id=new_event_id(), occurred_at=at, change=change, actor=by.actor, reason=by.reason, **described
    )
    await add_facts(connection, CUSTOMERS, [(customer.customer_id, fact)], stamp=COMMAND_STAMP)
