"""Routes as a pure function of revisions and time: canaries that stick, plans that come, rollbacks that go back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from schemas.routes import (
    PARTS,
    Revision,
    Route,
    before,
    holding,
    is_alias,
    part_of,
    parted,
    planned,
    still_needed,
)

VERSIONS = [f"{n:x}" * 64 for n in range(1, 9)]
NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
CUSTOMERS = [f"cust_{n:05d}" for n in range(20_000)]

customers = st.text(min_size=1, max_size=40)


@st.composite
def percents(draw: st.DrawFn) -> dict[str, int]:
    found: dict[str, int] = {}
    for version in draw(st.lists(st.sampled_from(VERSIONS[1:]), unique=True, max_size=5)):
        left = PARTS - sum(found.values())
        if left > 0:
            found[version] = draw(st.integers(1, left))
    return found


def route(version: str = VERSIONS[0], canaries: Mapping[str, tuple[int, ...]] | None = None, **more: str) -> Route:
    return Route(version=version, pool=more.get("pool", "p"), spread=2, price_id="x", canaries=canaries or {})


@given(st.lists(percents(), min_size=1, max_size=6))
def test_a_canary_has_its_percent_keeps_its_customers_and_takes_from_the_route_alone(
    steps: list[dict[str, int]],
) -> None:
    now: dict[str, tuple[int, ...]] = {}
    for wanted in steps:
        after = parted(now, wanted)
        assert {version: len(parts) for version, parts in after.items()} == wanted
        flat = [part for parts in after.values() for part in parts]
        assert len(set(flat)) == len(flat) and set(flat) <= set(range(PARTS))
        for version, parts in after.items():
            had = set(now.get(version, ()))
            if len(parts) >= len(had):
                assert had <= set(parts), "one that grows loses nobody"
            else:
                assert set(parts) < had, "one that shrinks takes nobody"
            for other, others in now.items():
                if other != version and len(after.get(other, ())) >= len(others):
                    assert not set(parts) & set(others), "no canary takes from one that does not let go"
        assert parted(after, wanted) == after
        now = after


@given(percents(), customers, st.text(min_size=1, max_size=20))
def test_the_same_customer_gets_the_same_version_and_a_pin_wins(
    wanted: dict[str, int], customer: str, model: str
) -> None:
    found = route(canaries=parted({}, wanted)).version_for(model, customer)
    again = Route(version=VERSIONS[0], pool="q", spread=5, price_id="y", canaries=parted({}, wanted))
    assert again.version_for(model, customer) == found
    assert found in again.versions
    pinned = Route(version=VERSIONS[0], pool="q", spread=5, price_id="y", canaries=again.canaries, pins={customer: "p"})
    assert pinned.version_for(model, customer) == "p"


def test_raising_a_percentage_only_adds_customers() -> None:
    """One canary from 1 to 100 %, beside another that stays: of 2,000 customers those who move all move to it."""
    now, some = {VERSIONS[2]: tuple(range(90, 93))}, CUSTOMERS[:2000]
    answered = {c: route(canaries=now).version_for("digits", c) for c in some}
    for percent in range(1, 98):
        now = parted(now, {VERSIONS[1]: percent, VERSIONS[2]: 3})
        after = {c: route(canaries=now).version_for("digits", c) for c in some}
        moved = {(answered[c], after[c]) for c in some if answered[c] != after[c]}
        assert moved == {(VERSIONS[0], VERSIONS[1])}
        answered = after
    assert VERSIONS[0] not in answered.values()


def test_shares_are_what_chance_allows_and_models_are_independent() -> None:
    """A fixed set of ids, so nothing here is random: 5 deviations would be one in millions for a good hash."""

    def few(count: int, share: float) -> bool:
        expected = len(CUSTOMERS) * share
        return abs(count - expected) <= 5 * math.sqrt(expected * (1 - share))

    parts = {model: [part_of(model, c) for c in CUSTOMERS] for model in ("digits", "minilm")}
    for found in parts.values():
        assert all(few(found.count(part), 0.01) for part in range(PARTS))
        assert all(few(sum(p < percent for p in found), percent / 100) for percent in range(5, 100, 5))
    both = sum(a < 20 and b < 20 for a, b in zip(parts["digits"], parts["minilm"], strict=True))
    assert few(both, 0.04)


def test_parts_are_the_same_for_ever() -> None:
    """A new way to hash would move customers between versions at an upgrade."""
    assert [part_of("digits", f"cust_{n}") for n in range(8)] == [52, 17, 98, 64, 25, 12, 35, 88]


@st.composite
def histories(draw: st.DrawFn) -> list[Revision]:
    """Revisions as commands make them: one after the other, some for later, some of those taken back."""
    at, found = NOW - timedelta(days=1), list[Revision]()
    for number in range(1, draw(st.integers(1, 12)) + 1):
        at += timedelta(minutes=draw(st.integers(1, 200)))
        later = draw(st.booleans()) and timedelta(minutes=draw(st.integers(1, 600)))
        found.append(
            Revision(
                model="m",
                number=number,
                route=route(draw(st.sampled_from(VERSIONS))),
                effective_at=at + later if later else at,
                is_scheduled=bool(later),
                is_withdrawn=bool(later) and draw(st.booleans()),
            )
        )
    return found


@given(histories(), st.integers(0, 3000))
def test_what_holds_follows_from_revisions_and_time_alone(history: list[Revision], minutes: int) -> None:
    # What was made at once holds as soon as it is known, so only moments after that are asked about.
    at = max((r.effective_at for r in history if not r.is_scheduled), default=NOW) + timedelta(minutes=minutes)
    held = holding(history, at)
    begun = [r for r in history if not r.is_withdrawn and r.effective_at <= at]
    assert held == (max(begun, key=lambda r: (r.effective_at, r.number)) if begun else None)
    assert holding(history[::-1], at) == held
    needed = still_needed(history, at)
    assert held is None or needed[0] == held
    for later in range(0, 2000, 7):
        moment = at + timedelta(minutes=later)
        assert holding(needed, moment) == holding(history, moment), "nothing that is forgotten was needed"
    assert [r.number for r in planned(history, at)] == [r.number for r in needed if r.effective_at > at]


@given(histories(), st.integers(1, 15))
def test_rollbacks_go_back_one_route_at_a_time_until_there_is_none(history: list[Revision], times: int) -> None:
    at = NOW + timedelta(days=3)
    held = holding(history, at)
    if held is None:
        return
    began = sorted((r for r in history if not r.is_withdrawn), key=lambda r: r.order)
    was = [r.route for r in began]
    expected = [held.route]
    for r in was[::-1]:
        if r != expected[-1]:
            expected.append(r)
    for turn in range(1, times + 1):
        target = before(history, held)
        if turn >= len(expected):
            assert target is None
            return
        assert target is not None and target.route == expected[turn]
        at += timedelta(minutes=1)
        held = Revision(model="m", number=len(history) + 1, route=target.route, effective_at=at, restores=target.number)
        history = [*history, held]
        assert holding(history, at) == held


def test_after_a_rollback_and_a_new_route_one_goes_back_to_what_the_rollback_made() -> None:
    minute = timedelta(minutes=1)
    a, b, c = (route(version) for version in VERSIONS[:3])
    history = [
        Revision(model="m", number=n, route=r, effective_at=NOW + n * minute, restores=restores)
        for n, r, restores in ((1, a, None), (2, b, None), (3, a, 1), (4, c, None))
    ]
    assert before(history, history[3]) == history[2]
    again = Revision(model="m", number=5, route=a, effective_at=NOW + 5 * minute, restores=3)
    assert before([*history, again], again) is None, "it stands for revision 1, the first"


def test_names_of_aliases() -> None:
    assert all(map(is_alias, ("latest", "stable", "a-b", "x", "v2", "beefs", "a" * 39 + "x")))
    refused = ("", "beef", "a", "f00", "sha256", "Latest", "1x", "-a", "a_b", "a.b", "a" * 40 + "x", "é", "x\n")
    assert not any(map(is_alias, refused))
