"""What Faust's usual agents lose (docs/ledger.md has the table), tried on ours: an error, a bad codec, a silent end.

Twelve records on one partition in batches of four; what goes wrong does so in the second, while the third is buffered.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.integration.ledger_world import LedgerWorld, Spawn, usages
from tests.processes import ROOT

RECORDS = 12
BATCH = {"INFERLOG_LEDGER_BATCH": "4"}
PARTITION = 4


async def test_an_error_in_the_body_ends_the_process_with_only_what_was_counted_committed(
    either: dict[str, str], spawn: Spawn
) -> None:
    world = LedgerWorld(either, spawn)
    await world.produce(usages(RECORDS, customers=1), partition=PARTITION)
    worker = world.worker(
        "tests.integration.ledger_variants:fails", settings={**BATCH, "FAILS_AFTER": "1"}, ready=False
    )
    assert worker.wait(60) != 0
    assert "an error that nobody foresaw" in worker.log.read_text()
    counted = (await world.positions())[PARTITION]
    assert 0 < counted < RECORDS
    assert (await world.committed()).get(PARTITION, 0) <= counted
    assert await world.sums() == {"requests": counted, "items": 4 * counted}
    world.worker(settings=BATCH)
    await world.caught_up()
    await world.acknowledged()
    assert await world.sums() == {"requests": RECORDS, "items": 4 * RECORDS}


async def test_a_stream_that_ends_in_silence_is_noticed_and_nothing_of_the_rest_committed(
    either: dict[str, str], spawn: Spawn
) -> None:
    world = LedgerWorld(either, spawn)
    await world.produce(usages(RECORDS, customers=1), partition=PARTITION)
    worker = world.worker(
        "tests.integration.ledger_variants:silent", settings={**BATCH, "INFERLOG_LEDGER_STALL_S": "5"}, ready=False
    )
    assert worker.wait(60) != 0
    counted = (await world.positions())[PARTITION]
    assert 0 < counted < RECORDS
    assert f"the ledger has not moved from {counted}" in worker.log.read_text()
    assert (await world.committed()).get(PARTITION, 0) <= counted
    world.worker(settings=BATCH)
    await world.caught_up()
    assert await world.sums() == {"requests": RECORDS, "items": 4 * RECORDS}


def test_without_the_compiled_iterator_it_does_not_start() -> None:
    """The one in Python acknowledges what it skips after a rebalance."""
    settings = {"INFERLOG_KAFKA_BOOTSTRAP": "127.0.0.1:1", "INFERLOG_POSTGRES_DSN": "postgresql://u:p@127.0.0.1:1/d"}
    done = subprocess.run(
        [sys.executable, "-c", "import streams.app"],
        env={**os.environ, **settings, "NO_CYTHON": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "compiled stream iterator is not loaded" in done.stderr
