"""The model registry in Postgres, as admission reads it: keys, routes and versions.

Every read is over within its deadline; an outage becomes the error of the port that asked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime

from api.admission.buckets import limit
from api.admission.caller import Caller
from api.admission.keys import KeyRecord, KeySourceAway
from api.admission.versions import RegisteredVersion, RegistryAway, Route
from infra.postgres import DatabaseUnavailable, Pool, Record, fetch_within, queries
from schemas.manifest import Manifest, ManifestError

logger = logging.getLogger(__name__)

_KEY_WITHIN_S = 1.0
_ROUTES_WITHIN_S = 2.0


class PostgresKeys:
    """Implements the port KeySource."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._find = queries("api")["key"]

    async def find(self, key_id: str) -> KeyRecord | None:
        """See KeySource."""
        try:
            rows = await fetch_within(self._pool, _KEY_WITHIN_S, self._find, key_id)
        except DatabaseUnavailable as error:
            raise KeySourceAway(str(error)) from error
        return key_record(rows[0]) if rows else None


def key_record(row: Record) -> KeyRecord:
    """A row of the statement `key` as a value."""
    customer_id, key_id = row["customer_id"], row["key_id"]
    limits = (
        limit(f"key:{key_id}", requests_per_s=row["requests_per_s"], burst=row["burst"]),
        limit(f"customer:{customer_id}", requests_per_s=row["customer_requests_per_s"], burst=row["customer_burst"]),
    )
    return KeyRecord(
        caller=Caller(customer_id=customer_id, key_id=key_id, limits=limits),
        secret_sha256=row["secret_sha256"],
        expires_at=row["expires_at"],
        revoked=row["revoked_at"] is not None,
    )


class PostgresRegistry:
    """Implements the port Registry."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._queries = queries("api")
        self._unusable: set[str] = set()

    async def routes(self) -> Sequence[Route]:
        """See Registry."""
        return [
            Route(
                model=row["model"],
                version=row["version"],
                pool=row["pool"],
                spread=row["spread"],
                price_id=row["price_id"],
                created_at=row["created_at"],
            )
            for row in await self._fetch("routes")
        ]

    async def new_versions(self, since: datetime, known: Sequence[str]) -> Sequence[RegisteredVersion]:
        """See Registry. A version whose manifest is not the one its hash names is left out, and said so."""
        found = []
        for row in await self._fetch("new_versions", since, list(known)):
            try:
                manifest = Manifest.from_bytes(row["manifest"].encode(), version=row["version"])
            except ManifestError as error:
                if row["version"] not in self._unusable:
                    fields = {"model": row["model"], "version": row["version"], "why": error}
                    logger.error("a registered version is unusable", extra={"fields": fields})
                self._unusable.add(row["version"])
                continue
            found.append(
                RegisteredVersion(
                    model=row["model"],
                    version=row["version"],
                    manifest=manifest,
                    artifact_uri=row["artifact_uri"],
                    created_at=row["created_at"],
                )
            )
        return found

    async def _fetch(self, name: str, *args: object) -> list[Record]:
        try:
            return await fetch_within(self._pool, _ROUTES_WITHIN_S, self._queries[name], *args)
        except DatabaseUnavailable as error:
            raise RegistryAway(str(error)) from error
