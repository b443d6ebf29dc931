"""I1 on real Kafka and Postgres: delivered three times and killed in the middle, each request is billed once.

Beside it the same with one mechanism removed, which must fail.
"""

from __future__ import annotations

from tests.conditions import eventually
from tests.integration.ledger_world import LedgerWorld, Spawn, usages

REQUESTS = 400
EXACT = {"requests": REQUESTS, "items": 4 * REQUESTS}
#: Small batches, so that the copies of a record come in different ones.
SMALL = {"INFERLOG_LEDGER_BATCH": "50"}


async def test_three_deliveries_and_a_kill_mid_batch_bill_each_request_once(
    either: dict[str, str], spawn: Spawn
) -> None:
    world = LedgerWorld(either, spawn)
    records = usages(REQUESTS)
    for _ in range(3):
        await world.produce(records)
    async with world.blocked_batch():
        worker = world.worker(settings=SMALL)
        await world.wait_blocked()
        worker.kill()
    assert await world.sums() == {}
    assert await world.positions() == {}

    second = world.worker(settings=SMALL)

    async def underway() -> bool:
        return bool(await world.positions())

    await eventually(underway, what="some batches committed")
    second.kill()  # now somewhere between a COMMIT and its acknowledgement, most likely
    committed, positions = await world.committed(), await world.positions()
    assert all(committed.get(p, 0) <= next_offset for p, next_offset in positions.items())
    world.worker(settings=SMALL)
    await world.caught_up()
    assert await world.sums() == EXACT
    assert await world.value("SELECT count(*) FROM processed_requests") == REQUESTS
    await world.acknowledged()


async def test_without_the_insert_that_dedups_the_same_run_bills_thrice(env: dict[str, str], spawn: Spawn) -> None:
    world = LedgerWorld(env, spawn)
    records = usages(REQUESTS)
    for _ in range(3):
        await world.produce(records)
    world.worker("tests.integration.ledger_variants:double_counting", settings=SMALL)
    await world.caught_up()
    sums = await world.sums()
    assert sums["requests"] > REQUESTS
    assert sums["items"] > 4 * REQUESTS


async def test_a_batch_in_hand_stays_unacknowledged_when_the_worker_is_stopped(
    either: dict[str, str], spawn: Spawn
) -> None:
    world = LedgerWorld(either, spawn)
    await world.produce(usages(REQUESTS))
    async with world.blocked_batch():
        worker = world.worker()
        await world.wait_blocked()
        worker.terminate()
        worker.wait(20)
    assert await world.committed() == {}
    world.worker()
    await world.caught_up()
    assert await world.sums() == EXACT


async def test_with_plain_take_the_same_stop_acknowledges_what_was_never_written(
    env: dict[str, str], spawn: Spawn
) -> None:
    world = LedgerWorld(env, spawn)
    await world.produce(usages(REQUESTS))
    async with world.blocked_batch():
        worker = world.worker("tests.integration.ledger_variants:early_ack")
        await world.wait_blocked()
        worker.terminate()
        worker.wait(20)
    committed = await world.committed()
    assert sum(committed.values()) > 0
    assert await world.sums() == {}
    # The start-up check is what catches it: the real ledger does not go on from there.
    refused = world.worker(ready=False)
    assert refused.wait(30) != 0
    log = refused.log.read_text()
    partition, offset = next((p, o) for p, o in sorted(committed.items()) if o > 0)
    assert f"partition {partition}: the broker's committed offset is {offset}, the ledger's next offset is 0" in log
    assert "INFERLOG_LEDGER_REWIND=1" in log
    world.worker(settings={"INFERLOG_LEDGER_REWIND": "1"})
    await world.caught_up()
    assert await world.sums() == EXACT
