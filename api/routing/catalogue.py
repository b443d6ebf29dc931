"""What every model offers: its versions, its aliases and the plan of its routes. In memory, and pure given the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from api.routing.references import found_version, unknown_model
from schemas.manifest import Manifest
from schemas.records import Task
from schemas.routes import Revision, holding


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One version of a model and how requests for it travel; `created_at` is when the model was first published."""

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
class RegisteredVersion:
    """A version as registered."""

    model: str
    version: str
    manifest: Manifest
    artifact_uri: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """Another name of a version; without a version it is none any more."""

    model: str
    name: str
    version: str | None


class Offer:
    """One model: `plan` are the revisions that say what holds now and later. Never changed, replaced as a whole."""

    __slots__ = ("_aliases", "_begun", "_created_at", "_deployments", "_model", "_names", "_versions", "plan")

    def __init__(
        self,
        model: str,
        versions: Mapping[str, RegisteredVersion],
        aliases: Mapping[str, str],
        plan: Sequence[Revision],
    ) -> None:
        self._model = model
        self._versions = dict(versions)
        self._names = sorted(versions)
        self._aliases = {name: version for name, version in aliases.items() if version in versions}
        self.plan = tuple(plan)
        self._created_at = min((v.created_at for v in versions.values()), default=None)
        # Of the revision that held when it was last asked; made once for each version.
        self._begun: Revision | None = None
        self._deployments: dict[str, Deployment] = {}

    def resolve(self, reference: str | None, *, customer_id: str | None, at: datetime) -> Deployment:
        """What the model means at a moment for a customer; None for nobody's: no canary and no pin then counts.

        Raises NotFound, also for a model that no route has begun for, and BadInput.
        """
        revision = self._held(at)
        if reference is not None:
            version = found_version(self._model, reference, self._names, self._aliases)
        elif customer_id is not None:
            version = revision.route.version_for(self._model, customer_id)
            if version not in self._versions:  # its manifest is not what its hash says, and the log has said so
                version = revision.route.version
        else:
            version = revision.route.version
        return self._deployment(revision, version)

    def listed(self, *, at: datetime) -> tuple[Deployment, ...]:
        """Every version, the routed one first; empty before a route has begun."""
        revision = holding(self.plan, at)
        if revision is None or (routed := revision.route.version) not in self._versions:
            return ()
        self._held(at)
        others = (version for version in self._names if version != routed)
        return tuple(self._deployment(revision, version) for version in (routed, *others))

    def _held(self, at: datetime) -> Revision:
        revision = holding(self.plan, at)
        if revision is None or revision.route.version not in self._versions:
            raise unknown_model(self._model)
        if revision is not self._begun:
            self._begun, self._deployments = revision, {}
        return revision

    def _deployment(self, revision: Revision, version: str) -> Deployment:
        if (made := self._deployments.get(version)) is not None:
            return made
        registered, route = self._versions[version], revision.route
        made = Deployment(
            model=self._model,
            version=version,
            manifest=registered.manifest,
            artifact_uri=registered.artifact_uri,
            pool=route.pool,
            spread=route.spread,
            price_id=route.price_id,
            created_at=self._created_at or registered.created_at,
        )
        self._deployments[version] = made
        return made
