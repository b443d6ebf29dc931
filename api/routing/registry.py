"""The model registry in Postgres, as admission reads it: versions, routes and aliases.

Every read is over within its deadline; an outage becomes the error of the port that asked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import orjson

from api.routing.catalogue import Alias, RegisteredVersion
from api.routing.versions import Changes, RegistryAway
from infra.postgres import DatabaseUnavailable, Pool, fetch_within, queries
from schemas.ids import EPOCH
from schemas.manifest import Manifest, ManifestError
from schemas.routes import Revision, Route

logger = logging.getLogger(__name__)

_WITHIN_S = 2.0


class PostgresRegistry:
    """Implements the port Registry."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._statement = queries("api.routing")["registry_changes"]
        # A version may be told twice, and making a manifest of its text is most of the work.
        self._known: dict[tuple[str, str], RegisteredVersion | None] = {}

    async def changes(self, since: int) -> Changes:
        """See Registry. A version whose manifest is not the one its hash names is left out, and said so once."""
        try:
            rows = await fetch_within(self._pool, _WITHIN_S, self._statement, str(since))
        except DatabaseUnavailable as error:
            raise RegistryAway(str(error)) from error
        found: dict[str, list[Any]] = {"horizon": [], "version": [], "revision": [], "alias": []}
        if since == 0:
            self._known = {}
        for row in rows:
            found[row["kind"]].append(orjson.loads(row["found"]))
        versions = [self._version(document) for document in found["version"]]
        return Changes(
            horizon=int(found["horizon"][0]),
            versions=[version for version in versions if version is not None],
            revisions=[_revision(document) for document in found["revision"]],
            aliases=[Alias(**document) for document in found["alias"]],
        )

    def _version(self, row: Mapping[str, Any]) -> RegisteredVersion | None:
        name = row["model"], row["version"]
        if name not in self._known:
            self._known[name] = _registered(row)
        return self._known[name]


def _registered(row: Mapping[str, Any]) -> RegisteredVersion | None:
    try:
        manifest = Manifest.from_bytes(row["manifest"].encode(), version=row["version"])
    except ManifestError as error:
        fields = {"model": row["model"], "version": row["version"], "why": error}
        logger.error("a registered version is unusable", extra={"fields": fields})
        return None
    return RegisteredVersion(
        model=row["model"],
        version=row["version"],
        manifest=manifest,
        artifact_uri=row["artifact_uri"],
        created_at=_moment(row["created_us"]),
    )


def _revision(row: Mapping[str, Any]) -> Revision:
    return Revision(
        model=row["model"],
        number=row["number"],
        route=Route(
            version=row["version"],
            pool=row["pool"],
            spread=row["spread"],
            price_id=row["price_id"],
            canaries=row["canaries"],
            pins=row["pins"],
        ),
        effective_at=_moment(row["effective_us"]),
        is_scheduled=row["change"] == "SCHEDULED",
        is_withdrawn=row["withdrawn"],
    )


def _moment(micros: int) -> datetime:
    return EPOCH + timedelta(microseconds=micros)
