"""The child that looks at strangers' schemas: a real one, and one that a test makes up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from api.checker import answer
from api.errors import Unavailable, Unprocessable
from api.registry_catalogue import Catalogue, Entry
from api.turns import MAX_WAITING, Turns
from schemas.lockfile import locked_schemas
from tests.conditions import eventually
from tests.fakes import Clock

KNOWN = Catalogue(locked_schemas()).versions("inference.usage.v1-value")
OWN = KNOWN[-1].text


async def no_rest(_seconds: float) -> None:
    pass


@asynccontextmanager
async def turns(**changes: Any) -> AsyncIterator[Turns]:
    made = Turns(**{"sleep": no_rest, **changes})
    try:
        yield made
    finally:
        await made.close()


def made_up(tmp_path: Path, body: str) -> tuple[str, ...]:
    """A child that does this with each line."""
    program = tmp_path / "child.py"
    program.write_text(f"import os, signal, sys, time\nfor line in sys.stdin.buffer:\n    {body}\n")
    return (sys.executable, str(program))


def changed(entry: Entry) -> str:
    definition = json.loads(entry.text)
    definition["fields"][-1]["type"] = "string"
    return json.dumps(definition)


async def test_the_child_says_what_its_program_says() -> None:
    async with turns() as asked:
        for text in (OWN, changed(KNOWN[0])):
            question = {"schema": text, "known": [{"version": e.version, "text": e.text} for e in KNOWN]}
            said = answer(json.dumps(question).encode())
            assert await asked.objections(text, KNOWN) == said["objections"]
            seen = await asked.candidate(text)
            assert {"fingerprint": seen.fingerprint, "digest": seen.digest} == answer(
                json.dumps({"schema": text}).encode()
            )
        with pytest.raises(Unprocessable, match="valid Avro") as refused:
            await asked.candidate('{"type": "recrod"}')
        assert refused.value.code == "42201"


async def test_a_schema_that_takes_too_long_ends_the_child_and_not_those_who_come_after(tmp_path: Path) -> None:
    met = tmp_path / "met"
    body = (
        f"if not os.path.exists({str(met)!r}): open({str(met)!r}, 'w'), os.kill(os.getpid(), signal.SIGPROF)\n"
        """    print('{"fingerprint": "f", "digest": "d"}', flush=True)"""
    )
    async with turns(program=made_up(tmp_path, body)) as asked:
        with pytest.raises(Unprocessable, match="in a second") as refused:
            await asked.candidate(OWN)
        assert refused.value.code == "42201"
        assert (await asked.candidate(OWN)).fingerprint == "f"


async def test_the_child_bounds_its_own_processor_time_and_memory() -> None:
    busy = "import api.checker as c, sys; c.answer = lambda line: {work}; c.main()"
    for work in ("max(iter(int, 1))", "len(bytearray(c.MEMORY_BYTES))"):
        async with turns(program=(sys.executable, "-c", busy.format(work=work))) as asked:
            with pytest.raises(Unprocessable, match="in a second"):
                await asked.candidate(OWN)


@pytest.mark.parametrize("body", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGSEGV)", "sys.exit()"])
async def test_however_the_child_ends_the_schema_is_told_to_be_at_fault(tmp_path: Path, body: str) -> None:
    async with turns(program=made_up(tmp_path, body)) as asked:
        for _ in range(2):
            with pytest.raises(Unprocessable, match="in a second"):
                await asked.candidate(OWN)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_child_that_was_killed_between_two_questions_is_not_the_next_schemas_fault(
    tmp_path: Path, run: Callable[..., Any]
) -> None:
    """By the system, when memory is short. When the question comes, the event loop has not heard of it."""
    pids = tmp_path / "pids"
    body = (
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        """    print('{"fingerprint": "f", "digest": "d"}', flush=True)"""
    )

    async def kill_it(_rest_s: float) -> None:
        if pids.exists():
            os.kill(pid := int(pids.read_text().split()[-1]), signal.SIGKILL)
            with suppress(ChildProcessError):  # asyncio's thread was faster
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 (the loop is to be held)

    async def ask() -> None:
        async with turns(program=made_up(tmp_path, body), sleep=kill_it) as asked:
            for _ in range(3):
                assert (await asked.candidate(OWN)).fingerprint == "f"

    run(ask())
    assert len(set(pids.read_text().split())) == 3


async def test_a_child_that_cannot_be_started_is_told_as_away() -> None:
    async with turns(program=("/nowhere/program",)) as asked:
        with pytest.raises(Unavailable):
            await asked.candidate(OWN)


async def test_strangers_take_turns_and_a_long_queue_is_refused(tmp_path: Path) -> None:
    go, begun = tmp_path / "go", tmp_path / "begun"
    body = (
        f"open({str(begun)!r}, 'a').write('x')\n"
        f"    while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        """    print('{"fingerprint": "f", "digest": "d"}', flush=True)"""
    )
    async with turns(program=made_up(tmp_path, body)) as asked:

        async def refused() -> bool:
            try:
                await asyncio.wait_for(asked.candidate(OWN), 30)
            except Unavailable:
                return True
            return False

        waiting = [asyncio.ensure_future(asked.candidate(OWN)) for _ in range(MAX_WAITING)]
        await eventually(lambda: begun.read_text() == "x")  # it is there, and empty, before it is written to
        assert await refused()
        # Hanging up does not make room: the work goes on.
        waiting[0].cancel()
        await asyncio.wait([waiting[0]])
        assert await refused()
        assert begun.read_text() == "x", "only one at a time"
        go.touch()
        assert {c.fingerprint for c in await asyncio.gather(*waiting[1:])} == {"f"}
        assert (await asked.candidate(OWN)).digest == "d"


async def test_between_two_pieces_of_work_it_rests_four_times_as_long_as_the_first_took() -> None:
    clock, slept = Clock(), []

    class Quick(Turns):
        async def _answer(self, question: bytes) -> bytes:
            clock.now_s += 0.25
            return b'{"fingerprint": "f", "digest": "d"}\n'

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async with turns_of(Quick, clock=clock, sleep=sleep) as asked:
        await asked.candidate(OWN)
        await asked.candidate(OWN)
        clock.now_s += 9
        await asked.candidate(OWN)
    assert slept == [0, 1.0, 0]


@asynccontextmanager
async def turns_of(kind: Callable[..., Turns], **changes: Any) -> AsyncIterator[Turns]:
    made = kind(**changes)
    try:
        yield made
    finally:
        await made.close()


async def test_the_loop_goes_round_while_a_schema_is_looked_at(tmp_path: Path) -> None:
    """Counted, not timed: the child waits until the loop has done what it can only do while it is not held."""
    go = tmp_path / "go"
    body = (
        f"while not os.path.exists({str(go)!r}): pass\n"
        """    print('{"fingerprint": "f", "digest": "d"}', flush=True)"""
    )
    async with turns(program=made_up(tmp_path, body)) as asked:
        looking = asyncio.ensure_future(asked.candidate(OWN))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not looking.done()
        go.touch()
        await looking
