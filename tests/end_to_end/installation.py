"""One whole installation of a test's own: gateway, worker and ledger as processes, and a customer who calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.conditions import eventually
from tests.integration.api_desk import run
from tests.processes import Process, free_port

Spawn = Callable[..., Process]


@dataclass(kw_only=True)
class Installation:
    """Processes on the shared servers, in the namespace of `env`."""

    env: dict[str, str]
    spawn: Spawn
    url: str = ""
    key: str = ""
    processes: dict[str, Process] = field(default_factory=dict)

    def start_api(self, **settings: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        env = {**self.env, "INFERLOG_API_PORT": str(port), **settings}
        self.processes["api"] = self.spawn(["python", "-m", "api"], env, name="api")
        self.processes["api"].wait_ready(f"{self.url}/readyz")

    def start_worker(self, *, changed: str = "") -> Process:
        """`changed` is Python run in the worker first: how a mechanism is taken out."""
        port = free_port()
        command = ["python", "-m", "gpu_worker"]
        if changed:
            command = ["python", "-c", f"{changed}\nfrom gpu_worker.app import main\nmain()"]
        worker = self.spawn(command, {**self.env, "INFERLOG_WORKER_PORT": str(port)}, name="worker")
        worker.wait_ready(f"http://127.0.0.1:{port}/readyz")
        self.processes["worker"] = worker
        return worker

    def start_ledger(self) -> Process:
        port = free_port()
        command = ["faust", "-A", "streams.app", "worker", "-l", "info"]
        ledger = self.spawn(command, {**self.env, "INFERLOG_STREAMS_PORT": str(port)}, name="streams")
        ledger.wait_ready(f"http://127.0.0.1:{port}/readyz")
        self.processes["streams"] = ledger
        return ledger

    def make_customer(self, name: str) -> None:
        made = run(self.env, "customers", "create", name, "--requests-per-s", "100000", "--burst", "100000", "--json")
        self.key = run(self.env, "keys", "create", made["customer_id"], "--json")["key"]

    def publish(self, model: str, bundle: str) -> str:
        version: str = run(self.env, "models", "publish", model, bundle, "--route", "--json")["version"]
        return version

    async def routed(self, model: str, version: str) -> None:
        """Wait until the gateway has followed a route."""

        async def follows() -> bool:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{self.url}/v2/models/{model}", headers={"Authorization": f"Bearer {self.key}"}) as answer,
            ):
                document = await answer.json(content_type=None)
                return answer.status == 200 and document["versions"][0] == version

        await eventually(follows, what=f"route of {model}")

    def verify(self) -> dict[str, Any]:
        """What `inferlog verify --wait` found; fails when any promise is broken."""
        report: dict[str, Any] = run(self.env, "verify", "--wait", "--json")
        return report

    def usage(self) -> Counter[str]:
        """What the ledger holds in all, by meter."""
        return Counter(run(self.env, "usage", "--json")["totals"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One answer."""

    status: int
    document: dict[str, Any]


async def call_digits(
    url: str,
    key: str,
    count: int,
    *,
    at_once: int = 64,
    timeout_s: float = 60.0,
    headers: Mapping[str, str] | None = None,
) -> list[Said]:
    """`count` small requests, at most `at_once` together, each to its answer."""
    body = {"inputs": [{"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}]}
    gate = asyncio.Semaphore(at_once)

    async def one(session: aiohttp.ClientSession) -> Said:
        async with gate, session.post(f"{url}/v2/models/digits/infer", json=body) as answer:
            return Said(status=answer.status, document=await answer.json(content_type=None))

    connector = aiohttp.TCPConnector(limit=at_once)
    headers = {"Authorization": f"Bearer {key}", **(headers or {})}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        return list(await asyncio.gather(*(one(session) for _ in range(count))))


def statuses(answers: Sequence[Said]) -> Counter[int]:
    """How often each status came."""
    return Counter(a.status for a in answers)
