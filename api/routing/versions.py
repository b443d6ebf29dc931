"""Name -> route -> version: what a call's model name means now, answered from memory.

A background loop reads what was changed twice a second; while Postgres is away the last known routes go on serving, and
a switch that was scheduled still comes at its time. What is resolved here is pinned: the version travels in the
request's record, and a later change of route does not touch it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Protocol

from api.errors import Unavailable
from api.routing.catalogue import Alias, Deployment, Offer, RegisteredVersion
from api.routing.references import unknown_model
from schemas.routes import Revision, still_needed

logger = logging.getLogger(__name__)

REFRESH_S = 0.5
#: How much the clocks of gateways and Postgres may differ before a gateway lacks the revision that holds by its own.
CLOCK_SLACK = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What was changed in the registry, as it is now; `horizon` is where to ask from next time."""

    horizon: int
    versions: Sequence[RegisteredVersion] = ()
    revisions: Sequence[Revision] = ()
    aliases: Sequence[Alias] = ()


class RegistryAway(RuntimeError):
    """The model registry did not answer."""


class Registry(Protocol):
    """Where versions, routes and aliases are stored."""

    async def changes(self, since: int) -> Changes:
        """Everything that may have been changed since the horizon `since`, 0 for all there is. Raises RegistryAway."""


class Versions:
    """The offers in memory, kept up to date by `run`."""

    def __init__(
        self,
        registry: Registry,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._now = now
        self._models: dict[str, _Model] = {}
        self._offers: dict[str, Offer] = {}
        self._horizon = 0
        self._refreshed_s = float("-inf")
        self._why = "not asked yet"

    def resolve(self, model: str, reference: str | None = None, *, customer_id: str | None = None) -> Deployment:
        """What a model means now for a customer, or the version that `reference` names: an alias, or hex digits.

        Raises NotFound; BadInput when the digits fit several; Unavailable before the first successful read.
        """
        self._require_loaded()
        offer = self._offers.get(model)
        if offer is None:
            raise unknown_model(model)
        return offer.resolve(reference, customer_id=customer_id, at=self._now())

    def listed(self) -> list[Sequence[Deployment]]:
        """Every routed model's versions, the routed one first. Raises Unavailable before the first successful read."""
        self._require_loaded()
        at = self._now()
        return [known for offer in self._offers.values() if (known := offer.listed(at=at))]

    def pools(self) -> frozenset[str]:
        """Pools that any model is routed to, or will be."""
        return frozenset(revision.route.pool for offer in self._offers.values() for revision in offer.plan)

    def trouble(self, *, within_s: float = 3.0) -> str | None:
        """Why the routes are not current, None when they were read within `within_s`."""
        return None if self._clock() - self._refreshed_s <= within_s else self._why

    def _require_loaded(self) -> None:
        if self._horizon == 0:
            raise Unavailable(f"routes are not loaded yet: {self._why}", code="registry_away")

    async def refresh(self) -> None:
        """Read what was changed. Raises RegistryAway."""
        changes = await self._registry.changes(self._horizon)
        if changes.horizon < self._horizon:
            # Horizons only grow, so this is another database: perhaps yesterday's, restored.
            logger.warning("the model registry is another one than before; all of it is read again")
            changes = await self._registry.changes(0)
            self._models, self._offers = {}, {}
        self._learn(changes)
        self._horizon = changes.horizon
        self._refreshed_s = self._clock()

    def _learn(self, changes: Changes) -> None:
        """Take over what is new; only models of which something is are made anew."""
        news = [self._model(v.model).learn_version(v) for v in changes.versions]
        news += [self._model(a.model).learn_alias(a) for a in changes.aliases]
        news += [self._model(r.model).learn_revision(r) for r in changes.revisions]
        changed: Iterable[_Model] = {m.name: m for m in news if m is not None}.values()
        at = self._now() - CLOCK_SLACK
        for model in changed:
            self._offers[model.name] = model.offer(at)

    def _model(self, name: str) -> _Model:
        return self._models.setdefault(name, _Model(name))

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


class _Model:
    """What is known of one model. `learn_…` return it when it was news, None when it was known."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._versions: dict[str, RegisteredVersion] = {}
        self._aliases: dict[str, str] = {}
        self._revisions: dict[int, Revision] = {}

    def learn_version(self, version: RegisteredVersion) -> _Model | None:
        if version.version in self._versions:  # never changed once it is there
            return None
        self._versions[version.version] = version
        return self

    def learn_alias(self, alias: Alias) -> _Model | None:
        if self._aliases.get(alias.name) == alias.version:
            return None
        if alias.version is None:
            del self._aliases[alias.name]
        else:
            self._aliases[alias.name] = alias.version
        return self

    def learn_revision(self, revision: Revision) -> _Model | None:
        if self._revisions.get(revision.number) == revision:
            return None
        self._revisions[revision.number] = revision
        return self

    def offer(self, at: datetime) -> Offer:
        """As of now. Revisions that hold neither at `at` nor later are forgotten."""
        needed = still_needed(list(self._revisions.values()), at)
        self._revisions = {revision.number: revision for revision in needed}
        return Offer(self.name, self._versions, self._aliases, needed)
