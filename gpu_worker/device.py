"""What is loaded on the device: least recently used versions leave when room is needed, those in use stay.

Runs and loads have one thread each, so that loading a version delays no other version's batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from gpu_worker.endings import Ran
from gpu_worker.errors import MachineError, ModelError
from gpu_worker.weights import Weights
from schemas.manifest import Manifest
from schemas.records import InferenceRequested

log = logging.getLogger(__name__)

#: A version that was loaded and has not run yet keeps its place this long, or two versions could evict each other
#: for ever without either running once.
FRESH_FOR_S = 5.0


class Model(Protocol):
    """A loaded version (gpu_worker.runner.LoadedModel fits)."""

    def run(self, requests: Sequence[InferenceRequested]) -> Ran:
        """Run requests together."""


M = TypeVar("M")


@dataclass(slots=True, kw_only=True)
class _Place(Generic[M]):
    model: M
    size_bytes: int
    loaded_s: float
    users: int = 0
    has_run: bool = False


class Shelf(Generic[M]):
    """Models by version, at most `max_bytes` of them. No I/O; `clock` gives seconds from any start."""

    def __init__(self, max_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._places: OrderedDict[str, _Place[M]] = OrderedDict()  # least recently used first

    def __contains__(self, version: str) -> bool:
        return version in self._places

    @contextmanager
    def use(self, version: str) -> Iterator[M]:
        """The model, pinned. Raises KeyError when it is not here."""
        place = self._places[version]
        self._places.move_to_end(version)
        place.users += 1
        try:
            yield place.model
        finally:
            place.users -= 1
            place.has_run = True

    def make_room(self, size_bytes: int) -> list[str]:
        """Drop least recently used models until `size_bytes` more fit; returns their versions.

        Raises ModelError when that many never fit, MachineError when they do not while others are in use; then
        nothing was dropped.
        """
        if size_bytes > self._max_bytes:
            raise ModelError(f"needs {size_bytes} bytes on the device, which has room for {self._max_bytes}")
        excess_bytes = sum(p.size_bytes for p in self._places.values()) + size_bytes - self._max_bytes
        leaving: list[str] = []
        for version, place in self._places.items():
            if excess_bytes <= 0:
                break
            fresh = not place.has_run and self._clock() - place.loaded_s < FRESH_FOR_S
            if not place.users and not fresh:
                leaving.append(version)
                excess_bytes -= place.size_bytes
        if excess_bytes > 0:
            raise MachineError(f"{size_bytes} bytes do not fit on the device beside the versions in use")
        for version in leaving:
            del self._places[version]
        return leaving

    def put(self, version: str, model: M, *, size_bytes: int) -> None:
        """Keep a model that room was made for."""
        self._places[version] = _Place(model=model, size_bytes=size_bytes, loaded_s=self._clock())


class Device:
    """Prepares and runs versions (the worker's Runner). `load` is called in the loading thread."""

    def __init__(
        self,
        weights: Weights,
        *,
        load: Callable[[Path, Manifest], Model],
        max_bytes: int,
        start_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._weights = weights
        self._load = load
        self._shelf: Shelf[Model] = Shelf(max_bytes)
        self._loading = asyncio.Lock()
        self._load_thread = ThreadPoolExecutor(1, thread_name_prefix="load", initializer=start_thread)
        self._run_thread = ThreadPoolExecutor(1, thread_name_prefix="run", initializer=start_thread)

    def close(self) -> None:
        """Start nothing further; what runs ends with the process."""
        self._load_thread.shutdown(wait=False, cancel_futures=True)
        self._run_thread.shutdown(wait=False, cancel_futures=True)

    def ready(self, version: str) -> bool:
        """Whether the version is loaded."""
        return version in self._shelf

    async def prepare(self, version: str) -> None:
        """Fetch, verify, load and warm up. Raises ModelError, MachineError; then nothing of it stays loaded."""
        if self.ready(version):
            return
        started_s = time.monotonic()
        async with self._weights.use(version) as (folder, manifest), self._loading:
            # Downloads overlap; loads take turns, so that the room made for one is not taken by another.
            size_bytes = sum(f.size_bytes for f in manifest.files)
            for left in self._shelf.make_room(size_bytes):
                log.info("version unloaded", extra={"fields": {"version": left}})
            loop = asyncio.get_running_loop()
            model = await loop.run_in_executor(self._load_thread, self._load, folder, manifest)
            self._shelf.put(version, model, size_bytes=size_bytes)
        fields = {"version": version, "size_bytes": size_bytes, "took_s": round(time.monotonic() - started_s, 3)}
        log.info("version loaded", extra={"fields": fields})

    async def run(self, version: str, requests: Sequence[InferenceRequested]) -> Ran:
        """Run requests of a ready version; it cannot be evicted meanwhile."""
        with self._shelf.use(version) as model:
            return await asyncio.get_running_loop().run_in_executor(self._run_thread, model.run, requests)
