"""Stand-ins for the servers behind the gateway's ports, as plain as the ports: a dict, a list, a switch for "away"."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from itertools import count
from typing import Any
from uuid import UUID, uuid4

from api.access.key_record import CustomerRecord, KeyRecord, Terms, base_rate
from api.access.key_shape import MintedKey, mint
from api.access.keys import KeySourceAway
from api.admission.buckets import Limit
from api.admission.caller import Caller
from api.admission.demand import Cost, Demand
from api.limits.limiter import LimiterAway
from api.limits.plans import DECIDE
from api.results.cache import CacheAway
from api.routing.catalogue import Alias, RegisteredVersion
from api.routing.versions import Changes, RegistryAway
from infra.kafka import BusUnavailable
from infra.redis import LuaCall
from schemas.headers import Headers
from schemas.manifest import Manifest, TensorSpec
from schemas.records import Task
from schemas.routes import Revision, Route

CREATED = datetime(2026, 3, 1, tzinfo=timezone.utc)


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def manifest(
    *,
    task: Task = Task.TENSORS,
    inputs: tuple[TensorSpec, ...] = (TensorSpec(name="pixels", datatype="FP32", shape=(-1, 64)),),
    outputs: tuple[TensorSpec, ...] = (TensorSpec(name="logits", datatype="FP32", shape=(-1, 10)),),
    max_batch_items: int = 32,
    producer: str = "test",
) -> Manifest:
    """A small valid manifest; another `producer` gives another version."""
    return Manifest(
        task=task,
        layout="safetensors",
        architecture="mlp",
        architecture_args={},
        files=(),
        inputs=inputs,
        outputs=outputs,
        max_batch_items=max_batch_items,
        max_length=0,
        torch_version="2",
        producer=producer,
    )


def text_manifest(**changes: Any) -> Manifest:
    """A model that makes embeddings of width 4."""
    return manifest(
        task=Task.EMBEDDINGS,
        inputs=(TensorSpec(name="text", datatype="BYTES", shape=(-1,)),),
        outputs=(TensorSpec(name="embedding", datatype="FP32", shape=(-1, 4)),),
        **changes,
    )


def registered(model: str, m: Manifest, *, created_at: datetime = CREATED) -> RegisteredVersion:
    """A version as registered."""
    return RegisteredVersion(
        model=model,
        version=m.version,
        manifest=m,
        artifact_uri=f"s3://inferlog/sha256/{m.version}/",
        created_at=created_at,
    )


_revisions = count(1)


def routed(
    model: str,
    m: Manifest,
    *,
    pool: str = "default",
    spread: int = 2,
    at: datetime | None = None,
    canaries: Mapping[str, Sequence[int]] | None = None,
    pins: Mapping[str, str] | None = None,
) -> Revision:
    """A route to a version, later than every other one made here; `at` schedules it."""
    route = Route(
        version=m.version,
        pool=pool,
        spread=spread,
        price_id="standard-v1",
        canaries=canaries or {},
        pins=pins or {},
    )
    return Revision(
        model=model, number=next(_revisions), route=route, effective_at=at or CREATED, is_scheduled=at is not None
    )


def demand(
    customer_id: str, key_id: str, limits: tuple[Limit, ...], *, items: int = 1, request_id: UUID | None = None
) -> Demand:
    """What a call of this key would take."""
    now = datetime.now(timezone.utc)
    return Demand(
        caller=Caller(customer_id=customer_id, key_id=key_id, limits=limits),
        model="digits",
        cost=Cost(items=items),
        request_id=request_id or uuid4(),
        admitted_at=now,
        until=now + timedelta(seconds=10),
    )


class FakeKeys:
    """Implements KeySource. `away` makes every look-up fail; `lookups` counts them."""

    def __init__(self) -> None:
        self.records: dict[str, KeyRecord] = {}
        self.away = False
        self.lookups = 0

    def add(self, *, environment: str = "test", expires_at: datetime | None = None, revoked: bool = False) -> MintedKey:
        minted = mint(environment)
        terms = Terms(rates=(base_rate(requests_per_s=10, burst=5),))
        self.records[minted.key_id] = KeyRecord(
            key_id=minted.key_id,
            customer=CustomerRecord(customer_id="cust_a", terms=terms),
            terms=terms,
            secret_sha256=minted.secret_sha256,
            expires_at=expires_at,
            revoked=revoked,
        )
        return minted

    async def find(self, key_id: str) -> KeyRecord | None:
        self.lookups += 1
        await asyncio.sleep(0)
        if self.away:
            raise KeySourceAway("switched off")
        return self.records.get(key_id)


class FakeRegistry:
    """Implements Registry; tells everything each time, as a real one does while some transaction is open."""

    def __init__(self) -> None:
        self.all_routes: list[Revision] = []
        self.all_versions: list[RegisteredVersion] = []
        self.all_aliases: list[Alias] = []
        self.away = False
        self.horizon = 7

    async def changes(self, since: int) -> Changes:
        if self.away:
            raise RegistryAway("switched off")
        return Changes(
            horizon=self.horizon,
            versions=tuple(self.all_versions),
            revisions=tuple(self.all_routes),
            aliases=tuple(self.all_aliases),
        )


class FakeScript:
    """Implements Script: takes from every bucket for ever unless told otherwise. `batches` keeps batch sizes.

    `breaks` is raised; with `loses` the last answer of each round trip is missing.
    """

    def __init__(self) -> None:
        self.answer: Any = None
        self.away = False
        self.breaks: Exception | None = None
        self.loses = False
        self.batches: list[int] = []
        self.calls: list[LuaCall] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def run(self, calls: Sequence[LuaCall]) -> Sequence[Any]:
        self.batches.append(len(calls))
        self.calls += calls
        await self.hold.wait()
        if self.away:
            raise LimiterAway("switched off")
        if self.breaks is not None:
            raise self.breaks
        calls = calls[:-1] if self.loses else calls
        if self.answer is not None:
            return [self.answer for _ in calls]
        return [_taken(c) if c.start.script is DECIDE else 1 for c in calls]


def _taken(call: LuaCall) -> list[int]:
    return [1, 1_780_000_000_000_000, 0] + [7, 100] * int(call.start.args[1])


class FakeSender:
    """Implements Sender: keeps what was sent, or fails."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int | None, bytes | None, bytes]] = []
        self.headers: dict[str, bytes] = {}
        self.fails: Exception | None = None
        self.abandoned = False
        self.topics: Mapping[str, int] = {"inference.requests.default.v1": 8}

    async def send(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers | None = None,
        timeout_s: float,
    ) -> None:
        if self.fails is not None:
            raise self.fails
        self.headers = dict(headers or [])
        self.sent.append((topic, partition, key, value))

    async def partitions(self, topic: str, *, timeout_s: float) -> int:
        if topic not in self.topics:
            raise BusUnavailable(f"{topic}: unknown")
        return self.topics[topic]

    async def abandon(self) -> None:
        self.abandoned = True


class FakeCache:
    """Implements Cache. `put` stores a result; `hint` publishes its id as a worker would."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.away = False
        self.reads = 0
        self.subscriptions = 0
        self.put_backs = 0
        self.hints: asyncio.Queue[bytes | Exception] = asyncio.Queue()

    async def read(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        self.reads += 1
        if self.away:
            raise CacheAway("switched off")
        return [self.values.get(k) for k in keys]

    async def put_back(self, values: Mapping[str, bytes]) -> None:
        if self.away:
            raise CacheAway("switched off")
        self.put_backs += len(values)
        self.values = {**values, **self.values}

    @asynccontextmanager
    async def subscribe(self, channel: str) -> AsyncIterator[FakeCache]:
        if self.away:
            raise CacheAway("switched off")
        self.subscriptions += 1
        yield self

    async def next(self, timeout_s: float) -> bytes | None:
        hint = await self.hints.get()
        if isinstance(hint, Exception):
            raise hint
        return hint
