"""`make bench-http`: digits over HTTP with every server, process and the load generator on this machine.

Closed loop at 1, 16 and 64 clients, then an open loop at 300 requests a second over 400 customers, and the same with
an Idempotency-Key of its own on each. The last line is one JSON object. Exits 1 when a promise is broken (a lost or
doubly billed request, a wrong answer), never for slowness.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import click
import uvloop

from api.access.key_shape import mint
from api.operators.customers import create_customer
from api.operators.keyring import create_key
from benchmarks.load import Run, closed_loop, http_request, open_loop
from benchmarks.meters import cpu_seconds, memory_mb
from docs.demo import digits
from docs.demo.shell import inferlog, inferlog_json, say
from infra.actor import Author
from infra.local.stack import Stack
from infra.postgres import connect
from infra.settings import operator_settings

#: So much that no limit refuses.
_PER_S, _BURST = 1_000_000, 100_000
PARTS = ("api", "worker", "streams", "kafka", "valkey", "postgres", "s3")


@click.command(epilog="Example:  python -m benchmarks.http --seconds 5 --open-seconds 10")
@click.option("--customers", default=400, show_default=True, help="Customers the load is spread over.")
@click.option("--seconds", default=15.0, show_default=True, help="Length of each closed loop.")
@click.option("--open-seconds", default=60.0, show_default=True, help="Length of the open loop.")
@click.option("--rate", default=300.0, show_default=True, help="Arrivals a second in the open loop.")
@click.option("--warm-up", default=5.0, show_default=True, help="Seconds of load before anything is counted.")
@click.option("--seed", default=None, type=int, help="Seed of the arrivals; printed when it is drawn.")
@click.option("--keep", is_flag=True, help="Keep the stack's folder for a look afterwards.")
def main(
    customers: int, seconds: float, open_seconds: float, rate: float, warm_up: float, seed: int | None, keep: bool
) -> None:
    """Measure requests a second, latency, CPU and memory of the whole path."""
    drawn = seed if seed is not None else int.from_bytes(os.urandom(4), "big")
    say(f"seed {drawn}")
    home = Path(tempfile.mkdtemp(prefix="inferlog-bench-"))
    os.environ["INFERLOG_HOME"] = str(home)
    stack = Stack(home)
    try:
        env = stack.up(progress=lambda line: say(f"  {line}"))
        keys = _prepare(home, customers)
        pids = {s.name: s.pid for s in stack.status() if s.name in PARTS and s.pid is not None}
        figures, answered = uvloop.run(
            _measure(
                int(env["INFERLOG_API_PORT"]), list(keys.values()), pids, seconds, open_seconds, rate, warm_up, drawn
            )
        )
        broken = _promises(dict(zip(keys, range(len(keys)), strict=True)), answered)
    finally:
        stack.down(wipe=True)
        if not keep:
            shutil.rmtree(home, ignore_errors=True)
    for line in broken:
        say(f"BROKEN: {line}")
    say(json.dumps(figures))
    sys.exit(1 if broken else 0)


def _prepare(home: Path, customers: int) -> dict[str, str]:
    """Publish digits and make the customers; returns their keys by customer id."""
    digits.build(home / "bundle")
    inferlog("models", "publish", "digits", str(home / "bundle"), "--route")
    return asyncio.run(_make_customers(customers))


async def _make_customers(customers: int) -> dict[str, str]:
    settings = operator_settings()
    by = Author(actor="bench")
    keys = {}
    connection = await connect(settings.postgres)
    try:
        for number in range(customers):
            customer_id, key = f"cust_bench{number:04d}", mint(settings.environment)
            await create_customer(
                connection,
                customer_id=customer_id,
                name=f"bench {number}",
                requests_per_s=_PER_S,
                burst=_BURST,
                by=by,
            )
            await create_key(
                connection,
                key,
                customer_id=customer_id,
                label="bench",
                requests_per_s=_PER_S,
                burst=_BURST,
                lifetime=None,
                by=by,
            )
            keys[customer_id] = key.secret
    finally:
        await connection.close()
    return keys


async def _measure(
    port: int,
    keys: list[str],
    pids: dict[str, int],
    seconds: float,
    open_seconds: float,
    rate: float,
    warm_up: float,
    seed: int,
) -> tuple[dict[str, Any], Counter[int]]:
    rows, _ = digits.held_out()
    requests = []
    for number, key in enumerate(keys):
        data = [float(x) for x in rows[number % len(rows)]]
        body = json.dumps({"inputs": [{"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": data}]})
        requests.append(http_request("/v2/models/digits/infer", key, body.encode()))
    answered: Counter[int] = Counter()
    runs: dict[str, Run] = {}
    cpu: dict[str, dict[str, float]] = {}

    async def counted(name: str, work: Any) -> None:
        before, own = cpu_seconds(pids), time.process_time()
        run: Run = await work
        after = cpu_seconds(pids)
        answered.update(run.by_customer)
        if name == "warm up":
            return
        runs[name] = run
        served = max(1, run.statuses[200])
        cpu[name] = {part: round(1000 * (after[part] - before[part]) / served, 3) for part in pids}
        cpu[name]["load generator"] = round(1000 * (time.process_time() - own) / served, 3)
        say(f"{name:>12}: {json.dumps(run.figures())} statuses {dict(run.statuses)}")
        say(f"{'':>12}  cpu ms/request {json.dumps(cpu[name])}")

    await counted("warm up", closed_loop("127.0.0.1", port, requests, clients=16, seconds=warm_up))
    for clients in (1, 16, 64):
        work = closed_loop("127.0.0.1", port, requests, clients=clients, seconds=seconds)
        await counted(f"{clients} clients", work)
    arrivals = partial(
        open_loop, "127.0.0.1", port, requests, rate=rate, seconds=open_seconds, connections=128, seed=seed
    )
    await counted("open", arrivals())
    await counted("keyed", arrivals(made=_with_a_key_of_its_own))
    memory = memory_mb(pids)
    memory["total"] = round(sum(memory.values()), 1)
    figures = {
        "closed": {n: runs[f"{n} clients"].figures() for n in ("1", "16", "64")},
        **{
            name: {**runs[name].figures(), "offered_per_s": rate, "statuses": dict(runs[name].statuses)}
            for name in ("open", "keyed")
        },
        "cpu_ms_per_request": cpu,
        "memory_mb": memory,
        "requests": sum(answered.values()),
        "seed": seed,
    }
    return figures, answered


def _with_a_key_of_its_own(request: bytes) -> bytes:
    return request.replace(b"\r\n", b"\r\nIdempotency-Key: %s\r\n" % uuid4().hex.encode(), 1)


def _promises(numbers: dict[str, int], answered: Counter[int]) -> list[str]:
    """What was answered against what was billed, customer by customer, and the proofs from the log."""
    broken = []
    try:
        say(inferlog("verify", "--wait"))
    except RuntimeError as error:
        broken.append(str(error))
    usage = inferlog_json("usage", "--meter", "requests")
    billed: Counter[str] = Counter()
    for row in usage["lines"]:
        billed[row["customer_id"]] += row["quantity"]
    for customer, number in numbers.items():
        if billed[customer] != answered[number]:
            broken.append(f"{customer}: {answered[number]} answered, {billed[customer]} billed")
    return broken


if __name__ == "__main__":
    main()
