"""Calls that take nothing from a limit share a bounded part of this process: so many answers a second, a share of them
for one peer. There is one pace for callers who show no key, by their address, and one for those who do, by their key.

A call over the rate waits for its turn; one that would wait too long is refused, and its refusal is held back, so that
whoever sends the next call as soon as the last is answered slows down to what there is.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any

from api.errors import RateLimited, retry_after

#: How long a call waits for its turn before it is refused instead: among those of its peer, then among all.
PATIENCE_S = 2.0
#: How long a refusal is held back, and how many are at once: by one peer, and in all.
HELD_S = 1.0
MOST_HELD_BY_PEER, MOST_HELD = 256, 1024
#: Turns of a call that was read and judged before it was refused: it cost this process as much as two that were not.
TURNS_JUDGED = 2.0
#: What may be answered without a wait after a pause, as seconds of the rate.
_BURST_S = 0.05
#: So long after a call with a good key the peer counts as one that has customers behind it.
_WELCOME_S = 60.0
_MOST_PEERS = 10_000
_SWEEP_S = 1.0


class Refused(RateLimited):
    """A call that came too early. With `hang_up` its connection is closed after the answer."""

    def __init__(self, what: str, *, hang_up: bool) -> None:
        super().__init__(
            f"too many {what}; come back after the seconds of Retry-After, and keep what was answered",
            headers=retry_after(HELD_S),
        )
        self.hang_up = hang_up


@dataclass(slots=True, kw_only=True)
class Bucket:
    """The time at which the next call at this rate is due, in seconds of the clock."""

    next_s: float = float("-inf")

    def wait_s(self, now_s: float) -> float:
        """How long a call that comes now would wait."""
        return max(0.0, self.next_s - _BURST_S - now_s)

    def take(self, now_s: float, per_s: float, turns: float = 1.0) -> None:
        """Count one call, which takes so many turns."""
        self.next_s = max(self.next_s, now_s) + turns / per_s


@dataclass(slots=True, kw_only=True)
class _Peer:
    calls: Bucket
    health: Bucket
    held: int = 0
    welcome_until_s: float = float("-inf")

    def idle(self, now_s: float) -> bool:
        return self.held == 0 and max(self.calls.next_s, self.health.next_s, self.welcome_until_s) < now_s


class Pace:
    """`per_s` answers a second, `share` of them for one peer; `clock` is in seconds, `what` the calls, in words.

    `counts` holds how many calls waited and how many were refused, as `<name>_waited` and so on, since the start.
    """

    def __init__(
        self,
        *,
        per_s: float,
        share: float = 0.5,
        name: str = "strangers",
        what: str = "calls without a key",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        later: Callable[[float, Callable[[], None]], Any] | None = None,
    ) -> None:
        self._per_s, self._per_peer_s = per_s, per_s * share
        self._what = what
        self._clock, self._sleep, self._later = clock, sleep, later
        self._all = Bucket()
        self._peers: dict[str, _Peer] = {}
        self._held = 0
        self._swept_s = float("-inf")
        self._waited, self._refused = f"{name}_waited", f"{name}_refused"
        self.counts: Counter[str] = Counter({self._waited: 0, self._refused: 0})

    async def turn(self, peer: str, *, health: bool = False, turns: float = 1.0) -> None:
        """Wait for a turn, twice PATIENCE_S at most. Raises Refused instead, after HELD_S or at once.

        A call that costs more than most takes more `turns`, for which the next ones wait. Asking for this process's
        health counts for the peer alone: nobody else may keep a supervisor from its answer.
        """
        known = self._peer(peer)
        await self._wait(known.health if health else known.calls, self._per_peer_s, known, turns)
        if not health:
            # Only now: what a peer has to wait for among its own is not taken from the others meanwhile.
            await self._wait(self._all, self._per_s, known, turns)

    def welcome(self, peer: str) -> None:
        """A call with a good key came from there: it may be a proxy, and its connections are let in."""
        self._peer(peer).welcome_until_s = self._clock() + _WELCOME_S

    def crowding(self, peer: str) -> bool:
        """Whether so many refusals are held for a peer that it should open no more connections: four times as many for
        one that has customers behind it."""
        known = self._peers.get(peer)
        if known is None or known.held < MOST_HELD_BY_PEER:
            return False
        return known.held >= MOST_HELD or known.welcome_until_s < self._clock()

    def wasted(self, peer: str) -> None:
        """A connection from there has ended without ever asking for anything; it counts as a refusal that is held."""
        if not self.crowding(peer):
            self._hold(self._peer(peer))

    async def _wait(self, bucket: Bucket, per_s: float, peer: _Peer, turns: float) -> None:
        now_s = self._clock()
        wait_s = bucket.wait_s(now_s)
        if wait_s > PATIENCE_S:
            await self._refuse(peer)
        bucket.take(now_s, per_s, turns)
        if wait_s > 0:
            self.counts[self._waited] += 1
            await self._sleep(wait_s)

    async def _refuse(self, peer: _Peer) -> None:
        self.counts[self._refused] += 1
        if peer.held >= MOST_HELD_BY_PEER or self._held >= MOST_HELD:
            raise Refused(self._what, hang_up=True)
        self._hold(peer)
        await self._sleep(HELD_S)
        raise Refused(self._what, hang_up=False)

    def _hold(self, peer: _Peer) -> None:
        peer.held += 1
        self._held += 1
        # By time, not by the end of the call: a caller who hangs up does not free its place.
        (self._later or asyncio.get_running_loop().call_later)(HELD_S, lambda: self._release(peer))

    def _release(self, peer: _Peer) -> None:
        peer.held -= 1
        self._held -= 1

    def _peer(self, name: str) -> _Peer:
        known = self._peers.get(name)
        if known is None:
            if len(self._peers) >= _MOST_PEERS:
                self._sweep()
            if len(self._peers) >= _MOST_PEERS:
                name = ""  # all further ones share one place
            known = self._peers.setdefault(name, _Peer(calls=Bucket(), health=Bucket()))
        return known

    def _sweep(self) -> None:
        now_s = self._clock()
        if now_s - self._swept_s >= _SWEEP_S:
            self._swept_s = now_s
            self._peers = {name: peer for name, peer in self._peers.items() if not peer.idle(now_s)}


def peer_of(address: object) -> str:
    """Who is at the other end of a connection, from its socket's address: one IPv4 address, or the network of 64 bits
    that one subscriber of IPv6 has; "" when it is neither."""
    if not isinstance(address, tuple) or not address:
        return ""
    try:
        ip = ip_address(str(address[0]).partition("%")[0])
    except ValueError:
        return ""
    if isinstance(ip, IPv6Address):
        return str(ip.ipv4_mapped or IPv6Address(int(ip) >> 64 << 64))
    return str(ip)
