from __future__ import annotations

from datetime import timedelta

import pytest

from api.admission.versions import Catalogue, Versions
from api.errors import BadInput, NotFound, Unavailable
from tests.fakes import CREATED, Clock, FakeRegistry, manifest, registered, routed

OLD, NEW = manifest(producer="old"), manifest(producer="new")


@pytest.fixture
def registry() -> FakeRegistry:
    registry = FakeRegistry()
    registry.all_versions = [registered("digits", OLD), registered("digits", NEW)]
    registry.all_routes = [routed("digits", NEW)]
    return registry


async def test_a_name_means_its_routed_version(registry: FakeRegistry) -> None:
    versions = Versions(registry)
    await versions.refresh()
    assert versions.resolve("digits").version == NEW.version
    assert versions.resolve("digits", OLD.version).version == OLD.version
    assert versions.resolve("digits", OLD.version[:8]).version == OLD.version
    assert versions.pools() == {"default"}


async def test_a_changed_route_is_seen_and_what_was_resolved_stays_pinned(registry: FakeRegistry) -> None:
    versions = Versions(registry)
    await versions.refresh()
    pinned = versions.resolve("digits")
    registry.all_routes = [routed("digits", OLD)]
    await versions.refresh()
    assert versions.resolve("digits").version == OLD.version
    assert pinned.version == NEW.version


@pytest.mark.parametrize("version", ["", "abc", OLD.version[:7], "../../etc", "G" * 64, OLD.version + "0", "0" * 64])
async def test_unknown_versions(registry: FakeRegistry, version: str) -> None:
    versions = Versions(registry)
    await versions.refresh()
    with pytest.raises(NotFound, match="version"):
        versions.resolve("digits", version)


async def test_unknown_and_unrouted_models(registry: FakeRegistry) -> None:
    registry.all_versions.append(registered("unrouted", OLD))
    versions = Versions(registry)
    await versions.refresh()
    for name in ("nope", "unrouted", "x" * 1000):
        with pytest.raises(NotFound) as refused:
            versions.resolve(name)
        assert len(refused.value.message) < 200


def test_a_prefix_that_fits_two_versions_is_refused() -> None:
    from dataclasses import replace

    one = registered("digits", OLD)
    twin = replace(one, version=one.version[:20] + "f" * 44)
    catalogue = Catalogue.of([routed("digits", OLD)], [one, twin])
    with pytest.raises(BadInput, match="fits 2 versions"):
        catalogue.resolve("digits", one.version[:8])
    assert catalogue.resolve("digits", one.version).version == one.version


async def test_before_the_first_read_nothing_is_called_unknown() -> None:
    versions = Versions(FakeRegistry())
    with pytest.raises(Unavailable, match="not loaded"):
        versions.resolve("digits")
    assert versions.trouble() is not None


async def test_memory_serves_while_the_registry_is_away(registry: FakeRegistry) -> None:
    clock = Clock()
    versions = Versions(registry, clock=clock)
    await versions.refresh()
    registry.away = True
    with pytest.raises(Exception, match="switched off"):
        await versions.refresh()
    assert versions.resolve("digits").version == NEW.version
    assert versions.trouble() is None
    clock.now_s += 10
    assert versions.trouble() is not None
    assert versions.resolve("digits").version == NEW.version


async def test_a_version_that_commits_late_is_still_found(registry: FakeRegistry) -> None:
    late = manifest(producer="late")
    versions = Versions(registry)
    await versions.refresh()
    registry.all_versions.append(registered("digits", late, created_at=CREATED - timedelta(minutes=4)))
    await versions.refresh()
    assert versions.resolve("digits", late.version).version == late.version
