"""Only bytes that a version's hash names are ever used, whatever S3, the disk or a dying process did before."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from gpu_worker.errors import MachineError, ModelError
from gpu_worker.weights import Weights
from infra.s3 import DigestMismatch, KeyRefused, ObjectMissing, StoreUnavailable
from schemas.manifest import ArtifactFile, Manifest, TensorSpec, artifact_prefix
from schemas.records import Task


class DictStore:
    """S3 in a dict, with the real one's refusals."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.away = False
        self.gets = 0

    def get(self, key: str) -> bytes:
        self.gets += 1
        if self.away:
            raise StoreUnavailable("connection refused")
        if key not in self.objects:
            raise ObjectMissing(key)
        return self.objects[key]

    def get_verified(self, key: str, target: Path, *, sha256: str) -> None:
        data = self.get(key)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise DigestMismatch(f"{key}: expected sha256 {sha256}")
        target.write_bytes(data)


def add_version(store: DictStore, data: bytes = b"weights", *, name: str = "weights.safetensors") -> str:
    spec = TensorSpec(name="x", datatype="FP32", shape=(-1, 1))
    manifest = Manifest(
        task=Task.TENSORS,
        layout="safetensors",
        architecture="mlp",
        architecture_args={},
        files=(ArtifactFile(name=name, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data)),),
        inputs=(spec,),
        outputs=(spec,),
        max_batch_items=1,
        max_length=0,
        torch_version="",
        producer="",
    )
    store.objects[artifact_prefix(manifest.version) + "manifest.json"] = manifest.to_bytes()
    store.objects[artifact_prefix(manifest.version) + name] = data
    return manifest.version


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def weights(store: DictStore, root: Path) -> Iterator[Weights]:
    cache = Weights(store, root, max_bytes=10**6)
    yield cache
    cache.close()


def versions_in(root: Path) -> set[str]:
    return {f.name for f in root.iterdir() if not f.name.startswith(".lock-")}


async def test_a_version_is_fetched_once_and_served_without_the_store(
    store: DictStore, weights: Weights, root: Path
) -> None:
    version = add_version(store)
    async with weights.use(version) as (folder, manifest):
        assert (folder / "weights.safetensors").read_bytes() == b"weights"
        assert manifest.version == version
    store.away = True
    async with weights.use(version):
        pass
    assert versions_in(root) == {version}


async def test_tampered_weights_are_refused_and_nothing_is_kept(store: DictStore, weights: Weights, root: Path) -> None:
    version = add_version(store)
    store.objects[artifact_prefix(version) + "weights.safetensors"] = b"wEights"
    with pytest.raises(ModelError, match="expected sha256"):
        async with weights.use(version):
            pass
    assert versions_in(root) == set()


async def test_a_manifest_that_is_not_the_versions_is_refused(store: DictStore, weights: Weights) -> None:
    version, other = add_version(store), add_version(store, b"other")
    store.objects[artifact_prefix(version) + "manifest.json"] = store.objects[artifact_prefix(other) + "manifest.json"]
    with pytest.raises(ModelError, match="the manifest stored for it has sha256"):
        async with weights.use(version):
            pass


@pytest.mark.parametrize("name", ["../escape", "a/b", "..", "manifest.json"])
async def test_a_file_name_that_leaves_the_folder_is_refused(
    store: DictStore, weights: Weights, root: Path, name: str
) -> None:
    version = add_version(store, name=name)
    with pytest.raises(ModelError):
        async with weights.use(version):
            pass
    assert versions_in(root) == set()
    assert not (root.parent / "escape").exists()


async def test_a_missing_version_is_the_versions_fault_and_an_absent_store_is_not(
    store: DictStore, weights: Weights
) -> None:
    with pytest.raises(ModelError):
        async with weights.use("e" * 64):
            pass
    store.away = True
    with pytest.raises(MachineError):
        async with weights.use("e" * 64):
            pass


async def test_a_new_process_checks_what_it_finds_and_fetches_again_what_is_damaged(
    store: DictStore, weights: Weights, root: Path
) -> None:
    version = add_version(store)
    async with weights.use(version) as (folder, _):
        (folder / "weights.safetensors").write_bytes(b"rotten!")
    restarted = Weights(store, root, max_bytes=10**6)
    async with restarted.use(version) as (folder, _):
        assert (folder / "weights.safetensors").read_bytes() == b"weights"
    restarted.close()


async def test_a_damaged_copy_is_not_served_while_the_store_is_away(
    store: DictStore, weights: Weights, root: Path
) -> None:
    version = add_version(store)
    async with weights.use(version) as (folder, _):
        (folder / "weights.safetensors").write_bytes(b"rotten!")
    store.away = True
    restarted = Weights(store, root, max_bytes=10**6)
    with pytest.raises(MachineError):
        async with restarted.use(version):
            pass
    restarted.close()


async def test_the_least_recently_used_version_leaves_and_one_in_use_stays(store: DictStore, root: Path) -> None:
    cache = Weights(store, root, max_bytes=4000)
    first, second, third = (add_version(store, bytes([i]) * 1500) for i in range(3))
    for age, version in ((1000, first), (500, second)):
        async with cache.use(version) as (folder, _):
            pass
        os.utime(folder, (folder.stat().st_mtime - age,) * 2)
    async with cache.use(first) as (folder, _):
        os.utime(folder, (folder.stat().st_mtime - 1000,) * 2)  # oldest, but in use
        async with cache.use(third):
            assert versions_in(root) == {first, third}
    cache.close()


async def test_downloads_left_by_a_dead_process_are_removed_and_recent_ones_are_not(
    store: DictStore, root: Path
) -> None:
    old, young = root / ".incoming-old", root / ".incoming-young"
    old.mkdir(parents=True)
    young.mkdir()
    os.utime(old, (0, 0))
    Weights(store, root, max_bytes=1).close()
    assert versions_in(root) == {young.name}


async def test_threads_and_processes_that_make_room_at_once_do_not_trip_over_each_other(
    store: DictStore, root: Path
) -> None:
    versions = [add_version(store, bytes([i]) * 1500) for i in range(8)]
    caches = [Weights(store, root, max_bytes=4000) for _ in range(2)]  # as two processes: they share only the root

    async def use(cache: Weights, version: str) -> None:
        async with cache.use(version) as (folder, manifest):
            assert (folder / manifest.files[0].name).stat().st_size == 1500

    uses = [use(cache, version) for _ in range(12) for version in versions for cache in caches]
    failed = [e for e in await asyncio.gather(*uses, return_exceptions=True) if e is not None]
    assert failed == []
    await use(caches[0], versions[0])  # those who came last may have found each other's versions in use
    assert len(versions_in(root)) <= 3
    for cache in caches:
        cache.close()


@pytest.mark.parametrize("vanishes", ["iterdir", "stat"])
async def test_a_folder_that_vanishes_while_it_is_measured_is_no_trouble(
    store: DictStore, root: Path, monkeypatch: pytest.MonkeyPatch, vanishes: str
) -> None:
    first, second = add_version(store, b"1" * 1500), add_version(store, b"2" * 1500)
    cache = Weights(store, root, max_bytes=2000)
    async with cache.use(first):
        pass
    original: Any = getattr(Path, vanishes)

    def vanished(self: Path, **options: Any) -> Any:
        if self.name == first:
            raise FileNotFoundError(str(self))
        return original(self, **options)

    monkeypatch.setattr(Path, vanishes, vanished)
    async with cache.use(second) as (folder, _):
        assert (folder / "weights.safetensors").read_bytes() == b"2" * 1500
    cache.close()


@pytest.mark.parametrize("trouble", [errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("where", ["open", "mkdir", "write_bytes", "rename", "iterdir"])
async def test_trouble_with_the_disk_is_the_machines_and_passes(
    store: DictStore, weights: Weights, root: Path, monkeypatch: pytest.MonkeyPatch, where: str, trouble: int
) -> None:
    version = add_version(store)

    def fails(self: Path, *rest: Any, **options: Any) -> Any:
        raise OSError(trouble, os.strerror(trouble), str(self))

    with monkeypatch.context() as broken:
        broken.setattr(Path, where, fails)
        with pytest.raises(MachineError):
            async with weights.use(version):
                pass
    async with weights.use(version):
        assert versions_in(root) == {version}


@pytest.mark.parametrize("name", [".lock-removals", ".lock-{version}"])
async def test_a_lock_that_another_process_holds_does_not_stop_the_loop(
    store: DictStore, weights: Weights, root: Path, name: str
) -> None:
    version = add_version(store)
    with (root / name.format(version=version)).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        using = asyncio.ensure_future(use_once(weights, version))
        done, _ = await asyncio.wait({using}, timeout=0.1)  # returns only because the loop turns
        assert not done
        fcntl.flock(held, fcntl.LOCK_UN)
    await using


async def use_once(weights: Weights, version: str) -> None:
    async with weights.use(version):
        pass


async def test_a_use_given_up_half_way_holds_nothing(store: DictStore, weights: Weights, root: Path) -> None:
    version = add_version(store)
    begun, go_on = Event(), Event()
    get = store.get

    def slow(key: str) -> bytes:
        begun.set()
        go_on.wait(10)
        return get(key)

    store.get = slow  # type: ignore[method-assign]
    using = asyncio.ensure_future(use_once(weights, version))
    assert await asyncio.to_thread(begun.wait, 10)
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    go_on.set()
    with (root / f".lock-{version}").open("w") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)  # the test's time limit, were it never let go


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize(
    "version", ["", ".", "..", "a\0b", "../../x", "A" * 64, "a" * 64 + "\n", ".incoming-" + "a" * 54, "x" * 5000]
)
async def test_what_is_no_version_touches_neither_disk_nor_store(
    weights: Weights, store: DictStore, root: Path, version: str
) -> None:
    inside = root / "keep"
    inside.write_bytes(b"")
    with pytest.raises(ModelError, match="version: expected 64 hex digits"):
        async with weights.use(version):
            pass
    assert names(root) == ["keep"]
    assert store.gets == 0


async def test_a_key_that_the_store_refuses_is_the_versions_fault(weights: Weights, store: DictStore) -> None:
    version = add_version(store)

    def refuse(key: str, target: Path, *, sha256: str) -> None:
        raise KeyRefused(key)

    store.get_verified = refuse  # type: ignore[method-assign]
    with pytest.raises(ModelError):
        async with weights.use(version):
            pass
