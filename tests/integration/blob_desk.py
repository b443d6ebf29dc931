"""What the claim check's tests do from the outside: a model with large inputs and outputs, requests whose inputs lie in
S3, and what lies there and on the log."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import torch
from safetensors.torch import save_file

from gpu_worker.architectures import build as build_architecture
from gpu_worker.bundle import read_bundle
from infra.kafka import TopicPartition, open_consumer
from infra.redis import open_redis
from infra.s3 import Store
from infra.settings import worker_settings
from schemas.claims import BLOB_PREFIX, checked_in
from schemas.codec import decode
from schemas.keys import RedisKeys
from schemas.manifest import Manifest
from schemas.records import InferenceFinished, InferenceRequested
from schemas.tensors import Tensor
from schemas.topics import requests_topic
from tests.integration.api_desk import register
from tests.integration.worker_desk import admitted, store_bundle

WIDTH = 512
OUTPUTS = 1024
#: So many items of the wide model are exactly INFERLOG_CLAIM_CHECK_BYTES of inputs, and half as many of outputs.
INLINE_ITEMS = 256 * 1024 // (4 * WIDTH)


def wide_bundle(folder: Path) -> Path:
    """A bundle whose inputs are 2 KiB and whose outputs are 4 KiB an item, and depend on each other."""
    folder.mkdir()
    args = {"inputs": WIDTH, "hidden": 4, "layers": 1, "outputs": OUTPUTS}
    torch.manual_seed(4)
    save_file(build_architecture("mlp", args).state_dict(), folder / "weights.safetensors")
    description = {
        "task": "TENSORS",
        "layout": "safetensors",
        "architecture": "mlp",
        "architecture_args": args,
        "files": ["weights.safetensors"],
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, WIDTH]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, OUTPUTS]}],
        "max_batch_items": 64,
        "max_length": 0,
        "torch_version": torch.__version__,
        "producer": f"a test, {uuid4()}",
    }
    (folder / "model.json").write_text(json.dumps(description))
    return folder


async def register_wide(env: Mapping[str, str], folder: Path) -> Manifest:
    """The wide model, published and routed as `wide`."""
    bundle = wide_bundle(folder)
    store_bundle(env, bundle)
    manifest = read_bundle(bundle)
    await register(env, "wide", manifest)
    return manifest


def document(rows: Sequence[int]) -> io.BytesIO:
    """A call to the wide model; each item holds one digit, which tells it apart."""
    data = ",".join(f"{row % 10}," * (WIDTH - 1) + f"{row % 10}" for row in rows)
    text = f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":[{len(rows)},{WIDTH}],"data":[{data}]}}]}}'
    return io.BytesIO(text.encode())


def inputs(items: int, value: float = 0.5) -> tuple[Tensor, ...]:
    """Inputs of the model whose answers are constant, 256 bytes an item."""
    data = struct.pack("<64f", *[value] * 64) * items
    return (Tensor(name="pixels", datatype="FP32", shape=(items, 64), data=data),)


class Bucket:
    """The installation's blobs, seen by somebody with the keys of its bucket."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.store = Store(worker_settings(env).s3)
        self._client: Any = self.store._client

    def referring(self, version: str, *, items: int = 1, **changes: Any) -> InferenceRequested:
        """A request whose inputs are in the bucket, as a gateway leaves it."""
        request = admitted(version, inputs=inputs(items), item_count=items, **changes)
        carried, kept = checked_in(request.inputs, request.request_id, inline_bytes=0)
        for key, data in kept.items():
            self.store.put_once(key, data)
        return replace(request, inputs=carried)

    def keys(self, request_id: UUID) -> list[str]:
        """Keys of a request's blobs."""
        found = self._client.list_objects_v2(Bucket=self.store.bucket, Prefix=f"{BLOB_PREFIX}{request_id}/")
        return [entry["Key"] for entry in found.get("Contents", [])]

    def overwrite(self, key: str, data: bytes) -> None:
        """Other bytes under the same key."""
        self._client.put_object(Bucket=self.store.bucket, Key=key, Body=data)

    def rules(self) -> list[dict[str, Any]]:
        """The bucket's rules for the life of objects."""
        found: list[dict[str, Any]] = self._client.get_bucket_lifecycle_configuration(Bucket=self.store.bucket)["Rules"]
        return found

    def set_rules(self, rules: Sequence[dict[str, Any]]) -> None:
        """These rules and no others."""
        self._client.put_bucket_lifecycle_configuration(
            Bucket=self.store.bucket, LifecycleConfiguration={"Rules": list(rules)}
        )

    def drop(self) -> None:
        """No bucket any more; it must be empty."""
        self._client.delete_bucket(Bucket=self.store.bucket)

    def delete(self, key: str) -> None:
        """Nothing under the key any more."""
        self._client.delete_object(Bucket=self.store.bucket, Key=key)


async def logged_requests(env: Mapping[str, str]) -> dict[UUID, tuple[int, InferenceRequested]]:
    """Every request on the log with the size of its record in bytes, by id."""
    kafka = worker_settings(env).kafka
    topic = requests_topic().in_namespace(kafka.namespace)
    found = {}
    async with open_consumer(kafka, group=None) as consumer:
        places = [TopicPartition(topic.name, partition) for partition in range(topic.partitions)]
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        while [p for p in places if await consumer.position(p) < ends[p]]:
            for records in (await consumer.getmany(timeout_ms=100)).values():
                for record in records:
                    request = decode(record.value, InferenceRequested)
                    found[request.request_id] = (len(record.value), request)
    return found


async def cached(env: Mapping[str, str], request_id: UUID) -> bytes | None:
    """The copy of a result in Redis, framed."""
    settings = worker_settings(env).redis
    async with open_redis(settings) as redis:
        value: bytes | None = await redis.get(RedisKeys(namespace=settings.namespace).result(request_id))
        return value


def blob_keys(finished: InferenceFinished) -> list[str]:
    """Keys that a result refers to."""
    return [t.blob.key for t in finished.outputs if t.blob]
