"""Versions on their way onto the device, and those that were refused: what the loop asks before it runs anything.

A version is prepared for as long as something waits for it; the store may be away for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from gpu_worker.blame import Blame
from gpu_worker.endings import Failure
from gpu_worker.errors import MachineError
from gpu_worker.ports import Runner
from infra.pause import Pause

log = logging.getLogger(__name__)

#: A version that failed to load is not tried again for this long; its requests fail at once meanwhile.
BROKEN_FOR_S = 10.0
_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 2.0


class Loads:
    """One task per version that is being prepared.

    `spawn` starts a task that somebody watches, `is_wanted` says whether anything waits for a version, `ended` is
    called after each load. `counts` holds what was refused; `clock` gives Unix seconds.
    """

    def __init__(
        self,
        runner: Runner,
        blame: Blame,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        is_wanted: Callable[[str], bool],
        ended: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._blame = blame
        self._spawn = spawn
        self._is_wanted = is_wanted
        self._ended = ended
        self._clock = clock
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._broken: dict[str, tuple[Failure, float]] = {}
        self.counts: Counter[str] = Counter()

    def tasks(self) -> list[asyncio.Task[None]]:
        """What is under way, to be cancelled at a stop."""
        return list(self._under_way.values())

    def want(self, version: str, now_s: float) -> Failure | None:
        """Let a version be ready, now or later; or say why what waits for it fails."""
        if self._runner.ready(version) or version in self._under_way:
            return None
        self._broken = {v: broken for v, broken in self._broken.items() if now_s < broken[1]}
        if version in self._broken:
            return self._broken[version][0]
        self._under_way[version] = self._spawn(self._load(version))
        return None

    async def _load(self, version: str) -> None:
        pause = Pause(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        try:
            while self._is_wanted(version):
                try:
                    with self._blame.judging("loading its version", lambda failure: self._refuse(version, failure)):
                        await self._runner.prepare(version)
                    return
                except MachineError as error:
                    log.warning("version not loaded yet", extra={"fields": {"version": version, "reason": error}})
                    await pause.wait()
        finally:
            del self._under_way[version]
            self._ended()

    def _refuse(self, version: str, failure: Failure) -> None:
        log.error("version refused", extra={"fields": {"version": version, "reason": failure.message}})
        self._broken[version] = (failure, self._clock() + BROKEN_FOR_S)
        self.counts["versions_refused"] += 1
