from __future__ import annotations

import logging
from datetime import datetime, timedelta

import pytest

from api.errors import BadInput, NotFound, Unavailable
from api.routing.catalogue import Alias
from api.routing.references import split_name
from api.routing.versions import Versions
from schemas.routes import part_of
from tests.fakes import CREATED, Clock, FakeRegistry, manifest, registered, routed

OLD, NEW, THIRD = manifest(producer="old"), manifest(producer="new"), manifest(producer="third")
HOUR = timedelta(hours=1)


class WallClock:
    """A clock of the day that a test moves."""

    def __init__(self) -> None:
        self.now = CREATED + timedelta(days=1)

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def registry() -> FakeRegistry:
    registry = FakeRegistry()
    registry.all_versions = [registered("digits", OLD), registered("digits", NEW), registered("digits", THIRD)]
    registry.all_routes = [routed("digits", NEW)]
    return registry


@pytest.fixture
def day() -> WallClock:
    return WallClock()


@pytest.fixture
async def versions(registry: FakeRegistry, day: WallClock) -> Versions:
    made = Versions(registry, now=day)
    await made.refresh()
    return made


async def test_a_name_means_its_routed_version(versions: Versions) -> None:
    assert versions.resolve("digits").version == NEW.version
    for named in (OLD.version, OLD.version[:8], f"sha256:{OLD.version}", f"sha256:{OLD.version[:9]}"):
        assert versions.resolve("digits", named).version == OLD.version
    with pytest.raises(NotFound, match="64 hex digits or the first 8 or more"):
        versions.resolve("digits", "0" * 7)
    assert versions.pools() == {"default"}
    (listed,) = versions.listed()
    assert [d.version for d in listed] == [NEW.version, *sorted((OLD.version, THIRD.version))]


async def test_a_changed_route_is_seen_and_what_was_resolved_stays_pinned(
    registry: FakeRegistry, versions: Versions
) -> None:
    pinned = versions.resolve("digits")
    registry.all_routes = [routed("digits", OLD)]
    await versions.refresh()
    assert versions.resolve("digits").version == OLD.version
    assert pinned.version == NEW.version


@pytest.mark.parametrize(
    "version",
    ["", "abc", OLD.version[:7], "../../etc", "G" * 64, OLD.version + "0", "0" * 64, "sha256:", "sha256:stable", "@"],
)
async def test_unknown_versions(versions: Versions, version: str) -> None:
    with pytest.raises(NotFound, match="version"):
        versions.resolve("digits", version)


async def test_unknown_and_unrouted_models(registry: FakeRegistry, versions: Versions) -> None:
    registry.all_versions.append(registered("unrouted", OLD))
    await versions.refresh()
    for name in ("nope", "unrouted", "x" * 1000):
        with pytest.raises(NotFound) as refused:
            versions.resolve(name)
        assert len(refused.value.message) < 200
    assert [known[0].model for known in versions.listed()] == ["digits"]


async def test_a_start_that_fits_two_versions_is_refused(registry: FakeRegistry, versions: Versions) -> None:
    from dataclasses import replace

    one = registered("digits", OLD)
    registry.all_versions.append(replace(one, version=one.version[:20] + "f" * 44))
    await versions.refresh()
    with pytest.raises(BadInput, match="fits 2 versions"):
        versions.resolve("digits", one.version[:8])
    assert versions.resolve("digits", one.version).version == one.version


async def test_before_the_first_read_nothing_is_called_unknown() -> None:
    versions = Versions(FakeRegistry())
    with pytest.raises(Unavailable, match="not loaded"):
        versions.resolve("digits")
    assert versions.trouble() is not None and versions.pools() == frozenset()


async def test_memory_serves_while_the_registry_is_away_and_scheduled_switches_come(
    registry: FakeRegistry, day: WallClock
) -> None:
    clock = Clock()
    at = day.now + HOUR
    registry.all_routes.append(routed("digits", OLD, at=at, pool="gpu"))
    versions = Versions(registry, clock=clock, now=day)
    await versions.refresh()
    assert versions.pools() == {"default", "gpu"}, "the queue of a later pool is watched before it is needed"
    registry.away = True
    with pytest.raises(Exception, match="switched off"):
        await versions.refresh()
    assert versions.trouble() is None
    clock.now_s += 10
    assert versions.trouble() is not None
    before = versions.resolve("digits")
    day.now = at - timedelta(microseconds=1)
    assert versions.resolve("digits") is before and before.version == NEW.version
    day.now = at
    assert (versions.resolve("digits").version, versions.resolve("digits").pool) == (OLD.version, "gpu")
    assert versions.listed()[0][0].version == OLD.version


async def test_a_route_made_at_once_holds_where_the_clock_is_behind(
    registry: FakeRegistry, day: WallClock, versions: Versions
) -> None:
    day.now = CREATED - HOUR
    assert versions.resolve("digits").version == NEW.version
    registry.all_routes.append(routed("digits", OLD, at=CREATED))
    await versions.refresh()
    assert versions.resolve("digits").version == NEW.version, "but a switch for later waits for this clock"


async def test_what_a_route_was_long_ago_is_forgotten(registry: FakeRegistry, versions: Versions) -> None:
    before = versions.resolve("digits")
    for _ in range(50):
        registry.all_routes = [routed("digits", OLD), routed("digits", NEW)]
        await versions.refresh()
    assert versions.resolve("digits") == before
    assert len(versions._models["digits"]._revisions) == 1


async def test_nothing_is_made_anew_when_nothing_was_changed(
    registry: FakeRegistry, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.all_versions.append(registered("texts", OLD))
    registry.all_routes.append(routed("texts", OLD))
    await versions.refresh()
    offers = dict(versions._offers)
    for _ in range(3):
        await versions.refresh()
    assert all(versions._offers[name] is offer for name, offer in offers.items())
    registry.all_aliases.append(Alias(model="texts", name="stable", version=OLD.version))
    await versions.refresh()
    assert [name for name, offer in offers.items() if versions._offers[name] is not offer] == ["texts"]


async def test_aliases(registry: FakeRegistry, versions: Versions) -> None:
    with pytest.raises(NotFound, match="it has none") as refused:
        versions.resolve("digits", "stable")
    assert refused.value.code == "alias_not_found"
    registry.all_aliases = [Alias(model="digits", name=name, version=OLD.version) for name in ("stable", "latest")]
    await versions.refresh()
    assert versions.resolve("digits", "stable").version == OLD.version
    with pytest.raises(NotFound, match="no version with the alias 'stabel'; its aliases: latest, stable"):
        versions.resolve("digits", "stabel")
    with pytest.raises(NotFound, match="or an alias: latest, stable"):
        versions.resolve("digits", "abc")
    registry.all_aliases = [
        Alias(model="digits", name="stable", version=THIRD.version),
        Alias(model="digits", name="latest", version=None),
    ]
    await versions.refresh()
    assert versions.resolve("digits", "stable").version == THIRD.version
    with pytest.raises(NotFound, match="its aliases: stable"):
        versions.resolve("digits", "latest")


async def test_canaries_and_pins_are_for_callers_and_a_named_version_wins(
    registry: FakeRegistry, versions: Versions
) -> None:
    parts = range(30)
    registry.all_routes = [
        routed("digits", NEW, canaries={OLD.version: parts}, pins={"cust_7": THIRD.version, "cust_8": NEW.version})
    ]
    await versions.refresh()
    seen: dict[str, int] = {}
    for n in range(200):
        customer = f"cust_{n}"
        expected = OLD.version if part_of("digits", customer) in parts else NEW.version
        expected = {"cust_7": THIRD.version, "cust_8": NEW.version}.get(customer, expected)
        assert versions.resolve("digits", customer_id=customer).version == expected
        assert versions.resolve("digits", THIRD.version[:10], customer_id=customer).version == THIRD.version
        seen[expected] = seen.get(expected, 0) + 1
    assert set(seen) == {OLD.version, NEW.version, THIRD.version}
    assert versions.resolve("digits").version == NEW.version, "nobody in particular"


async def test_a_canary_that_cannot_be_read_leaves_its_customers_to_the_route(
    registry: FakeRegistry, versions: Versions
) -> None:
    registry.all_routes = [routed("digits", NEW, canaries={"ab" * 32: range(100)})]
    await versions.refresh()
    assert versions.resolve("digits", customer_id="cust_1").version == NEW.version


async def test_another_database_behind_the_same_name_is_read_from_its_beginning(
    registry: FakeRegistry, versions: Versions, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []
    changes = registry.changes

    async def noted(since: int) -> object:
        asked.append(since)
        return await changes(since)

    registry.changes = noted  # type: ignore[method-assign,assignment]
    registry.horizon, registry.all_routes = 3, [routed("digits", OLD)]
    registry.all_versions = registry.all_versions[:1]
    with caplog.at_level(logging.WARNING):
        await versions.refresh()
    assert asked == [7, 0] and "another one than before" in caplog.text
    assert versions.resolve("digits").version == OLD.version
    with pytest.raises(NotFound):
        versions.resolve("digits", NEW.version)
    await versions.refresh()
    assert asked == [7, 0, 3]


@pytest.mark.parametrize(
    ("name", "version", "found"),
    [
        ("minilm", None, ("minilm", None)),
        ("minilm", "abcd1234", ("minilm", "abcd1234")),
        ("minilm@sha256:abcd1234", None, ("minilm", "sha256:abcd1234")),
        ("minilm@stable", None, ("minilm", "stable")),
        ("minilm@", None, ("minilm", "")),
        ("@", None, ("", "")),
        ("a@b@c", None, ("a", "b@c")),
    ],
)
def test_a_model_may_be_named_with_its_version(name: str, version: str | None, found: tuple[str, str | None]) -> None:
    assert split_name(name, version) == found


def test_a_version_is_named_once() -> None:
    with pytest.raises(BadInput, match="names a version already"):
        split_name("minilm@stable", "abcd1234")
