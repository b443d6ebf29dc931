"""`make bench-flood`: what inference feels of callers without a key, and of connections whose headers never end.

In each round the same open loop runs quiet, under each kind of attack, and quiet again; what counts is the median over
the rounds of each p95 beside the worse of the two quiet ones of its round, since other programs share the cores. The
attackers run at the lowest priority: they stand for other machines. The last line is one JSON object. Exits 1 when an
attack makes p95 more than 1.5 times as long.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import uvloop

from benchmarks.load import http_request, open_loop
from benchmarks.meters import cpu_seconds
from docs.demo import digits
from docs.demo.shell import inferlog, inferlog_json, say
from infra.local.stack import Stack
from schemas.lockfile import versions_of

MOST_RATIO = 1.5
FLOODERS, SLOW = 64, 500
_SUBJECT = "inference.requests.default.v1-value"
#: Below this a difference is the machine's, not the gateway's.
_FLOOR_MS = 1.0
_BEGINS_WITHIN_S = 0.3


def _fat_schema() -> bytes:
    """The largest body that the compatibility check takes."""
    definition = versions_of("inferlog.inference.v1.InferenceRequested")[-1].definition()
    for number in range(560):
        enum = {"type": "enum", "name": f"E{number}", "symbols": ["A", "B"]}
        definition["fields"].append({"name": f"f{number}", "type": ["null", enum], "default": None})
    while len(body := json.dumps({"schema": json.dumps(definition, separators=(",", ":"))})) > 64 * 1024:
        definition["fields"].pop()
    return body.encode()


def _calls(kind: str) -> list[bytes]:
    """What the attackers of one kind send, in turn."""
    if kind == "strangers":
        made_up = "il_test_0123456789abcdef_" + "x" * 40
        return [http_request("/v2/models/digits/infer", made_up, b"{}"), b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n"]
    check = http_request(f"/registry/compatibility/subjects/{_SUBJECT}/versions", "", _fat_schema())
    reads = [
        f"GET /registry{p} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for p in ("/schemas", "/subjects", "/schemas/ids/1")
    ]
    return [*reads, *reads, check]


async def _flood(port: int, kind: str, over: asyncio.Event) -> dict[str, int]:
    """Send calls on FLOODERS connections, each as soon as the last was answered or refused; what became of them."""
    calls, seen = _calls(kind), Counter[str]()

    async def one(turn: int) -> None:
        while True:
            writer = None
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                while True:
                    writer.write(calls[turn % len(calls)])
                    turn += 1
                    head = await reader.readuntil(b"\r\n\r\n")
                    size = next(x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:"))
                    await reader.readexactly(int(size.split(b":")[1]))
                    seen[head[9:12].decode()] += 1
            except (OSError, asyncio.IncompleteReadError):
                seen["closed"] += 1
            finally:
                if writer is not None:
                    writer.close()

    tasks = [asyncio.ensure_future(one(turn)) for turn in range(FLOODERS)]
    await over.wait()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return dict(seen)


async def _slow(port: int, _kind: str, over: asyncio.Event) -> dict[str, int]:
    """Hold SLOW connections on which a header grows by a byte a second; how many were still open."""
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(SLOW)]
    for _, writer in opened:
        writer.write(b"GET /registry/subj")
    while not over.is_set():
        for _, writer in opened:
            writer.write(b"e")
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(over.wait(), 1)
    still = sum(not reader.at_eof() for reader, _ in opened)
    for _, writer in opened:
        writer.close()
    return {"open": still}


ATTACKS: dict[str, Callable[[int, str, asyncio.Event], Awaitable[dict[str, int]]]] = {
    "registry": _flood,
    "strangers": _flood,
    "slow_headers": _slow,
}


async def _attack(kind: str, port: int) -> None:
    """A process that attacks from one line on its standard input to the next, and tells what it saw."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    os.nice(19)
    print(flush=True)  # ready
    while await lines.readline():
        over = asyncio.Event()
        attack = asyncio.ensure_future(ATTACKS[kind](port, kind, over))
        await lines.readline()
        over.set()
        print(json.dumps(await attack), flush=True)


@click.command(epilog="Example:  python -m benchmarks.flood --rounds 5")
@click.option("--rounds", default=3, show_default=True, help="How often everything is measured.")
@click.option("--seconds", default=1.5, show_default=True, help="Length of each window.")
@click.option("--rate", default=80.0, show_default=True, help="Inferences a second.")
@click.option("--attack", type=click.Choice(list(ATTACKS)), hidden=True)
@click.option("--port", default=0, hidden=True)
def main(rounds: int, seconds: float, rate: float, attack: str | None, port: int) -> None:
    """Measure p95 of inference quiet and under attack, on a stack of its own."""
    if attack is not None:
        uvloop.run(_attack(attack, port))
        return
    home = Path(tempfile.mkdtemp(prefix="inferlog-flood-"))
    os.environ["INFERLOG_HOME"] = str(home)
    stack = Stack(home)
    try:
        env = stack.up(progress=lambda line: say(f"  {line}"))
        digits.build(home / "bundle")
        inferlog("models", "publish", "digits", str(home / "bundle"), "--route")
        made = inferlog_json("customers", "create", "flood", "--requests-per-s", "100000", "--burst", "100000")
        key = inferlog_json("keys", "create", made["customer_id"])["key"]
        pid = next(s.pid for s in stack.status() if s.name == "api")
        assert pid is not None
        figures = uvloop.run(_measure(int(env["INFERLOG_API_PORT"]), key, pid, rounds, seconds, rate))
    finally:
        stack.down(wipe=True)
        shutil.rmtree(home, ignore_errors=True)
    worst = max(figures["ratio"].values())
    say(f"worst ratio of p95 {worst}, expected at most {MOST_RATIO}")
    say(json.dumps(figures))
    sys.exit(1 if worst > MOST_RATIO else 0)


async def _attacker(kind: str, port: int) -> asyncio.subprocess.Process:
    command = ["-m", "benchmarks.flood", "--attack", kind, "--port", str(port)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe)
    await _line(process)
    return process


async def _line(attacker: asyncio.subprocess.Process) -> bytes:
    assert attacker.stdout is not None
    return await asyncio.wait_for(attacker.stdout.readline(), 60)


def _tell(attacker: asyncio.subprocess.Process) -> None:
    assert attacker.stdin is not None
    attacker.stdin.write(b"\n")


async def _measure(port: int, key: str, pid: int, rounds: int, seconds: float, rate: float) -> dict[str, Any]:
    rows, _ = digits.held_out()
    inputs = [{"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": [float(x) for x in rows[0]]}]
    request = http_request("/v2/models/digits/infer", key, json.dumps({"inputs": inputs}).encode())
    windows: list[tuple[str, int, float, float]] = []
    saw: dict[str, Counter[str]] = {kind: Counter() for kind in ATTACKS}
    attackers = {kind: await _attacker(kind, port) for kind in ATTACKS}

    async def window(kind: str, number: int) -> None:
        attacker = attackers.get(kind)
        if attacker is not None:
            _tell(attacker)
            await asyncio.sleep(_BEGINS_WITHIN_S)
        before_s = cpu_seconds({"api": pid})["api"]
        run = await open_loop("127.0.0.1", port, [request], rate=rate, seconds=seconds, connections=16, seed=number)
        core = (cpu_seconds({"api": pid})["api"] - before_s) / run.wall_s
        if attacker is not None:
            _tell(attacker)
            saw[kind].update(json.loads(await _line(attacker)))
        if set(run.statuses) != {200}:
            raise RuntimeError(f"expected only answers with status 200 under '{kind}', found {dict(run.statuses)}")
        if number >= 0:
            windows.append((kind, number, run.figures()["p95_ms"], core))
            say(f"round {number}  {kind:>12}: p95 {run.figures()['p95_ms']} ms, gateway {core:.2f} of a core")

    try:
        await window("quiet", -1)
        for number in range(rounds):
            for kind in ("quiet", *ATTACKS, "quiet"):
                await window(kind, number)
    finally:
        for attacker in attackers.values():
            attacker.kill()
            await attacker.wait()

    def middle(kind: str, column: int) -> float:
        return round(statistics.median(w[column] for w in windows if w[0] == kind), 2)

    def ratio(kind: str) -> float:
        quiet = [max(_FLOOR_MS, *(w[2] for w in windows if w[:2] == ("quiet", n))) for n in range(rounds)]
        return round(statistics.median(w[2] / quiet[w[1]] for w in windows if w[0] == kind), 2)

    kinds = ("quiet", *ATTACKS)
    return {
        "ratio": {kind: ratio(kind) for kind in ATTACKS},
        "p95_ms": {kind: middle(kind, 2) for kind in kinds},
        "gateway_cores": {kind: middle(kind, 3) for kind in kinds},
        "attackers_saw": {kind: dict(seen) for kind, seen in saw.items()},
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
