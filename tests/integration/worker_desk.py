"""What the worker's tests do from the outside: publish models, put requests on the log, read what comes back."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import torch
from safetensors.torch import save_file

from gpu_worker.architectures import build as build_architecture
from gpu_worker.bundle import read_bundle
from gpu_worker.publish import store_files
from infra.kafka import AIOKafkaConsumer, Producer, TopicPartition, open_consumer, open_producer
from infra.kafka_admin import open_admin
from infra.local.stack import Stack
from infra.s3 import Store
from infra.settings import KafkaSettings, WorkerSettings, worker_settings
from schemas.codec import decode
from schemas.codec import encode as encode_record
from schemas.keys import worker_group
from schemas.records import DeadLetter, InferenceFinished, InferenceRequested, Outcome, UsageRecorded
from schemas.topics import DEAD_LETTERS, RESULTS, USAGE, partition_for, requests_topic
from streams.replay.conservation import RequestBook
from tests.conditions import eventually
from tests.factories import requested
from tests.processes import Process, free_port

WORKER = ["python", "-m", "gpu_worker"]
ARGS = {"inputs": 64, "hidden": 4, "layers": 1, "outputs": 10}


def constant_bundle(folder: Path, value: float) -> Path:
    """A bundle whose model answers `value` ten times, whatever it is sent: its outputs say which version ran."""
    folder.mkdir()
    model = build_architecture("mlp", ARGS)
    state = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
    last = max(name for name in state if name.endswith("bias"))
    state[last] = torch.full_like(state[last], value)
    save_file(state, folder / "weights.safetensors")
    description = {
        "task": "TENSORS",
        "layout": "safetensors",
        "architecture": "mlp",
        "architecture_args": ARGS,
        "files": ["weights.safetensors"],
        "inputs": [{"name": "pixels", "datatype": "FP32", "shape": [-1, 64]}],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}],
        "max_batch_items": 64,
        "max_length": 0,
        "torch_version": torch.__version__,
        # Versions are content addresses in a bucket that all tests share: no two tests may make the same one.
        "producer": f"a test, {uuid4()}",
    }
    (folder / "model.json").write_text(json.dumps(description))
    return folder


def store_bundle(env: Mapping[str, str], folder: Path) -> str:
    """The version of a bundle whose files are now in S3; the registry is the API's business, not the worker's."""
    manifest = read_bundle(folder)
    store_files(Store(worker_settings(env).s3), folder, manifest, lambda line: None)
    return manifest.version


def value_of(finished: InferenceFinished) -> float:
    """What a constant model answered."""
    (values,) = (set(struct.unpack("<10f", finished.outputs[0].data)),)
    (value,) = values
    return float(value)


def overwrite(env: Mapping[str, str], key: str, data: bytes) -> None:
    """What only an intruder does: other bytes under a version's key."""
    store: Any = Store(worker_settings(env).s3)
    store._client.put_object(Bucket=store.bucket, Key=key, Body=data)


def start_worker(spawn: Any, env: Mapping[str, str], *, changed: str = "", **settings: str) -> Process:
    """A worker that has joined its group. `changed` is Python run in its process first: how a mechanism is removed."""
    port = free_port()
    command = ["python", "-c", f"{changed}\nfrom gpu_worker.app import main\nmain()"] if changed else WORKER
    process: Process = spawn(command, {**env, "INFERLOG_WORKER_PORT": str(port), **settings}, name="worker")
    process.wait_ready(f"http://127.0.0.1:{port}/readyz")
    return process


def admitted(version: str, *, within_s: float = 30.0, **changes: Any) -> InferenceRequested:
    """A request admitted now."""
    now = datetime.now(timezone.utc)
    fields: dict[str, Any] = {"occurred_at": now, "deadline_at": now + timedelta(seconds=within_s), "version": version}
    return requested(**{**fields, **changes})


@dataclass
class Seen:
    """Everything that came back, by request id, in the order of the log."""

    results: dict[UUID, list[InferenceFinished]] = field(default_factory=lambda: defaultdict(list))
    usage: dict[UUID, list[UsageRecorded]] = field(default_factory=lambda: defaultdict(list))
    dead_letters: list[DeadLetter] = field(default_factory=list)


class Desk:
    """One test's view of the log."""

    def __init__(self, settings: KafkaSettings, producer: Producer, consumer: AIOKafkaConsumer) -> None:
        self.settings = settings
        self.producer = producer
        self._consumer = consumer
        self.topic = requests_topic().in_namespace(settings.namespace).name
        self._partitions = requests_topic().partitions
        self.seen = Seen()
        self._book = RequestBook()

    async def submit(self, requests: Sequence[InferenceRequested], *, partition: int | None = None) -> None:
        """As the gateway does: each on a partition of its version, all acknowledged."""
        futures = [
            await self.producer.enqueue(
                self.topic,
                encode_record(r),
                key=r.request_id.bytes,
                partition=partition
                if partition is not None
                else partition_for(r.version, r.request_id.int, partitions=self._partitions, spread=2),
                timeout_s=10,
            )
            for r in requests
        ]
        await self.producer.acknowledged(futures, timeout_s=10)
        for request, future in zip(requests, futures, strict=True):
            written = future.result()
            self._book.add_request((written.topic, written.partition, written.offset), request)

    async def read(self) -> Seen:
        """Everything on the log up to now."""
        ends = await self._consumer.end_offsets(self._consumer.assignment())
        while True:
            behind = [tp for tp, end in ends.items() if await self._consumer.position(tp) < end]
            if not behind:
                return self.seen
            for records in (await self._consumer.getmany(timeout_ms=100)).values():
                for record in records:
                    self._take((record.topic, record.partition, record.offset), record.value)

    async def results_of(
        self, requests: Sequence[InferenceRequested], *, timeout_s: float = 30.0
    ) -> list[InferenceFinished]:
        """The first result of each, once there is one for all."""

        async def all_there() -> bool:
            seen = await self.read()
            missing = [r for r in requests if r.request_id not in seen.results]
            if missing:
                raise LookupError(f"{len(missing)} of {len(requests)} have no result")
            return True

        await eventually(all_there, timeout_s=timeout_s, what="results")
        return [self.seen.results[r.request_id][0] for r in requests]

    async def batches_are_uniform(self) -> bool:
        """Whether all requests of each batch name one version."""
        versions: dict[UUID, set[str]] = defaultdict(set)
        for results in (await self.read()).results.values():
            versions[results[0].batch_id].add(results[0].version)
        return all(len(found) == 1 for found in versions.values())

    async def committed(self) -> int:
        """Sum of the group's committed positions."""
        return sum((await self._positions()).values())

    async def everything_committed(self, count: int) -> None:
        """Wait until the group has committed this many records."""

        async def enough() -> bool:
            found = await self.committed()
            if found < count:
                raise LookupError(f"{found} of {count} are committed")
            return True

        await eventually(enough, timeout_s=60, what="the group to commit everything")

    async def violations(self) -> list[str]:
        """What the proofs of I3 and I4 find wrong with the log as it is now."""
        committed = await self._positions()
        await self.read()
        conservation, _, _ = self._book.prove_conservation(committed=committed)
        return [f.what for v in (self._book.prove_versions(), conservation) for f in v.findings]

    async def _positions(self) -> dict[tuple[str, int], int]:
        async with open_admin(self.settings) as admin:
            found = await admin.committed(worker_group(self.settings.namespace, "default"))
        return {(place.topic, place.partition): at for place, at in found.items()}

    def _take(self, place: tuple[str, int, int], value: bytes) -> None:
        topic = place[0]
        if topic.endswith(RESULTS.name):
            finished = decode(value, InferenceFinished)
            self.seen.results[finished.request_id].append(finished)
            self._book.add_result(place, finished)
        elif topic.endswith(USAGE.name):
            usage = decode(value, UsageRecorded)
            self.seen.usage[usage.request_id].append(usage)
            self._book.add_usage(usage)
        else:
            self.seen.dead_letters.append(decode(value, DeadLetter))


async def wait_for_s3_alone(
    desk: Desk, stack: Stack, version: str, needing: Callable[[float], InferenceRequested]
) -> tuple[InferenceFinished, list[InferenceRequested]]:
    """While S3 is away what needs it waits, until its deadline, and 50 of a loaded version behind it are served.

    `needing` makes a request that cannot be served without S3, of so many seconds. Returns the result of the one that
    lived to see S3 again, and all the requests that succeeded.
    """
    warm = admitted(version)
    await desk.submit([warm])
    await desk.results_of([warm])
    hopeless, hopeful = needing(4), needing(120)
    stack.stop_part("s3", kill=True)
    try:
        await desk.submit([hopeless, hopeful], partition=1)
        others = [admitted(version) for _ in range(50)]
        await desk.submit(others, partition=1)
        assert all(value_of(r) == 1.0 for r in await desk.results_of(others))
        (expired,) = await desk.results_of([hopeless])
        assert expired.outcome is Outcome.EXPIRED
        assert hopeful.request_id not in (await desk.read()).results
    finally:
        stack.start_part("s3")
    (served,) = await desk.results_of([hopeful], timeout_s=60)
    return served, [warm, hopeful, *others]


@asynccontextmanager
async def open_desk(env: Mapping[str, str]) -> AsyncIterator[Desk]:
    """A desk on a test's own topics."""
    settings: WorkerSettings = worker_settings(env)
    kafka = settings.kafka
    async with open_producer(kafka) as producer, open_consumer(kafka, group=None) as consumer:
        consumer.assign(
            [
                TopicPartition(topic.in_namespace(kafka.namespace).name, partition)
                for topic in (RESULTS, USAGE, DEAD_LETTERS)
                for partition in range(topic.partitions)
            ]
        )
        yield Desk(kafka, producer, consumer)
