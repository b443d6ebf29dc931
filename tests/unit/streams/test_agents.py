"""Streams are read in the one way that loses nothing, and only what was delivered may be committed."""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faust
import pytest
from mode.supervisors import CrashingSupervisor

from streams.agents import register_usage_agent
from streams.ledger.raw import RawRecord
from streams.ledger.stretches import Stretch, stretches

STREAMS = Path(__file__).resolve().parents[3] / "streams"
FORBIDDEN_CALLS = {"take", "take_events", "take_with_timestamp", "events", "items", "noack", "enumerate"}


def faults(source: str) -> list[str]:
    """What in a module would acknowledge events that were not handled, or handle them out of order."""
    found = []
    for node in ast.walk(ast.parse(source)):
        is_agent = isinstance(node, ast.AsyncFunctionDef) and any(
            isinstance(d, ast.Call) and isinstance(d.func, ast.Attribute) and d.func.attr == "agent"
            for d in node.decorator_list
        )
        if is_agent:
            assert isinstance(node, ast.AsyncFunctionDef)
            stream = node.args.args[0].arg
            for inner in ast.walk(node):
                if isinstance(inner, (ast.AsyncFor, ast.comprehension)):
                    reads = ast.dump(inner.iter)
                    if f"'{stream}'" in reads and "noack_take" not in reads:
                        found.append(f"{node.name}: reads its stream with {ast.unparse(inner.iter)}")
                if (
                    isinstance(inner, ast.Call)
                    and isinstance(inner.func, ast.Attribute)
                    and inner.func.attr in FORBIDDEN_CALLS
                    and ast.unparse(inner.func.value) == stream
                ):
                    found.append(f"{node.name}: calls {inner.func.attr}")
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call):
                    options = {k.arg: ast.unparse(k.value) for k in decorator.keywords}
                    if options.get("concurrency") != "1":
                        found.append(f"{node.name}: concurrency is {options.get('concurrency')}, expected 1")
                    if options.get("supervisor_strategy") != "CrashingSupervisor":
                        found.append(f"{node.name}: supervisor is not CrashingSupervisor")
    return found


def test_no_agent_of_ours_reads_its_stream_in_a_way_that_can_lose() -> None:
    agents = 0
    for path in STREAMS.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        agents += source.count("@app.agent(")
        assert not faults(source), path
    assert agents == 1


@pytest.mark.parametrize(
    ("body", "options", "fault"),
    [
        ("async for e in stream: pass", "concurrency=1", "reads its stream with stream"),
        ("async for e in stream.events(): pass", "concurrency=1", "calls events"),
        ("async for b in stream.take(9, within=1): pass", "concurrency=1", "calls take"),
        ("async for b in stream.noack_take(9, within=1): pass", "concurrency=2", "concurrency is 2"),
        ("async for b in stream.noack_take(9, within=1): pass", "", "concurrency is None"),
        (
            "async for b in stream.noack_take(9, within=1): pass",
            "concurrency=1, supervisor_strategy=OneForOneSupervisor",
            "supervisor is not CrashingSupervisor",
        ),
    ],
)
def test_the_guard_sees_every_way_that_can_lose(body: str, options: str, fault: str) -> None:
    named = options if "supervisor" in options else f"supervisor_strategy=CrashingSupervisor, {options}"
    source = f"@app.agent(topic, {named})\nasync def ledger(stream):\n    {body}\n"
    assert any(fault in f for f in faults(source))


class Stream:
    def __init__(self, batches: list[list[Any]]) -> None:
        self._batches = batches

    async def noack_take(self, _max: int, within: float) -> AsyncIterator[list[Any]]:
        for batch in self._batches:
            yield batch

    async def ack(self, event: Any) -> None:
        raise AssertionError("what may be committed is not said by acknowledging")


STALE = 77


def event(offset: int) -> Any:
    return SimpleNamespace(
        message=SimpleNamespace(topic="t", partition=0, offset=offset, follows=offset, key=b"k", value=b"v")
    )


def register(deliver: Any, calls: list[object]) -> Any:
    app = faust.App("test", broker="kafka://127.0.0.1:1", autodiscover=False)
    app.consumer = SimpleNamespace(
        cover=lambda stretches: calls.append(("covered", [s.end for s in stretches])),
        present=lambda events: [e for e in events if e.message.offset != STALE],
    )
    return register_usage_agent(app, "t", deliver, batch_records=10, batch_wait_s=0.1)


async def test_covers_a_batch_after_its_delivery() -> None:
    calls: list[object] = []

    async def deliver(records: Sequence[RawRecord]) -> list[Stretch]:
        calls.append(("delivered", [r.offset for r in records]))
        return stretches(records)

    agent = register(deliver, calls)
    await agent.fun(Stream([[event(3), event(4)], [event(5)]]))
    assert calls == [("delivered", [3, 4]), ("covered", [5]), ("delivered", [5]), ("covered", [6])]
    assert agent.concurrency == 1
    assert agent.supervisor_strategy is CrashingSupervisor


async def test_what_is_stale_is_neither_delivered_nor_covered() -> None:
    calls: list[object] = []

    async def deliver(records: Sequence[RawRecord]) -> list[Stretch]:
        calls.append(("delivered", [r.offset for r in records]))
        return stretches(records)

    await register(deliver, calls).fun(Stream([[event(STALE), event(4)], [event(STALE)]]))
    assert calls == [("delivered", [4]), ("covered", [5])]


async def test_covers_nothing_of_a_batch_that_was_not_delivered() -> None:
    calls: list[object] = []

    async def deliver(records: Sequence[RawRecord]) -> list[Stretch]:
        raise ConnectionError("away")

    with pytest.raises(ConnectionError):
        await register(deliver, calls).fun(Stream([[event(3)]]))
    assert calls == []
