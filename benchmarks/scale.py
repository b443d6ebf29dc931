"""`make bench-scale`: a gateway that knows 100,000 keys and 1,000 versions beside one that knows 400 and 3.

Both run at once on the same servers, each with a namespace and a database of its own; every key of both has called
before anything is counted. Small calls then go to one and to the other in turn, and what counts is the median over the
rounds of the ratio of their p50. The model is left out: it would hide the difference. The last line is one JSON object.
Exits 1 when the large one's p50 is more than 10 % longer, or its process takes 200 MB.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import click
import psutil
import uvloop

from api.access.key_shape import MintedKey, mint
from benchmarks.echo import answering
from benchmarks.ledger.watched import program
from benchmarks.load import http_request, open_loop
from benchmarks.models import version_of_digits
from docs.demo.shell import say
from infra.local.stack import Stack
from infra.postgres import open_connection, queries
from infra.provision import provision
from infra.settings import OperatorSettings, PostgresSettings, operator_settings
from tests.processes import free_port

MOST_RATIO, MOST_MB = 1.10, 200.0
_KEYS_PER_CUSTOMER = 10
_VERSIONS_PER_MODEL = 20
#: Of the keys, so many call in one window.
_CALLERS = 4000
_READY_WITHIN_S = 60.0
_TRIES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much one gateway has to know."""

    name: str
    keys: int
    versions: int

    @property
    def models(self) -> list[str]:
        """Names of its models."""
        return [f"model-{n}" for n in range(-(-self.versions // _VERSIONS_PER_MODEL))]


@click.command(epilog="Example:  python -m benchmarks.scale --keys 10000 --versions 100 --rounds 3")
@click.option("--keys", default=100_000, show_default=True, help="Keys of the large gateway.")
@click.option("--versions", default=1_000, show_default=True, help="Versions of the large gateway.")
@click.option("--rounds", default=9, show_default=True, help="How often both are measured.")
@click.option("--seconds", default=3.0, show_default=True, help="Length of each window.")
@click.option("--rate", default=50.0, show_default=True, help="Calls a second.")
@click.option("--seed", default=None, type=int, help="Seed of everything that is drawn; printed when it is drawn.")
def main(keys: int, versions: int, rounds: int, seconds: float, rate: float, seed: int | None) -> None:
    """Measure what knowing much costs a gateway, on servers of its own."""
    drawn = seed if seed is not None else int.from_bytes(os.urandom(4), "big")
    say(f"seed {drawn}")
    home = Path(tempfile.mkdtemp(prefix="inferlog-scale-"))
    stack = Stack(home)
    sizes = (Size(name="small", keys=400, versions=3), Size(name="large", keys=keys, versions=versions))
    try:
        env = stack.up(services_only=True, progress=lambda line: say(f"  {line}"))
        figures = uvloop.run(_measure(env, home, sizes, rounds, seconds, rate, random.Random(drawn)))
    finally:
        stack.down(wipe=True)
        shutil.rmtree(home, ignore_errors=True)
    say(json.dumps({**figures, "keys": keys, "versions": versions, "seed": drawn}))
    sys.exit(1 if figures["p50_ratio"] > MOST_RATIO or figures["rss_mb"]["large"] >= MOST_MB else 0)


async def _measure(
    env: Mapping[str, str],
    home: Path,
    sizes: Sequence[Size],
    rounds: int,
    seconds: float,
    rate: float,
    rng: random.Random,
) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        prepared = [await _prepared(env, home, size) for size in sizes]
        gateways = [await stack.enter_async_context(_gateway(*one)) for one in prepared]
        for gateway in gateways:
            await gateway.warm_up()
            say(f"{gateway.size.name}: every key has called; resident MB so far {gateway.grown_mb}")
        p50_ms: dict[str, list[float]] = {size.name: [] for size in sizes}
        for number in range(-1, rounds):  # the first one warms up what only inferences use
            for gateway in gateways if number % 2 else gateways[::-1]:
                requests = gateway.calls(rng)
                run = await open_loop(
                    "127.0.0.1",
                    gateway.port,
                    requests,
                    rate=rate,
                    seconds=seconds,
                    connections=16,
                    seed=rng.getrandbits(32),
                )
                if set(run.statuses) != {200}:
                    raise RuntimeError(f"{gateway.size.name}: expected only answers 200, found {dict(run.statuses)}")
                if number >= 0:
                    p50_ms[gateway.size.name].append(run.figures()["p50_ms"])
                    say(f"round {number}  {gateway.size.name:>5}: {json.dumps(run.figures())}")
        for gateway in gateways:
            gateway.note("after the calls")
        small, large = (p50_ms[size.name] for size in sizes)
        return {
            "p50_ratio": round(statistics.median(one / other for one, other in zip(large, small, strict=True)), 3),
            "p50_ms": {name: round(statistics.median(found), 2) for name, found in p50_ms.items()},
            "rss_mb": {g.size.name: g.rss_mb() for g in gateways},
            "rss_mb_by_step": {g.size.name: g.grown_mb for g in gateways},
        }


class _Gateway:
    """A running one, and the keys that may call it."""

    def __init__(self, size: Size, port: int, pid: int, keys: Sequence[str]) -> None:
        self.size = size
        self.port = port
        self.grown_mb: dict[str, float] = {}
        self._process = psutil.Process(pid)
        self._keys = keys

    def rss_mb(self) -> float:
        """Resident memory now."""
        return round(float(self._process.memory_info().rss) / 1e6, 1)

    def note(self, step: str) -> None:
        """Keep how much it takes at this step."""
        self.grown_mb[step] = self.rss_mb()

    async def warm_up(self) -> None:
        """Have every key call once, by the cheapest call that knows it."""
        self.note("ready")
        path = f"/v2/models/{self.size.models[0]}/ready"
        left = iter([http_request(path, key, b"").replace(b"POST", b"GET", 1) for key in self._keys])

        async def some() -> None:
            while part := [request for _, request in zip(range(500), left, strict=False)]:
                await call_each(self.port, part)

        await asyncio.gather(*(some() for _ in range(4)))
        self.note("every key has called")

    def calls(self, rng: random.Random) -> list[bytes]:
        """Small inferences by keys drawn at random, of models drawn at random."""
        tensor = {"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}
        body = json.dumps({"inputs": [tensor]}).encode()
        keys = rng.sample(self._keys, min(_CALLERS, len(self._keys)))
        return [http_request(f"/v2/models/{rng.choice(self.size.models)}/infer", key, body) for key in keys]


async def call_each(port: int, requests: Sequence[bytes]) -> None:
    """Each of them once, on one connection. Raises RuntimeError when one is not answered 200 in the end.

    503 is an answer to be repeated: new keys are looked up a few at a time, and others share the machine.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for request in requests:
        for _ in range(_TRIES):
            writer.write(request)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            lines = head.lower().split(b"\r\n")
            body = await reader.readexactly(
                next(int(x.split(b":")[1]) for x in lines if x.startswith(b"content-length:"))
            )
            if b" 503 " not in lines[0]:
                break
            await asyncio.sleep(0.2)
        if b" 200 " not in lines[0]:
            raise RuntimeError(f"answered {head!r} {body!r}")
    writer.close()


#: A size, settings of its gateway, and its keys.
Prepared = tuple[Size, dict[str, str], list[str]]


async def _prepared(env: Mapping[str, str], home: Path, size: Size) -> Prepared:
    """Topics and a database with everything that a gateway of this size has to know."""
    server = PostgresSettings(dsn=env["INFERLOG_POSTGRES_DSN"])
    async with open_connection(server, command_timeout_s=60) as connection:
        await connection.execute(f"CREATE DATABASE scale_{size.name}")
    own = {
        **env,
        "INFERLOG_NAMESPACE": size.name,
        "INFERLOG_POSTGRES_DSN": urlunsplit(urlsplit(server.dsn)._replace(path=f"/scale_{size.name}")),
        "INFERLOG_API_PORT": str(free_port()),
        "INFERLOG_HOME": str(home / size.name),
    }
    settings = operator_settings(own)
    await provision(settings)
    began_s = time.monotonic()
    keys = await _register(settings, size)
    say(f"{size.name}: {size.keys} keys and {size.versions} versions registered in {time.monotonic() - began_s:.0f} s")
    (home / size.name).mkdir()
    return size, own, [key.secret for key in keys]


@asynccontextmanager
async def _gateway(size: Size, own: dict[str, str], keys: Sequence[str]) -> AsyncIterator[_Gateway]:
    """It runs, and somebody answers its requests."""
    settings, port = operator_settings(own), int(own["INFERLOG_API_PORT"])
    async with (
        program([sys.executable, "-m", "api"], own, Path(own["INFERLOG_HOME"]) / "api.results.log") as process,
        answering(settings.kafka, settings.redis),
    ):
        await _ready(port)
        yield _Gateway(size, port, process.pid, keys)


async def _ready(port: int) -> None:
    ends_s = time.monotonic() + _READY_WITHIN_S
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                    if answer.status == 200:
                        return
                    said = await answer.text()
            except aiohttp.ClientError as error:
                said = repr(error)
            if time.monotonic() > ends_s:
                raise RuntimeError(f"not ready within {_READY_WITHIN_S:.0f} s: {said}")
            await asyncio.sleep(0.1)


async def _register(settings: OperatorSettings, size: Size) -> list[MintedKey]:
    """Everything it has to know, as the commands would have left it."""
    now, sql = datetime.now(timezone.utc), queries("benchmarks")
    keys = [mint(settings.environment) for _ in range(size.keys)]
    owners = [f"cust_{number // _KEYS_PER_CUSTOMER:06d}" for number in range(size.keys)]
    versions = [(size.models[n // _VERSIONS_PER_MODEL], version_of_digits(n)) for n in range(size.versions)]
    async with open_connection(settings.postgres, command_timeout_s=300) as connection:
        await connection.execute(sql["scale_customers"], sorted(set(owners)), now)
        await connection.execute(
            sql["scale_keys"], [k.key_id for k in keys], owners, [k.secret_sha256 for k in keys], now
        )
        await connection.execute(sql["scale_models"], size.models)
        await connection.execute(
            sql["scale_versions"],
            [m.version for _, m in versions],
            [model for model, _ in versions],
            [m.to_bytes().decode() for _, m in versions],
            now,
        )
        routed = {model: m.version for model, m in versions}
        await connection.execute(sql["scale_routes"], list(routed), list(routed.values()), now)
    return keys


if __name__ == "__main__":
    main()
