"""Versions' files on this machine's disk: fetched from S3 once, verified, kept while there is room.

<root>/<version>/manifest.json, …   complete and verified when it was renamed here; never changed afterwards
<root>/.incoming-…                  a download under way; left over when a process died, removed at the next start
<root>/.lock-<version>              held shared by every process that reads the version, exclusively to remove it
<root>/.lock-removals               held exclusively while versions are removed, so that two never do it at once

Everything here but `use` itself may wait for a disk, a lock or S3, and runs in threads of the cache's own.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Protocol

from gpu_worker.errors import MachineError, ModelError
from infra.s3 import DigestMismatch, KeyRefused, ObjectMissing, StoreUnavailable
from schemas.manifest import MANIFEST_FILE, ArtifactFile, Manifest, ManifestError, artifact_prefix

log = logging.getLogger(__name__)

_STALE_INCOMING_S = 3600
_CHUNK_BYTES = 1024 * 1024
_VERSION = re.compile("[0-9a-f]{64}")
_REMOVALS = ".lock-removals"


class Store(Protocol):
    """What is needed of S3 (infra.s3.Store fits)."""

    def get(self, key: str) -> bytes:
        """A small object."""

    def get_verified(self, key: str, target: Path, *, sha256: str) -> None:
        """An object into a file that appears with this digest or not at all."""


class Weights:
    """The cache. Several processes may share one root; `max_bytes` bounds what is kept, not what is in use."""

    def __init__(self, store: Store, root: Path, *, max_bytes: int, downloads: int = 4) -> None:
        self._store = store
        self._root = root
        self._max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(downloads, thread_name_prefix="weights")
        self._verified: set[str] = set()
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)

    def close(self) -> None:
        """Let no further download start. One under way ends with the process."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def use(self, version: str) -> AsyncIterator[tuple[Path, Manifest]]:
        """The version's folder and manifest, verified by this process; not removed while in use.

        Raises ModelError when S3's bytes are not the version's, MachineError when S3 or the disk is away.
        """
        obtaining = self._threads.submit(self._obtain, version)
        try:
            lock, manifest = await asyncio.wrap_future(obtaining)
        except asyncio.CancelledError:
            obtaining.add_done_callback(_release)  # the thread goes on, and nobody else would let go of the lock
            raise
        with lock:
            yield self._root / version, manifest

    def _obtain(self, version: str) -> tuple[IO[str], Manifest]:
        """The manifest, and the open lock file that keeps the folder from being removed."""
        if not _VERSION.fullmatch(version):  # it becomes a path, and must not lead elsewhere
            raise ModelError(f"version: expected 64 hex digits in lower case, found {version[:100]!r}")
        try:
            lock = _lock(self._root / f".lock-{version}", fcntl.LOCK_SH)  # waits for a removal at most
            try:
                manifest = self._cached(version)
                if manifest is None:
                    manifest = self._fetch(version)
                self._verified.add(version)
                os.utime(self._root / version)  # the modification time of the folder is when it was last used
                self._make_room(keep=version)
            except BaseException:
                lock.close()
                raise
        except (ManifestError, DigestMismatch, ObjectMissing, KeyRefused) as error:
            raise ModelError(f"version {version[:12]}: {error}") from error
        except (StoreUnavailable, OSError) as error:
            raise MachineError(f"version {version[:12]}: {error}") from error
        return lock, manifest

    def _cached(self, version: str) -> Manifest | None:
        """The manifest of a complete folder; None when there is none, also after removing one that is damaged.

        Each file is compared by size and digest once per process: disks rot, and so do hands.
        """
        folder = self._root / version
        if not folder.is_dir():
            return None
        manifest = self._intact(version)
        if manifest is None:
            with _lock(self._root / _REMOVALS, fcntl.LOCK_EX):
                manifest = self._intact(version)  # again, because another process may have mended it meanwhile
                if manifest is None and folder.is_dir():
                    log.warning("cached version was damaged; fetching it again", extra={"fields": {"version": version}})
                    self._remove(folder)
        return manifest

    def _intact(self, version: str) -> Manifest | None:
        folder = self._root / version
        try:
            manifest = Manifest.from_bytes((folder / MANIFEST_FILE).read_bytes(), version=version)
            if version in self._verified or all(_is_intact(folder / f.name, f) for f in manifest.files):
                return manifest
        except (ManifestError, OSError):
            pass
        return None

    def _fetch(self, version: str) -> Manifest:
        started_s = time.monotonic()
        incoming = self._root / f".incoming-{version[:12]}-{uuid.uuid4().hex}"
        incoming.mkdir()
        try:
            data = self._store.get(artifact_prefix(version) + MANIFEST_FILE)
            manifest = Manifest.from_bytes(data, version=version)
            for file in manifest.files:
                key = artifact_prefix(version) + _plain_name(file.name)
                self._store.get_verified(key, incoming / file.name, sha256=file.sha256)
            (incoming / MANIFEST_FILE).write_bytes(data)
            # The one moment the version appears; a process that dies before leaves only an incoming folder.
            with suppress(FileExistsError):  # another process was faster, with the same bytes
                _rename(incoming, self._root / version)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)
        size_bytes = sum(f.size_bytes for f in manifest.files)
        fields = {"version": version, "size_bytes": size_bytes, "took_s": round(time.monotonic() - started_s, 3)}
        log.info("version fetched", extra={"fields": fields})
        return manifest

    def _make_room(self, *, keep: str) -> None:
        """Remove least recently used versions until the rest fits; those in use, here or elsewhere, stay."""
        with _lock(self._root / _REMOVALS, fcntl.LOCK_EX):
            kept = _kept(self._root)
            excess_bytes = sum(size_bytes for _, size_bytes, _ in kept) - self._max_bytes
            for _, size_bytes, folder in kept:
                if excess_bytes <= 0:
                    return
                if folder.name == keep:
                    continue
                with (
                    suppress(BlockingIOError),
                    _lock(self._root / f".lock-{folder.name}", fcntl.LOCK_EX | fcntl.LOCK_NB),
                ):
                    self._remove(folder)
                    excess_bytes -= size_bytes
                    log.info("version removed from disk", extra={"fields": {"version": folder.name}})

    def _remove(self, folder: Path) -> None:
        """Rename first, so that a half-removed version is never found under its name."""
        self._verified.discard(folder.name)
        grave = self._root / f".incoming-{uuid.uuid4().hex}"
        with suppress(FileNotFoundError):
            folder.rename(grave)
        shutil.rmtree(grave, ignore_errors=True)


def _lock(path: Path, how: int) -> IO[str]:
    """A locked file; closing it lets go. With LOCK_NB, raises BlockingIOError when the lock is taken.

    Lock files stay, because removing one would let two processes hold "the" lock on different files.
    """
    file = path.open("w")
    try:
        fcntl.flock(file, how)
    except BaseException:
        file.close()
        raise
    return file


def _release(obtaining: Future[tuple[IO[str], Manifest]]) -> None:
    if not obtaining.cancelled() and obtaining.exception() is None:
        obtaining.result()[0].close()


def _plain_name(name: str) -> str:
    """The file name as it is. Raises ManifestError for one that would leave the version's folder."""
    if name in ("", ".", "..", MANIFEST_FILE) or "/" in name or "\\" in name or "\0" in name:
        raise ManifestError(f"manifest: file name {name!r} is not a plain file name")
    return name


def _is_intact(path: Path, expected: ArtifactFile) -> bool:
    if not path.is_file() or path.stat().st_size != expected.size_bytes:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == expected.sha256


def _rename(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError as error:
        if target.is_dir():
            raise FileExistsError(str(target)) from error
        raise


def _kept(root: Path) -> list[tuple[float, int, Path]]:
    """When each version was last used, its size in bytes and its folder; least recently used first.

    A version may vanish while it is looked at: one that is damaged, or removed by hand.
    """
    found = []
    for folder in root.iterdir():
        if _VERSION.fullmatch(folder.name):
            with suppress(FileNotFoundError, NotADirectoryError):
                size_bytes = sum(file.stat().st_size for file in folder.iterdir())
                found.append((folder.stat().st_mtime, size_bytes, folder))
    return sorted(found)


def _remove_stale(root: Path) -> None:
    for leftover in root.glob(".incoming-*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _STALE_INCOMING_S:
                shutil.rmtree(leftover, ignore_errors=True)
