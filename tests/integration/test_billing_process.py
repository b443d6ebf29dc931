"""The reporter as processes see it: killed with -9, asked to end, run as a command with its exit status."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conditions import eventually
from tests.integration.billing_world import SENDS, World, open_world
from tests.processes import Process

RUN = ["python", "-m", "infra.cli", "billing", "run", "--once", "--include-open-hours", "--json"]
COMPARE = ["python", "-m", "infra.cli", "billing", "compare", "--json"]

Spawn = Callable[..., Process]


@pytest.fixture
async def world(env: dict[str, str], spawn: Spawn, tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(env, spawn, tmp_path, frozen=False) as made:
        for n, name in enumerate(("acme", "brook", "cedar"), start=1):
            await made.add_customer(name)
            await made.use(name, 10 * n)
            await made.use(name, n, hours_ago=0)
        yield made


def finish(spawn: Spawn, command: list[str], world: World) -> tuple[int, dict[str, Any]]:
    """Exit status of a command and the JSON object on the last line of its output."""
    quiet = {**world.env, "INFERLOG_LOG_LEVEL": "CRITICAL"}
    process = spawn(command, quiet, name="command")
    status = process.wait(60)
    return status, json.loads(process.tail(1))


async def test_run_and_compare_tell_by_their_exit_status(world: World, spawn: Spawn) -> None:
    status, compared = finish(spawn, COMPARE, world)
    assert (status, compared["equal"]) == (1, False)
    assert [c["customer"] for c in compared["compared"]] == ["acme", "brook", "cedar"]
    assert compared["open_sums"] == 3, "one of each customer in the hour that is not over"
    status, report = finish(spawn, [part for part in RUN if part != "--include-open-hours"], world)
    assert (status, report["counts"]["confirmed"], report["open_sums"]) == (0, 3, 3)
    status, report = finish(spawn, RUN, world)
    assert (status, report["settled"], report["counts"]["confirmed"], report["open_sums"]) == (0, True, 3, 0)
    status, compared = finish(spawn, COMPARE, world)
    assert (status, compared["equal"], compared["open_sums"]) == (0, True, 0)
    assert [c["stripe_units"] for c in compared["compared"]] == [11, 22, 33]


@pytest.mark.parametrize("answered", [False, True])
async def test_killed_between_sending_and_noting_it_counts_once(world: World, spawn: Spawn, answered: bool) -> None:
    world.fault("hold", count=2, **SENDS)
    reporter = spawn(RUN, world.env, name="reporter")
    await eventually(lambda: world.state()["held"] == 2, what="two events are inside Stripe")
    reporter.kill()
    if answered:
        world.control("faults/release", {})
        await eventually(lambda: len(world.events()) == 2, what="Stripe finished what it was sent")
    else:
        world.heal()
        world.control("faults/release", {})
    status, report = finish(spawn, RUN, world)
    assert (status, report["settled"]) == (0, True)
    assert world.at_stripe() == await world.ledger()


async def test_the_loop_reports_new_usage_and_ends_between_steps_when_asked(world: World, spawn: Spawn) -> None:
    env = {**world.env, "INFERLOG_BILLING_INTERVAL_S": "1", "INFERLOG_SEAL_AFTER_S": "0"}
    loop = spawn(["python", "-m", "streams.billing"], env, name="loop")
    await eventually(lambda: len(world.events()) == 3, what="the sealed hours are reported")
    await world.use("acme", 5)
    await eventually(lambda: len(world.events()) == 4, what="the growth is reported")
    loop.terminate()
    assert loop.wait(10) == 0
    status, report = finish(spawn, RUN, world)
    assert (status, report["settled"]) == (0, True)
    assert world.at_stripe() == await world.ledger()


async def test_a_second_reporter_leaves_the_work_to_the_first(world: World, spawn: Spawn) -> None:
    world.fault("hold", count=1, **SENDS)
    first = spawn(RUN, world.env, name="first")
    await eventually(lambda: world.state()["held"] == 1, what="the first one is at work")
    second = spawn(RUN, world.env, name="second")
    assert second.wait(60) == 1
    assert "another reporter" in second.tail()
    first.kill()


async def test_the_loop_waits_for_a_database_that_is_away(world: World, spawn: Spawn, tmp_path: Path) -> None:
    # An address where nobody listens; the stack's own server is left alone.
    away = {**world.env, "INFERLOG_POSTGRES_DSN": "postgresql://x:x@127.0.0.1:1/x", "INFERLOG_BILLING_INTERVAL_S": "1"}
    loop = spawn(["python", "-m", "streams.billing"], away, name="loop")
    await eventually(lambda: loop.tail().count("Postgres is away") >= 2, what="it tried twice")
    loop.terminate()
    assert loop.wait(10) == 0


async def test_a_wrong_key_is_one_sentence_and_changes_nothing(world: World, spawn: Spawn) -> None:
    wrong = spawn(RUN, {**world.env, "INFERLOG_STRIPE_API_KEY": "sk_test_other"}, name="wrong")
    assert wrong.wait(60) == 1
    assert "Traceback" not in wrong.tail()
    assert "401" in wrong.tail()
    status, _ = finish(spawn, RUN, world)
    assert status == 0
