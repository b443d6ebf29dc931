"""Carries out a plan of faults on a running stack and its fleet of ledger workers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

from infra.local.stack import Stack
from tests.conditions import eventually
from tests.storms.faults import Fault, Kind, in_lanes
from tests.storms.fleet import Fleet

_KEEP_EVERY_S = 0.2
_VICTIM_WITHIN_S = 60.0


async def supervise(fleet: Fleet) -> None:
    """Keep the fleet, for ever."""
    while True:
        fleet.keep()
        await asyncio.sleep(_KEEP_EVERY_S)


class Weather:
    """`happened` counts what was done, by kind; `away` names the servers that are down right now."""

    def __init__(self, stack: Stack, fleet: Fleet, say: Callable[[str], None], *, seed: int, outage_s: float) -> None:
        self._stack = stack
        self._fleet = fleet
        self._say = say
        self._rng = random.Random(seed)
        self._outage_s = outage_s
        self.happened: Counter[str] = Counter()
        self.away: set[str] = set()
        #: The stack starts and stops one part at a time; whose turn it is, is known here.
        self._turn = asyncio.Lock()

    async def rage(self, faults: list[Fault]) -> None:
        """The planned faults, each at its time; one that takes long delays those behind it in its lane."""
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(self._lane(lane, began) for lane in in_lanes(faults)))

    async def _lane(self, faults: list[Fault], began: float) -> None:
        loop = asyncio.get_running_loop()
        for fault in faults:
            await asyncio.sleep(max(0.0, began + fault.at_s - loop.time()))
            await self._strike(fault)
            self.happened[fault.kind.name.lower()] += 1

    async def _strike(self, fault: Fault) -> None:
        if fault.kind in (Kind.RESTART_POSTGRES, Kind.POSTGRES_OUTAGE):
            await self._restart("postgres", fault)
        elif fault.kind is Kind.RESTART_KAFKA:
            await self._restart("kafka", fault)
        elif fault.kind is Kind.JOIN:
            self._fleet.join()
            self._say(f"{fault.kind.value}: {self._fleet.size} now")
        else:
            # While none runs there is nobody to hit; the supervisor brings one.
            await eventually(lambda: self._hit(fault.kind), timeout_s=_VICTIM_WITHIN_S, what=fault.kind.value)
            self._say(fault.kind.value + (f": {self._fleet.size} now" if fault.kind is Kind.LEAVE else ""))

    def _hit(self, kind: Kind) -> bool:
        if kind is Kind.KILL_WORKER:
            return self._fleet.kill(self._rng)
        return self._fleet.stop(self._rng, leave=kind is Kind.LEAVE)

    async def _restart(self, server: str, fault: Fault) -> None:
        outage = fault.kind is Kind.POSTGRES_OUTAGE
        how = f" for {self._outage_s:g} s" if outage else " by kill -9" if fault.abrupt else ""
        async with self._turn:
            self._say(fault.kind.value + how)
            self.away.add(server)
            await asyncio.to_thread(self._stack.stop_part, server, kill=fault.abrupt)
        if outage:
            await asyncio.sleep(self._outage_s)
        async with self._turn:
            await asyncio.to_thread(self._stack.start_part, server)
        self.away.discard(server)
        self._say(f"{server} is back")
