"""Whatever well-formed records lie on a topic of requests: the worker goes on, each ends once, honest ones are served.

The worker's own code from the poll to the results, with torch; only Kafka, Redis, S3 and the tokenizer are stand-ins.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gpu_worker import outcomes as outcomes_module
from gpu_worker import soundness
from gpu_worker import worker as worker_module
from gpu_worker.batching import Limits
from gpu_worker.blame import Blame
from gpu_worker.claims import LargeTensors
from gpu_worker.dead_letters import DeadLetters
from gpu_worker.endings import LONGEST_MESSAGE, Ran
from gpu_worker.errors import ModelError
from gpu_worker.held import Bounds, Held
from gpu_worker.inbox import Inbox
from gpu_worker.outcomes import KafkaRedisOutcomes
from gpu_worker.runner import LoadedModel
from gpu_worker.suspects import Suspects
from gpu_worker.worker import Worker
from infra.kafka import KeyedRecord, TopicPartition
from schemas.claims import blob_key
from schemas.codec import DecodeError, decode, encode
from schemas.manifest import Manifest, TensorSpec
from schemas.ranges import INT_MAX, LONG_MAX
from schemas.records import DeadLetter, InferenceFinished, InferenceRequested, Outcome, Task, UsageRecorded
from schemas.tensors import Tensor, bytes_tensor
from tests.blob_store import FakeBlobStore, claim_check
from tests.conditions import eventually
from tests.factories import encode_unchecked, floats, requested
from tests.strategies import records_of, tensors, texts, times

TOPIC = "inference.requests.default.v1"
NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)


def manifest(task: Task, inputs: TensorSpec, outputs: TensorSpec) -> Manifest:
    return Manifest(
        task=task, layout="", architecture="", architecture_args={}, files=(), inputs=(inputs,), outputs=(outputs,),
        max_batch_items=4, max_length=8, torch_version="", producer="",
    )  # fmt: skip


ROWS = TensorSpec(name="x", datatype="FP32", shape=(-1, -1))
NUMBER_MODEL = manifest(Task.TENSORS, ROWS, ROWS)
TEXT_MODEL = manifest(
    Task.EMBEDDINGS, TensorSpec(name="text", datatype="BYTES", shape=(-1,)), replace(ROWS, shape=(-1, 1))
)
NUMBERS, TEXTS, NOWHERE = NUMBER_MODEL.version, TEXT_MODEL.version, "c" * 64


def double(x: torch.Tensor) -> torch.Tensor:
    if bool((x == 13).any()):
        raise ValueError("thirteen")
    return x * 2


def lengths(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return mask.sum(1, keepdim=True).float()


class Letters:
    """A tokenizer: a token per letter."""

    def encode(self, found: Sequence[str]) -> list[list[int]]:
        return [[1, *map(ord, text[:7])] for text in found]


class Models:
    """A runner that has them loaded, and knows no others."""

    def __init__(self) -> None:
        letters: Any = Letters()
        self._models = {
            NUMBERS: LoadedModel(manifest=NUMBER_MODEL, device="cpu", forward=double, tokeniser=None),
            TEXTS: LoadedModel(manifest=TEXT_MODEL, device="cpu", forward=lengths, tokeniser=letters),
        }

    def ready(self, version: str) -> bool:
        return version in self._models

    async def prepare(self, version: str) -> None:
        raise ModelError(f"version {version[:12]}: there is none")

    async def run(self, version: str, requests: Sequence[InferenceRequested]) -> Ran:
        return self._models[version].run(requests)


@dataclass(frozen=True)
class Record:
    offset: int
    key: bytes | None
    value: bytes
    partition: int = 0
    topic: str = TOPIC


class Log:
    """Kafka: a partition of requests to poll, and what is written elsewhere."""

    def __init__(self, values: Sequence[bytes]) -> None:
        self._unread = [Record(offset, b"k", value) for offset, value in enumerate(values)]
        self.committed = 0
        self.results: list[InferenceFinished] = []
        self.usage: list[UsageRecorded] = []
        self.letters: list[DeadLetter] = []

    async def getmany(self, *, timeout_ms: int) -> Mapping[TopicPartition, list[Record]]:
        await asyncio.sleep(0.001)
        found, self._unread = self._unread, []
        return {TopicPartition(TOPIC, 0): found}

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        (self.committed,) = offsets.values()

    async def send(self, topic: str, value: bytes, **_: Any) -> None:
        self.letters.append(decode(value, DeadLetter))

    async def enqueue_all(self, records: Sequence[KeyedRecord], **_: Any) -> tuple[list[Any], list[KeyedRecord]]:
        for record in records:
            assert len(record.key) + len(record.value) + len(str(record.headers)) < 8 * 1024 * 1024
            if record.topic.endswith("results.v1"):
                self.results.append(decode(record.value, InferenceFinished))
            else:
                self.usage.append(decode(record.value, UsageRecorded))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return [(done, list(records))], []


class Redis:
    """Takes what it is given."""

    def pipeline(self, *, transaction: bool) -> Redis:
        return self

    def execute_command(self, *command: Any) -> None:
        assert all(isinstance(part, (str, bytes, int)) for part in command)

    async def execute(self) -> None:
        return


class NobodyBefore:
    async def settle(self, parts: Mapping[int, Held]) -> None:
        for held in parts.values():
            held.settle(range(0), {})


async def worked_off(values: Sequence[bytes], objects: Mapping[str, bytes]) -> Log:
    """A worker's life, from the first poll until all is committed. Raises what ended the worker."""
    log, store = Log(values), FakeBlobStore()
    kafka: Any = log
    redis: Any = Redis()
    store.objects.update(objects)
    check = claim_check(store)
    large, blame = LargeTensors(check), Blame()
    inbox = Inbox(kafka, DeadLetters(kafka, topic="dead"), NobodyBefore(), topic=TOPIC, bounds=Bounds())
    worker = Worker(
        name="w",
        inbox=inbox,
        claims=large,
        runner=Models(),
        outcomes=KafkaRedisOutcomes(kafka, redis, large, blame, namespace="", result_ttl_s=60, clock=NOW.timestamp),
        limits=Limits(linger_s=0.001),
        clock=NOW.timestamp,
        blame=blame,
        suspects=Suspects(),
    )
    stop = asyncio.Event()
    await inbox.on_partitions_assigned([TopicPartition(TOPIC, 0)])
    inbox.start()
    working = asyncio.create_task(worker.run(stop))
    try:
        await eventually(lambda: log.committed == len(values) or working.done(), timeout_s=20)
        stop.set()
        await working
    finally:
        working.cancel()
        await inbox.close()
        check.close()
    return log


ITEMS = st.sampled_from([-1, 0, 1, 2, 3, INT_MAX - 1, INT_MAX])
ODD_TEXTS = st.one_of(
    texts,
    st.sampled_from(["", "\0", "a\0b", "../../x", NUMBERS, TEXTS, NOWHERE, "x" * 201, "é" * 600, "y" * 5_000]),
)
MOMENTS = st.one_of(
    times,
    st.sampled_from([datetime(1, 1, 1, tzinfo=timezone.utc), datetime(9999, 12, 31, tzinfo=timezone.utc)]),
    st.integers(-4000, 4000).map(lambda s: NOW + timedelta(seconds=s)),
)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**62, LONG_MAX]), max_size=4)


def rarely(draw: st.DrawFn) -> bool:
    return draw(st.integers(0, 7)) == 7


@st.composite
def numbers(draw: st.DrawFn) -> Tensor:
    """Rows of numbers, mostly such as the model takes."""
    items, width = draw(st.integers(1, 5)), draw(st.integers(0, 2))
    values = draw(st.lists(st.sampled_from([1.0, 1.0, 13.0]), min_size=items * width, max_size=items * width))
    data = struct.pack(f"<{len(values)}f", *values)
    return Tensor(name="z" if rarely(draw) else "x", datatype="FP32", shape=(items, width), data=data)


@st.composite
def claims(draw: st.DrawFn, request: InferenceRequested) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A tensor that lies elsewhere, as Avro takes it, and what lies there: what is claimed, or not."""
    data, shape = draw(st.sampled_from([(bytes(8), [1, 2]), (bytes(4000), [1, 1000]), (struct.pack("<f", 13), [1, 1])]))
    digest = hashlib.sha256(data).hexdigest()
    key, size_bytes = blob_key(request.request_id, digest), len(data)
    if rarely(draw):
        key = draw(st.sampled_from(["outside/secret", "blobs/../x", "a\0", ""]))
    if rarely(draw):
        size_bytes = draw(st.sampled_from([-1, 0, 8, 33 * 2**20, 2**62, LONG_MAX]))
    if rarely(draw):
        shape = draw(SHAPES)
    tensor = {
        "name": "x",
        "datatype": draw(st.sampled_from(["FP32", "FP32", "FP32", "BYTES", "FP31"])),
        "shape": shape,
        "data": b"",
        "blob": {"key": key, "sha256": digest, "size_bytes": size_bytes},
    }
    return tensor, draw(st.sampled_from([{key: data}, {key: data}, {key: data + b"!"}, {}]))


def honest(value: float) -> InferenceRequested:
    return requested(version=NUMBERS, inputs=(floats("x", value, value),), occurred_at=NOW)


PARTS = st.sampled_from(["texts", "times", "inputs", "claim", "claim", "shape", "version", "nothing", "nothing"])


@st.composite
def forged(draw: st.DrawFn) -> tuple[bytes, dict[str, bytes]]:
    """An honest request of which some fields were replaced, and what lies in the store for it."""
    words = requested(version=TEXTS, task=Task.EMBEDDINGS, inputs=(_words(),), occurred_at=NOW)
    request = replace(draw(st.sampled_from([honest(1.0), words])), request_id=uuid4())
    anything = draw(records_of(InferenceRequested))
    names = [f.name for f in fields(InferenceRequested) if f.name != "request_id"]
    stolen = names if rarely(draw) else draw(st.sets(st.sampled_from(names), max_size=1))
    request = replace(request, **{name: getattr(anything, name) for name in stolen})
    objects: dict[str, bytes] = {}
    changes: dict[str, Any] = {}
    for part in draw(st.tuples(PARTS, PARTS)):
        if part == "texts":
            name = draw(st.sampled_from(["customer_id", "model", "version", "price_id", "reply_to", "traceparent"]))
            changes[name] = draw(ODD_TEXTS)
        elif part == "times":
            changes[draw(st.sampled_from(["occurred_at", "deadline_at"]))] = draw(MOMENTS)
        elif part == "inputs":
            one = numbers() if draw(st.booleans()) else st.one_of(numbers(), tensors, st.just(_words()))
            some = draw(st.lists(one, min_size=1 - rarely(draw), max_size=1 + rarely(draw)))
            items = some[0].item_count if some else 1
            request = replace(request, inputs=tuple(some), item_count=items, version=NUMBERS, task=Task.TENSORS)
        elif part == "claim":
            tensor, objects = draw(claims(request))
            changes["inputs"] = [tensor]
            request = replace(request, version=NUMBERS, task=Task.TENSORS)
        elif part == "shape":
            shape = draw(SHAPES | st.lists(st.integers(-(2**63), LONG_MAX), max_size=40))
            datatype = draw(st.sampled_from(["FP32", "BYTES", "FP31"]))
            odd = {"name": "x", "datatype": datatype, "shape": shape, "data": draw(st.sampled_from([b"", bytes(8)]))}
            changes["inputs"] = [{**odd, "blob": None}]
        elif part == "version":
            request = replace(request, version=draw(st.sampled_from([NUMBERS, TEXTS, NOWHERE])))
    if rarely(draw):
        changes["item_count"] = draw(ITEMS)
    return encode_unchecked(replace(request, item_count=request.item_count % INT_MAX), **changes), objects


def _words() -> Tensor:
    return bytes_tensor("text", [b"hello"])


def decoded(value: bytes) -> InferenceRequested | None:
    try:
        return decode(value, InferenceRequested)
    except DecodeError:
        return None


def check(log: Log, values: Sequence[bytes], good: Sequence[InferenceRequested]) -> None:
    ends = [r.request_id for r in log.results]
    billed = {u.request_id: u for u in log.usage}
    assert len(billed) == len(log.usage)
    for offset, value in enumerate(values):
        request = decoded(value)
        told = 0 if request is None else ends.count(request.request_id)
        assert told + sum(letter.offset == offset for letter in log.letters) == 1, "one end each"
    for result in log.results:
        assert (result.outcome is Outcome.SUCCEEDED) == (result.request_id in billed)
        assert bool(result.error_code and result.error_message) == (result.outcome is not Outcome.SUCCEEDED)
        assert len(result.error_message or "") <= LONGEST_MESSAGE
    by_id = {r.request_id: r for v in values if (r := decoded(v)) is not None}
    for request_id, usage in billed.items():
        held = {t.shape[0] for t in by_id[request_id].inputs}
        assert {usage.quantities["items"]} == held, "billed is what the inputs hold"
        assert ("tokens" in usage.quantities) == (usage.version == TEXTS)
    for request in good:
        assert billed[request.request_id].quantities == {"requests": 1, "items": 1}
    assert log.committed == len(values)


# Made smaller, a failing example takes minutes; it is small as it is.
@settings(
    max_examples=60,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(forged(), min_size=1, max_size=4), st.integers(0, 4))
def test_forged_requests_end_alone_and_once(strangers: list[tuple[bytes, dict[str, bytes]]], place: int) -> None:
    values, objects = [value for value, _ in strangers], {k: v for _, kept in strangers for k, v in kept.items()}
    good = [replace(honest(2.0), request_id=uuid4()) for _ in range(3)]
    values[place:place] = [encode(request) for request in good[1:]]
    values.insert(0, encode(good[0]))
    with patch.object(outcomes_module, "_USAGE_LINGER_S", 0.0):
        log = asyncio.run(worked_off(values, objects))
    check(log, values, good)


CASES: dict[str, dict[str, Any]] = {
    "a task that is not its tensors'": {"task": Task.EMBEDDINGS},
    "NUL in the version": {"version": "a\0b"},
    "a version that leads elsewhere": {"version": "../../../../tmp/evil"},
    "no version": {"version": ""},
    "NUL in the customer": {"customer_id": "a\0b"},
    "more items than inputs": {"item_count": INT_MAX},
    "two such in one batch": {"item_count": INT_MAX - 1},
    "no inputs": {"inputs": ()},
    "items of nothing": {
        "inputs": (Tensor(name="x", datatype="FP32", shape=(INT_MAX, 0), data=b""),),
        "item_count": INT_MAX,
    },
    "admitted in the year 9999": {
        "occurred_at": datetime(9999, 12, 30, tzinfo=timezone.utc),
        "deadline_at": datetime(9999, 12, 31, tzinfo=timezone.utc),
    },
    "a deadline in the year 9999": {"deadline_at": datetime(9999, 12, 31, tzinfo=timezone.utc)},
    "a customer of megabytes": {"customer_id": "c" * 5_000_000},
    "a tensor's name of megabytes": {"inputs": (floats("n" * 7_000_000, 1.0, 1.0),)},
    "a trace of megabytes": {"traceparent": "t" * 7_000_000},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_what_was_found_by_hand(changes: dict[str, Any]) -> None:
    good = [replace(honest(2.0), request_id=uuid4()) for _ in range(2)]
    bad = [replace(honest(1.0), request_id=uuid4(), **changes) for _ in range(2)]
    values = [encode(good[0]), *map(encode_unchecked, bad), encode(good[1])]
    log = asyncio.run(worked_off(values, {}))
    check(log, values, good)
    assert len(log.usage) == len(good)


@pytest.mark.parametrize(
    ("where", "what"),
    [
        pytest.param(worker_module, "require_sound", id="no check before the batch"),
        pytest.param(soundness, "_require_times", id="no check of times"),
    ],
)
def test_without_the_check_something_false_is_run_or_billed(where: Any, what: str) -> None:
    bad = replace(honest(1.0), item_count=INT_MAX, deadline_at=NOW + timedelta(days=9999))
    if where is soundness:
        bad = replace(bad, item_count=1)
    values = [encode_unchecked(bad)]
    with patch.object(where, what, lambda *_: None):
        log = asyncio.run(worked_off(values, {}))
    assert [r.outcome for r in log.results] == [Outcome.SUCCEEDED]
