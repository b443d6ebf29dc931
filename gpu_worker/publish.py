"""Check a model and make it a version: files on disk become immutable objects in S3 and rows in the model registry.

    bundle folder -> manifest -> asked the registry -> loaded and tried -> 1 S3 -> 2 registry, route and their facts
                                         \\-> published already ----------> 2 route and its fact

A version exists for callers only once a route names it, so a publish that died half-way is invisible and is finished by
running it again. Step 2 is `registry.register`, one transaction: die before it, and publishing again finds the files.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpu_worker.bundle import BundleError
from gpu_worker.errors import MachineError, ModelError
from gpu_worker.routing import PublishConflict, Rerouted
from infra.kafka_admin import open_admin
from infra.postgres import Connection, queries
from infra.s3 import ObjectMissing, Store
from infra.settings import KafkaSettings
from schemas.manifest import MANIFEST_FILE, Manifest, artifact_prefix
from schemas.records import Task
from schemas.topics import requests_topic

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What publishing did. `created` is False when the same bytes were this model's version already; `rerouted` is what
    became of its route, None where that was left alone."""

    model: str
    version: str
    created: bool
    rerouted: Rerouted | None
    size_bytes: int


async def require_pool(settings: KafkaSettings, pool: str) -> None:
    """The pool has a queue; a route to one without would take its model down.

    Raises PublishConflict, BusUnavailable.
    """
    topic = requests_topic(pool).in_namespace(settings.namespace).name
    async with open_admin(settings) as admin:
        # All topics: asking for one by name would create it on a broker that creates topics by itself.
        if topic not in await admin.partition_counts():
            raise PublishConflict(
                f"pool '{pool}' has no queue (topic '{topic}' does not exist); make it with  "
                f"inferlog provision --pool {pool}"
            )


def require_runnable(folder: Path, manifest: Manifest, progress: Progress) -> None:
    """Load the bundle that `manifest` was read from and run it. Raises BundleError naming what is at fault."""
    from gpu_worker import runner, text  # seconds of torch, which nothing else here needs

    required_file = {"safetensors": runner.WEIGHTS_FILE, "pt2": runner.PROGRAM_FILE}
    present = {f.name for f in manifest.files}
    needed = {required_file[manifest.layout]}
    if manifest.task is Task.EMBEDDINGS:
        needed.add(text.TOKENIZER_FILE)
    if missing := needed - present:
        raise BundleError(f"files: {sorted(missing)} missing, which layout '{manifest.layout}' needs")
    progress(f"checking: loading {manifest.layout} and running a sample of 1 and of several")
    try:
        runner.load(folder, manifest, device="cpu")
    except (ModelError, MachineError) as error:
        raise BundleError(f"{folder}: {error}") from error


async def is_published(connection: Connection, store: Store, model: str, manifest: Manifest) -> bool:
    """Whether publishing this would change nothing: the registry has the version, and S3 its manifest.

    The registry's row comes last, so with it everything was checked and stored; the look at S3 is for a bucket that
    was emptied since, which publishing again fills.
    """
    if not await connection.fetchval(queries("gpu_worker")["version_exists"], model, manifest.version):
        return False
    key = artifact_prefix(manifest.version) + MANIFEST_FILE
    try:
        return await asyncio.to_thread(store.get, key) == manifest.to_bytes()
    except ObjectMissing:
        return False


def store_files(store: Store, folder: Path, manifest: Manifest, progress: Progress) -> None:
    """1 of publishing: files, then the manifest that names them. Die in between: no manifest, so nothing refers to it.

    Raises PublishConflict when an object under the version's name holds other bytes, StoreUnavailable.
    """
    prefix = artifact_prefix(manifest.version)
    for file in manifest.files:
        data = (folder / file.name).read_bytes()
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise PublishConflict(f"{file.name}: changed while it was being published")
        _store_file(store, prefix + file.name, data, progress)
    _store_file(store, prefix + MANIFEST_FILE, manifest.to_bytes(), progress)


def _store_file(store: Store, key: str, data: bytes, progress: Progress) -> None:
    name = key.rpartition("/")[2]
    size = f"{name}, {len(data) / 1e6:.1f} MB"
    if store.put_once(key, data):
        progress(f"stored: {size}")
        return
    if store.get(key) != data:
        raise PublishConflict(
            f"s3://{store.bucket}/{key} holds other bytes than its name says; remove the object first"
        )
    progress(f"stored before: {size}")
