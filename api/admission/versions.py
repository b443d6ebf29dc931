"""Name -> route -> version: what a call's model name means now, answered from memory.

A background loop re-reads the routes twice a second; while Postgres is away the last known ones go on serving. What is
resolved here is pinned: the version travels in the request's record, and a later change of route does not touch it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from api.errors import BadInput, NotFound, Unavailable
from schemas.ids import EPOCH
from schemas.manifest import Manifest
from schemas.records import Task

logger = logging.getLogger(__name__)

REFRESH_S = 0.5
# A registration becomes visible when its transaction commits, later than the time it carries.
_COMMIT_SLACK = timedelta(minutes=5)
_PREFIX = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One version of a model and how requests for it travel."""

    model: str
    version: str
    manifest: Manifest
    artifact_uri: str
    pool: str
    spread: int
    price_id: str
    created_at: datetime

    @property
    def task(self) -> Task:
        """How inputs are read."""
        return self.manifest.task


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Which version a model's name means, and where its requests go."""

    model: str
    version: str
    pool: str
    spread: int
    price_id: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredVersion:
    """A version as registered."""

    model: str
    version: str
    manifest: Manifest
    artifact_uri: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Everything routable at one moment: per model its deployments, the routed one first."""

    deployments: Mapping[str, Sequence[Deployment]] = field(default_factory=dict)

    @staticmethod
    def of(routes: Iterable[Route], versions: Iterable[RegisteredVersion]) -> Catalogue:
        """Join routes and versions. A model without a route has no pool, so it is not in the catalogue."""
        by_model: dict[str, list[RegisteredVersion]] = {}
        for v in versions:
            by_model.setdefault(v.model, []).append(v)
        found = {}
        for route in routes:
            known = sorted(by_model.get(route.model, ()), key=lambda v: (v.version != route.version, v.version))
            if known and known[0].version == route.version:
                found[route.model] = tuple(
                    Deployment(
                        model=route.model,
                        version=v.version,
                        manifest=v.manifest,
                        artifact_uri=v.artifact_uri,
                        pool=route.pool,
                        spread=route.spread,
                        price_id=route.price_id,
                        created_at=route.created_at,
                    )
                    for v in known
                )
        return Catalogue(deployments=found)

    def resolve(self, model: str, version: str | None) -> Deployment:
        """The routed version, or the one that `version` (64 hex digits, or a unique start of at least 8) names.

        Raises NotFound; BadInput when `version` fits several.
        """
        known = self.deployments.get(model)
        if known is None:
            raise NotFound(f"unknown model '{_shown(model)}'", code="model_not_found", param="model")
        if version is None:
            return known[0]
        if not _PREFIX.fullmatch(version):
            raise NotFound(
                f"unknown version '{_shown(version)}' of model '{model}'; a version is 64 hex digits or their first 8",
                code="version_not_found",
                param="version",
            )
        fitting = [d for d in known if d.version.startswith(version)]
        if not fitting:
            raise NotFound(f"unknown version '{version}' of model '{model}'", code="version_not_found", param="version")
        if len(fitting) > 1:
            raise BadInput(
                f"version '{version}' of model '{model}' fits {len(fitting)} versions; give more digits",
                code="version_ambiguous",
                param="version",
            )
        return fitting[0]


def _shown(name: str) -> str:
    return name if len(name) <= 100 else name[:100] + "…"


class RegistryAway(RuntimeError):
    """The model registry did not answer."""


class Registry(Protocol):
    """Where routes and versions are stored."""

    async def routes(self) -> Sequence[Route]:
        """All routes. Raises RegistryAway."""

    async def new_versions(self, since: datetime, known: Sequence[str]) -> Sequence[RegisteredVersion]:
        """Versions registered from `since` on, without those named `model/version` in `known`. Raises RegistryAway."""


class Versions:
    """The catalogue in memory, kept up to date by `run`."""

    def __init__(self, registry: Registry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._catalogue: Catalogue | None = None
        self._versions: dict[str, RegisteredVersion] = {}
        self._routes: Sequence[Route] = ()
        self._newest = EPOCH
        self._refreshed_s = float("-inf")
        self._why = "not asked yet"

    @property
    def catalogue(self) -> Catalogue:
        """What is routable now. Raises Unavailable before the first successful read."""
        if self._catalogue is None:
            raise Unavailable(f"routes are not loaded yet: {self._why}", code="registry_away")
        return self._catalogue

    def resolve(self, model: str, version: str | None = None, *, customer_id: str | None = None) -> Deployment:
        """See Catalogue.resolve; raises Unavailable before the first successful read."""
        del customer_id
        return self.catalogue.resolve(model, version)

    def pools(self) -> frozenset[str]:
        """Pools that any model is routed to."""
        if self._catalogue is None:
            return frozenset()
        return frozenset(known[0].pool for known in self._catalogue.deployments.values())

    def trouble(self, *, within_s: float = 3.0) -> str | None:
        """Why the catalogue is not current, None when it was read within `within_s`."""
        return None if self._clock() - self._refreshed_s <= within_s else self._why

    async def refresh(self) -> None:
        """Read what is new. Raises RegistryAway."""
        since = self._newest - _COMMIT_SLACK if self._newest > EPOCH else EPOCH
        recent = [name for name, v in self._versions.items() if v.created_at >= since]
        new = await self._registry.new_versions(since, recent)
        for v in new:
            self._versions[f"{v.model}/{v.version}"] = v
            self._newest = max(self._newest, v.created_at)
        routes = await self._registry.routes()
        if self._catalogue is None or new or routes != self._routes:
            self._catalogue = Catalogue.of(routes, self._versions.values())
        self._routes = routes
        self._refreshed_s = self._clock()

    async def run(self) -> None:
        """Refresh for ever; says once when the registry goes away and once when it is back."""
        away = False
        while True:
            try:
                await self.refresh()
            except RegistryAway as error:
                self._why = str(error)
                if not away:
                    logger.warning("model registry is away, serving from memory", extra={"fields": {"why": error}})
                away = True
            else:
                if away:
                    logger.info("model registry is back")
                away = False
            await asyncio.sleep(REFRESH_S)
