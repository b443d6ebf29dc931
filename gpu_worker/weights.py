"""Versions' files on this machine's disk: fetched from S3 once, verified, kept while there is room.

<root>/<version>/manifest.json, …   complete and verified when it was renamed here; never changed afterwards
<root>/.incoming-…                  a download under way; left over when a process died, removed at the next start
<root>/.lock-<version>              held shared by every process that reads the version, exclusively to remove it
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from gpu_worker.errors import MachineError, ModelError
from infra.s3 import DigestMismatch, ObjectMissing, StoreUnavailable
from schemas.manifest import MANIFEST_FILE, ArtifactFile, Manifest, ManifestError, artifact_prefix

log = logging.getLogger(__name__)

_STALE_INCOMING_S = 3600
_CHUNK_BYTES = 1024 * 1024


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
        loop = asyncio.get_running_loop()
        with _locked(self._root / f".lock-{version}"):
            manifest = await loop.run_in_executor(self._threads, self._obtain, version)
            yield self._root / version, manifest

    def _obtain(self, version: str) -> Manifest:
        folder = self._root / version
        try:
            manifest = self._cached(version)
            if manifest is None:
                manifest = self._fetch(version)
            self._verified.add(version)
            os.utime(folder)  # the modification time of the folder is when it was last used
        except (ManifestError, DigestMismatch, ObjectMissing) as error:
            raise ModelError(f"version {version[:12]}: {error}") from error
        except (StoreUnavailable, OSError) as error:
            raise MachineError(f"version {version[:12]}: {error}") from error
        self._make_room(keep=version)
        return manifest

    def _cached(self, version: str) -> Manifest | None:
        """The manifest of a complete folder; None when there is none, also after removing one that is damaged.

        Each file is compared by size and digest once per process: disks rot, and so do hands.
        """
        folder = self._root / version
        if not folder.is_dir():
            return None
        try:
            manifest = Manifest.from_bytes((folder / MANIFEST_FILE).read_bytes(), version=version)
            damaged = version not in self._verified and not all(_is_intact(folder / f.name, f) for f in manifest.files)
        except (ManifestError, OSError):
            damaged = True
        if damaged:
            log.warning("cached version was damaged; fetching it again", extra={"fields": {"version": version}})
            self._remove(folder)
            return None
        return manifest

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
        folders = sorted((f for f in self._root.iterdir() if not f.name.startswith(".")), key=_last_used)
        sizes = {f: sum(e.stat().st_size for e in f.iterdir()) for f in folders}
        excess_bytes = sum(sizes.values()) - self._max_bytes
        for folder in folders:
            if excess_bytes <= 0:
                return
            if folder.name == keep:
                continue
            lock = self._root / f".lock-{folder.name}"
            with suppress(BlockingIOError), _locked(lock, exclusive=True):
                self._remove(folder)
                excess_bytes -= sizes[folder]
                log.info("version removed from disk", extra={"fields": {"version": folder.name}})

    def _remove(self, folder: Path) -> None:
        """Rename first, so that a half-removed version is never found under its name."""
        self._verified.discard(folder.name)
        grave = self._root / f".incoming-{uuid.uuid4().hex}"
        with suppress(FileNotFoundError):
            folder.rename(grave)
        shutil.rmtree(grave, ignore_errors=True)


@contextmanager
def _locked(path: Path, *, exclusive: bool = False) -> Iterator[None]:
    """Shared: waits for a removal, which is short. Exclusive: raises BlockingIOError when anyone uses the version.

    Lock files stay, because removing one would let two processes hold "the" lock on different files.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
        yield


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


def _last_used(folder: Path) -> float:
    return folder.stat().st_mtime


def _remove_stale(root: Path) -> None:
    for leftover in root.glob(".incoming-*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _STALE_INCOMING_S:
                shutil.rmtree(leftover, ignore_errors=True)
