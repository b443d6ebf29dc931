"""Keys and their customers in Postgres, as admission reads them. Every read is over within its deadline."""

from __future__ import annotations

import json
from collections.abc import Sequence

from api.access.key_feed import Changes
from api.access.key_record import CustomerRecord, KeyRecord, Terms, alike, base_rate, rate, same_customer
from api.access.keys import KeySourceAway
from api.access.revocations import RevokedKey
from api.admission.caller import Cap
from infra.postgres import DatabaseUnavailable, Pool, Record, fetch_within, queries

_KEY_WITHIN_S = 1.0
_CHANGES_WITHIN_S = 1.0
_REVOKED_WITHIN_S = 5.0


class PostgresKeys:
    """Implements the ports KeySource, ChangeSource and RevokedSource. Not for a replica: it lags behind, and on one a
    snapshot does not tell which transactions were still open."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._queries = queries("api.access")

    async def find(self, key_id: str) -> KeyRecord | None:
        """See KeySource."""
        rows = await self._fetch("key", _KEY_WITHIN_S, key_id)
        return key_record(rows[0]) if rows else None

    async def changes(self, since: str | None) -> Changes:
        """See ChangeSource."""
        (row,) = await self._fetch("key_changes", _CHANGES_WITHIN_S, since)
        keys = json.loads(row["keys"])
        return Changes(
            snapshot=row["snapshot"],
            server=row["server"],
            key_ids=[key_id for key_id, _, _ in keys],
            customer_ids=row["customers"],
            revoked=[RevokedKey(customer_id, key_id) for key_id, customer_id, is_revoked in keys if is_revoked],
        )

    async def revoked(self, after: str, *, at_most: int) -> Sequence[RevokedKey]:
        """See RevokedSource."""
        rows = await self._fetch("revoked_keys", _REVOKED_WITHIN_S, after, at_most)
        return [RevokedKey(row["customer_id"], row["key_id"]) for row in rows]

    async def _fetch(self, name: str, within_s: float, *args: object) -> list[Record]:
        try:
            return await fetch_within(self._pool, within_s, self._queries[name], *args)
        except DatabaseUnavailable as error:
            raise KeySourceAway(str(error)) from error


def key_record(row: Record) -> KeyRecord:
    """A row of the statement `key` as a value."""
    own = [base_rate(requests_per_s=row["requests_per_s"], burst=row["burst"])]
    shared = [base_rate(requests_per_s=row["customer_requests_per_s"], burst=row["customer_burst"])]
    for is_own, unit, model, amount, window_s, burst in json.loads(row["limits"]):
        found = rate(amount=amount, window_s=window_s, burst=burst, unit=unit, model=model)
        (own if is_own else shared).append(found)
    cap = None
    if row["cap_micros"] is not None:
        cap = Cap(amount_micros=row["cap_micros"], currency=row["cap_currency"])
    customer = CustomerRecord(
        customer_id=row["customer_id"],
        terms=alike(Terms(rates=tuple(shared), max_concurrent=row["customer_max_concurrent"])),
        cap=cap,
    )
    terms = Terms(
        rates=tuple(own),
        max_concurrent=row["max_concurrent"],
        models=frozenset(row["models"]),
        operations=frozenset(row["operations"]),
    )
    return KeyRecord(
        key_id=row["key_id"],
        customer=same_customer(customer),
        terms=alike(terms),
        secret_sha256=row["secret_sha256"],
        expires_at=row["expires_at"],
        revoked=row["revoked_at"] is not None,
    )
