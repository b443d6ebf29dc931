"""A group in which somebody shares partitions out in another way takes no ledger in, until that one is gone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

from aiokafka.coordinator.assignors.range import RangePartitionAssignor

from infra.kafka import open_consumer
from tests.conditions import eventually, wait_until
from tests.integration.ledger_world import LedgerWorld, Spawn, usages
from tests.processes import Process

WHY = "shares partitions out in another way; end it"


def reason(worker: Process) -> str:
    """Why a worker is not ready, as it says itself."""
    try:
        with urllib.request.urlopen(f"{worker.url}/readyz", timeout=5):  # type: ignore[attr-defined]
            return ""
    except urllib.error.HTTPError as refused:
        return str(json.load(refused)["reason"])
    except OSError:
        return "not up yet"


async def test_a_ledger_that_its_group_refuses_says_why_and_tries_again_until_it_has_waited_too_long(
    either: dict[str, str], spawn: Spawn
) -> None:
    world = LedgerWorld(either, spawn)
    foreign = (RangePartitionAssignor,)
    async with open_consumer(world.settings.kafka, group=world.group, partition_assignment_strategy=foreign) as other:
        other.subscribe([world.topic])

        async def joined() -> bool:
            await other.getmany(timeout_ms=100)
            return bool(other.assignment())

        await eventually(joined, what="a member of another kind", timeout_s=30)
        hasty = world.worker(settings={"INFERLOG_LEDGER_STALL_S": "5"}, ready=False)
        patient = world.worker(ready=False)
        assert hasty.wait(60) != 0
        assert WHY in hasty.log.read_text()
        wait_until(lambda: WHY in reason(patient), what="the reason on /readyz", timeout_s=30)
    await world.produce(usages(20))
    await world.caught_up()
    assert await world.sums() == {"requests": 20, "items": 80}
    assert patient.returncode is None
