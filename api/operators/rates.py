"""Limits beside a key's or a customer's rate, as rows of `rate_limits`: one of each unit, and of a customer one of each
unit and model. They are read and written under the lock of their key or customer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from infra.postgres import Connection, Record, queries
from schemas.facts import RateLimit


class NoSuchLimit(LookupError):
    """There is no limit of this unit and model."""


#: A unit and a model, which tell a key's or a customer's limits apart.
Place = tuple[str, str | None]


def place(limit: RateLimit) -> Place:
    """What the limit is of."""
    return limit.unit, limit.model


def in_order(limits: Iterable[RateLimit]) -> tuple[RateLimit, ...]:
    """As they are read and told: by unit, and the one of every model before those of one."""
    return tuple(sorted(limits, key=lambda limit: (limit.unit, limit.model or "")))


def changed(limits: Sequence[RateLimit], *, put: Sequence[RateLimit], drop: Collection[Place]) -> tuple[RateLimit, ...]:
    """These limits without some, and with others put in or in their place.

    Raises NoSuchLimit for one to drop that is not there.
    """
    by_place = {place(limit): limit for limit in limits}
    for gone in drop:
        if by_place.pop(gone, None) is None:
            unit, model = gone
            raise NoSuchLimit(f"there is no limit of {unit}{'' if model is None else f' of model {model}'}")
    by_place.update((place(limit), limit) for limit in put)
    return in_order(by_place.values())


def rate_limit(row: Record) -> RateLimit:
    """A row as a value."""
    return RateLimit(
        unit=row["unit"], model=row["model"], amount=row["amount"], window_s=row["window_s"], burst=row["burst"]
    )


async def read_limits(connection: Connection, customer_id: str, key_id: str | None) -> tuple[RateLimit, ...]:
    """The limits of a key, or of a customer when `key_id` is None."""
    rows = await connection.fetch(queries("api.operators")["limits"], customer_id, key_id)
    return in_order(rate_limit(row) for row in rows)


async def write_limits(
    connection: Connection, customer_id: str, key_id: str | None, limits: Sequence[RateLimit]
) -> None:
    """Let these be the limits of a key, or of a customer; in an open transaction."""
    sql = queries("api.operators")
    await connection.execute(sql["delete_limits"], customer_id, key_id)
    await connection.execute(
        sql["insert_limits"],
        customer_id,
        key_id,
        [limit.unit for limit in limits],
        [limit.model for limit in limits],
        [limit.amount for limit in limits],
        [limit.window_s for limit in limits],
        [limit.burst for limit in limits],
    )


async def all_limits(connection: Connection, customer_id: str | None) -> dict[tuple[str, str | None], list[RateLimit]]:
    """Every limit, or those of one customer and its keys, by customer and key; None stands for the customer itself."""
    found: dict[tuple[str, str | None], list[RateLimit]] = {}
    for row in await connection.fetch(queries("api.operators")["all_limits"], customer_id):
        found.setdefault((row["customer_id"], row["key_id"]), []).append(rate_limit(row))
    return found
