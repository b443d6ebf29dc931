"""What the gateway's tests do from the outside: models and customers in the registry, a gateway, callers, and a worker
that answers at once without any model."""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from uuid import uuid4

import aiohttp

from infra.kafka import BusUnavailable, KafkaError, KeyedRecord, open_consumer, open_producer
from infra.postgres import connect
from infra.redis import RedisError, open_redis
from infra.settings import operator_settings
from infra.tasks import end
from schemas.codec import decode, encode
from schemas.ids import finished_id
from schemas.keys import RedisKeys, worker_group
from schemas.manifest import Manifest
from schemas.records import InferenceFinished, InferenceRequested, Outcome, Task
from schemas.tensors import Tensor
from schemas.topics import RESULTS, requests_topic
from tests.fakes import manifest, text_manifest
from tests.processes import ROOT, Process, free_port

API = ["python", "-m", "api"]
DIGITS, TEXTS = manifest(), text_manifest()


def run(env: Mapping[str, str], *command: str, status: int = 0) -> Any:
    """What an `inferlog` command printed as JSON; for another expected `status`, its error text."""
    done = subprocess.run(
        [sys.executable, "-m", "infra.cli", *command],
        env={**env, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout) if status == 0 else done.stderr


async def register(env: Mapping[str, str], model: str, m: Manifest, *, pool: str = "default") -> None:
    """A routed model, as publishing leaves it in the registry; its artifacts are never read here."""
    connection = await connect(operator_settings(env).postgres)
    try:
        uri = f"s3://inferlog/sha256/{m.version}/"
        await connection.execute("INSERT INTO models VALUES ($1, $2) ON CONFLICT DO NOTHING", model, m.task.value)
        await connection.execute(
            "INSERT INTO model_versions VALUES ($1, $2, $3, $4, now(), now())",
            m.version,
            model,
            m.to_bytes().decode(),
            uri,
        )
        await connection.execute(
            "INSERT INTO route_revisions (model, revision, change, effective_at, version, pool, spread, price_id, "
            "actor, made_at) SELECT $1, count(*) + 1, 'ROUTED', clock_timestamp(), $2, $3, 2, 'standard-v1', 'a test', "
            "now() FROM route_revisions WHERE model = $1",
            model,
            m.version,
            pool,
        )
    finally:
        await connection.close()


def customer(
    env: Mapping[str, str], name: str, *, requests_per_s: int = 100_000, burst: int = 100_000
) -> dict[str, Any]:
    """A customer with one key: what both commands print."""
    made = run(
        env, "customers", "create", name, "--requests-per-s", str(requests_per_s), "--burst", str(burst), "--json"
    )
    return {**made, **run(env, "keys", "create", made["customer_id"], "--json")}


@dataclass
class Reply:
    """An HTTP answer, read whole."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Caller:
    """Calls one gateway with one key. No call hangs: past `timeout_s` the test fails."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str | None) -> None:
        self._session = session
        self.url = url
        self.key = key

    def with_key(self, key: str | None) -> Caller:
        """The same gateway, another key."""
        return Caller(self._session, self.url, key)

    async def call(self, method: str, path: str, body: Any = None, *, timeout_s: float = 15.0, **headers: str) -> Reply:
        """`body` is sent as it is when it is bytes or a stream, else as JSON."""
        if self.key is not None:
            headers.setdefault("Authorization", f"Bearer {self.key}")
        data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.request(
            method, self.url + path, data=data, headers=headers, timeout=timeout
        ) as answer:
            return Reply(answer.status, answer.headers, await answer.text())

    async def infer(self, items: int = 1, *, model: str = "digits", timeout_s: float = 15.0, **document: Any) -> Reply:
        """One call to the digits model."""
        body = {"inputs": [pixels(items)], **document}
        return await self.call("POST", f"/v2/models/{model}/infer", body, timeout_s=timeout_s)


def pixels(items: int = 1, **changes: Any) -> dict[str, Any]:
    """A valid input of the digits model, with any field replaced."""
    return {"name": "pixels", "datatype": "FP32", "shape": [items, 64], "data": [0.5] * (64 * items), **changes}


@dataclass
class Gateway:
    """A running gateway process."""

    process: Process
    url: str
    env: dict[str, str]
    _sessions: list[aiohttp.ClientSession] = field(default_factory=list)


def start_gateway(spawn: Any, env: Mapping[str, str], *, wait: bool = True, **settings: str) -> Gateway:
    """A gateway on a port of its own; with `wait`, one that is ready."""
    port = free_port()
    own = {**env, "INFERLOG_API_PORT": str(port), **settings}
    gateway = Gateway(spawn(API, own, name="api"), f"http://127.0.0.1:{port}", own)
    if wait:
        gateway.process.wait_ready(gateway.url + "/readyz")
    return gateway


@asynccontextmanager
async def calling(gateway: Gateway, key: str | None) -> AsyncIterator[Caller]:
    """A caller with connections of its own."""
    async with aiohttp.ClientSession() as session:
        yield Caller(session, gateway.url, key)


def echo(request: InferenceRequested) -> InferenceFinished:
    """A made-up result that tells the request apart: the first input values, or the texts' lengths."""
    if request.task is Task.TENSORS:
        sums = [sum(struct.unpack_from("<64f", request.inputs[0].data, 256 * i)) for i in range(request.item_count)]
        output = Tensor(
            name="logits",
            datatype="FP32",
            shape=(request.item_count, 10),
            data=b"".join(struct.pack("<10f", s, *range(1, 10)) for s in sums),
        )
        quantities = {"requests": 1, "items": request.item_count}
    else:
        sizes = [len(e) for e in request.inputs[0].elements()]
        output = Tensor(
            name="embedding",
            datatype="FP32",
            shape=(request.item_count, 4),
            data=b"".join(struct.pack("<4f", n, 1, 2, 3) for n in sizes),
        )
        quantities = {"requests": 1, "items": request.item_count, "tokens": sum(sizes)}
    return InferenceFinished(
        event_id=finished_id(request.request_id),
        occurred_at=datetime.now(timezone.utc),
        request_id=request.request_id,
        customer_id=request.customer_id,
        model=request.model,
        version=request.version,
        outcome=Outcome.SUCCEEDED,
        outputs=(output,),
        price_id=request.price_id,
        quantities=quantities,
        admitted_at=request.occurred_at,
        worker="echo",
        batch_id=uuid4(),
        batch_items=1,
        queue_us=0,
        run_us=0,
    )


@asynccontextmanager
async def echo_worker(
    env: Mapping[str, str], *, hints: bool = True, copies: bool = True
) -> AsyncIterator[list[InferenceRequested]]:
    """Answers every request on the default pool, on the log and then in Redis; yields the list of those it has seen.

    Without `hints`, nothing is published: the gateway has to look. Without `copies`, Redis has no results either.
    """
    settings = operator_settings(env)
    keys, seen = RedisKeys(namespace=settings.kafka.namespace), []

    async def work() -> None:
        while True:
            try:
                await serve()
            except (KafkaError, BusUnavailable):
                await asyncio.sleep(0.05)  # what was not committed comes again

    async def serve() -> None:
        topic = requests_topic().in_namespace(settings.kafka.namespace).name
        results = RESULTS.in_namespace(settings.kafka.namespace).name
        group = worker_group(settings.kafka.namespace, "default")
        async with (
            open_consumer(settings.kafka, group=group) as consumer,
            open_producer(settings.kafka) as producer,
            open_redis(settings.redis) as redis,
        ):
            consumer.subscribe([topic])
            while True:
                for records in (await consumer.getmany(timeout_ms=100)).values():
                    requests = [decode(record.value, InferenceRequested) for record in records]
                    seen.extend(requests)
                    ends = {request.request_id: encode(echo(request)) for request in requests}
                    logged = [KeyedRecord(results, request_id.bytes, end) for request_id, end in ends.items()]
                    sent, _ = await producer.enqueue_all(logged, timeout_s=5)
                    await producer.acknowledged([future for future, _ in sent], timeout_s=5)
                    with suppress(RedisError):  # the log has them
                        for request in requests if copies else ():
                            await redis.set(keys.result(request.request_id), ends[request.request_id], nx=True, ex=60)
                            if hints:
                                await redis.publish(keys.results_channel(request.reply_to), request.request_id.bytes)
                await consumer.commit()

    task = asyncio.ensure_future(work())
    try:
        yield seen
    finally:
        await end([task], within_s=20.0)
        with suppress(asyncio.CancelledError):
            task.result()


@dataclass
class Desk:
    """One test's gateway, with a ready customer."""

    gateway: Gateway
    caller: Caller
    acme: dict[str, Any]
    seen: list[InferenceRequested]


@asynccontextmanager
async def open_desk(spawn: Any, env: Mapping[str, str], **settings: str) -> AsyncIterator[Desk]:
    """Two models, one customer, a gateway and an answering worker."""
    await register(env, "digits", DIGITS)
    await register(env, "texts", TEXTS)
    acme = customer(env, "Acme")
    gateway = start_gateway(spawn, env, **settings)
    async with echo_worker(env) as seen, calling(gateway, acme["key"]) as caller:
        yield Desk(gateway, caller, acme, seen)
