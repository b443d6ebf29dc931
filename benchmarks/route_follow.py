"""`make bench-route-follow`: how long two gateways go on with the old version once a route has been switched.

Both serve a closed loop while the route goes to and fro, at once and by schedule; what each admitted, and when, is read
off the log. Then what following costs: one look at 400 models and 1,000 versions. The last line is one JSON object.
Exits 1 when a request ran with another version than it was admitted with, never for slowness.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import click
import uvloop

from api.routing.registry import PostgresRegistry
from api.routing.versions import Versions
from benchmarks.load import closed_loop, http_request
from benchmarks.meters import memory_mb
from benchmarks.models import version_of_digits
from docs.demo import digits
from docs.demo.shell import inferlog, inferlog_json, say
from gpu_worker.history import read_history
from gpu_worker.registry import register
from gpu_worker.routing import RouteWish, reroute
from infra.actor import Author
from infra.local.stack import Stack
from infra.postgres import Connection, open_connection, open_pool
from infra.settings import OperatorSettings, operator_settings
from schemas.codec import decode_at
from schemas.records import InferenceRequested
from schemas.topics import requests_topic
from streams.log import open_log

BY = Author(actor="bench-route-follow")
MODELS, VERSIONS = 400, 1000
_CLIENTS = 8
_LOOKS = 300


@click.command(epilog="Example:  python -m benchmarks.route_follow --switches 10")
@click.option("--switches", default=60, show_default=True, help="Switches at once; a sixth as many by schedule.")
@click.option("--seed", default=None, type=int, help="Seed of the pauses between them; printed when it is drawn.")
def main(switches: int, seed: int | None) -> None:
    """Measure how far behind a switched route gateways are, and what following routes costs them."""
    drawn = seed if seed is not None else int.from_bytes(os.urandom(4), "big")
    say(f"seed {drawn}")
    home = Path(tempfile.mkdtemp(prefix="inferlog-bench-"))
    os.environ["INFERLOG_HOME"] = str(home)
    stack = Stack(home)
    broken: list[str] = []
    try:
        env = stack.up(progress=lambda line: say(f"  {line}"))
        found = [_publish(home, seed) for seed in (1, 2)]
        inferlog("models", "route", "digits", found[0])
        customer = inferlog_json("customers", "create", "bench", "--requests-per-s", "1000000", "--burst", "100000")
        key = inferlog_json("keys", "create", customer["customer_id"])["key"]
        port = int(env["INFERLOG_API_PORT"])
        with _second_gateway(env, home) as (second, pid):
            ports = {"first": port, "second": second}
            figures = uvloop.run(_measure(operator_settings(env), ports, key, found, switches, random.Random(drawn)))
            figures["refresh"] = uvloop.run(_cost(operator_settings(env)))
            time.sleep(3)  # gateways read all of it within one
            figures["gateway_memory_mb"] = memory_mb({"second": pid})["second"]
        try:
            say(inferlog("verify", "--wait"))
        except RuntimeError as error:
            broken.append(str(error))
    finally:
        stack.down(wipe=True)
        shutil.rmtree(home, ignore_errors=True)
    for line in broken:
        say(f"BROKEN: {line}")
    say(json.dumps({**figures, "seed": drawn}))
    sys.exit(1 if broken else 0)


def _publish(home: Path, seed: int) -> str:
    digits.build(home / f"bundle-{seed}", seed=seed)
    version: str = inferlog_json("models", "publish", "digits", str(home / f"bundle-{seed}"), "--no-route")["version"]
    return version


@contextmanager
def _second_gateway(env: dict[str, str], home: Path) -> Iterator[tuple[int, int]]:
    """Another gateway beside the stack's: its port and its process."""
    port = int(env["INFERLOG_API_PORT"]) + 1000
    own = {**os.environ, **env, "INFERLOG_API_PORT": str(port)}
    with (home / "second.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "api"], env=own, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)


async def _measure(
    settings: OperatorSettings,
    ports: dict[str, int],
    key: str,
    versions: Sequence[str],
    switches: int,
    chance: random.Random,
) -> dict[str, Any]:
    body = json.dumps(
        {"inputs": [{"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}]}
    ).encode()
    call = http_request("/v2/models/digits/infer", key, body)
    await asyncio.gather(*(_ready(port) for port in ports.values()))
    made: list[tuple[datetime, str, bool]] = []
    async with _serving(ports.values(), call), open_connection(settings.postgres) as connection:
        await asyncio.sleep(2)
        for turn in range(switches):
            await reroute(connection, "digits", versions[(turn + 1) % 2], RouteWish(), by=BY)
            made.append((datetime.now(timezone.utc), versions[(turn + 1) % 2], False))
            await asyncio.sleep(1.2 + chance.random())
        for turn in range(switches // 6):
            await _later(connection, versions[(turn + 1) % 2], made)
            await asyncio.sleep(3.5 + chance.random())
    admitted = await _admitted(settings)
    at_once, scheduled = (_behind(made, admitted, is_scheduled=kind) for kind in (False, True))
    say(f"  {len(admitted)} gateways, {sum(map(len, admitted.values()))} requests on the log")
    return {"gateways": len(admitted), "at_once_ms": at_once, "scheduled_ms": scheduled}


async def _later(connection: Connection, version: str, made: list[tuple[datetime, str, bool]]) -> None:
    at = (await read_history(connection, "digits")).now + timedelta(seconds=2.5)
    await reroute(connection, "digits", version, RouteWish(at=at), by=BY)
    made.append((at, version, True))


async def _ready(port: int) -> None:
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        except OSError:
            await asyncio.sleep(0.1)
    raise RuntimeError(f"no gateway on port {port} within 60 s")


@asynccontextmanager
async def _serving(ports: Any, call: bytes) -> AsyncIterator[None]:
    """Both gateways under a closed loop for as long as the block takes."""
    loops = [
        asyncio.ensure_future(closed_loop("127.0.0.1", port, [call], clients=_CLIENTS, seconds=3600)) for port in ports
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


async def _admitted(settings: OperatorSettings) -> dict[str, list[tuple[datetime, str]]]:
    """When each gateway admitted with which version, in order of time."""
    found: dict[str, list[tuple[datetime, str]]] = {}
    topic = requests_topic()
    name = topic.in_namespace(settings.kafka.namespace).name
    async with open_log(settings.kafka) as reader:
        async for record in reader.read(name, await reader.freeze(name, topic.partitions)):
            request = decode_at(record, InferenceRequested)
            found.setdefault(request.reply_to, []).append((request.occurred_at, request.version))
    return {gateway: sorted(admitted) for gateway, admitted in found.items()}


def _behind(
    made: Sequence[tuple[datetime, str, bool]],
    admitted: dict[str, list[tuple[datetime, str]]],
    *,
    is_scheduled: bool,
) -> dict[str, float]:
    """From each switch until a gateway's last admission with another version, and until its first with the new one."""
    last, first = [], []
    for (at, version, kind), (until, _, _) in zip(
        made, [*made[1:], (datetime.max.replace(tzinfo=timezone.utc), "", False)], strict=True
    ):
        if kind is not is_scheduled:
            continue
        for admissions in admitted.values():
            after = [(when, found) for when, found in admissions if at <= when < until]
            new = [when for when, found in after if found == version]
            if new:
                old = [when for when, found in after if found != version]
                last.append((max(old) - at).total_seconds() * 1000 if old else 0.0)
                first.append((new[0] - at).total_seconds() * 1000)
    return {
        "switches": len(first),
        "first_with_new_p50": _rounded(statistics.median(first)),
        "first_with_new_max": _rounded(max(first)),
        "last_with_old_p50": _rounded(statistics.median(last)),
        "last_with_old_max": _rounded(max(last)),
    }


async def _cost(settings: OperatorSettings) -> dict[str, float]:
    """Milliseconds of one look at the registry: the first, one when nothing was changed, one after a switch."""
    async with open_connection(settings.postgres) as connection, open_pool(settings.postgres) as pool:
        for number in range(VERSIONS):
            await register(
                connection,
                f"bench-{number % MODELS}",
                version_of_digits(number),
                artifact_uri="s3://none/",
                wish=RouteWish(),
                by=BY,
            )
        memory = Versions(PostgresRegistry(pool))
        first = await _timed(memory)
        idle = [await _timed(memory) for _ in range(_LOOKS)]
        changed = []
        for number in range(_LOOKS // 10):
            await reroute(connection, f"bench-{number}", None, RouteWish(spread=3), by=BY)
            changed.append(await _timed(memory))
    return {
        "models": MODELS,
        "versions": VERSIONS,
        "first_ms": _rounded(first),
        "unchanged_p50_ms": _rounded(statistics.median(idle)),
        "unchanged_max_ms": _rounded(max(idle)),
        "one_changed_p50_ms": _rounded(statistics.median(changed)),
    }


async def _timed(memory: Versions) -> float:
    began = time.perf_counter()
    await memory.refresh()
    return (time.perf_counter() - began) * 1000


def _rounded(milliseconds: float) -> float:
    return round(milliseconds, 2)


if __name__ == "__main__":
    main()
