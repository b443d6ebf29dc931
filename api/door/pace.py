"""Calls that take nothing from a limit share a bounded part of this process: so many answers a second, a share of them
for one peer. There is one pace for callers who show no key, by their address, and one for those who do, by their key.

A call over the rate waits for its turn; one that would wait too long is refused, and its refusal is held back, so that
whoever sends the next call as soon as the last is answered slows down to what there is. A peer with a good key that
calls rarely waits for no other.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import Any

from api.errors import RateLimited, retry_after

#: How long a call waits for its turn before it is refused instead: among those of its peer, then among all.
PATIENCE_S = 2.0
#: How long a refusal is held back, and how many are at once: by one peer, and in all. A peer with more of them in that
#: time crowds: with as many as there are in all, if it has customers behind it.
HELD_S = 1.0
MOST_HELD_BY_PEER, MOST_HELD = 256, 1024
#: Those of one peer are let go one after the other, or all of them would call again at the same moment.
_APART_S = HELD_S / MOST_HELD_BY_PEER
#: Turns of a call that was read and judged before it was refused: it cost this process as much as two that were not.
TURNS_JUDGED = 2.0
#: What may be answered without a wait after a pause, as seconds of the rate.
_BURST_S = 0.05
#: Up to this rate the calls of one key wait for none of another, and how many may come at once, as seconds of it.
RARE_PER_S = 2.0
_RARE_BURST_S = 2.0
#: So long after a call with a good key the peer counts as one that has customers behind it.
_WELCOME_S = 60.0
_MOST_PEERS = 10_000
_SWEEP_S = 1.0


class Refused(RateLimited):
    """A call that came too early. With `hang_up` its connection is closed after the answer."""

    code = "too_many_free_calls"

    def __init__(self, what: str, *, hang_up: bool) -> None:
        super().__init__(
            f"too many {what}; come back after the seconds of Retry-After, and keep what was answered",
            headers=retry_after(HELD_S),
        )
        self.hang_up = hang_up


class Crowded(Refused):
    """The same where others' calls are too many, so that it is no limit of the caller's."""

    status = 503
    code = "crowded"
    kind = "server_error"


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
    rare: Bucket
    #: Refusals that are held back now, and until when the last one is.
    held: int = 0
    held_until_s: float = float("-inf")
    #: Refusals, held back or not, and connections that asked for nothing, since `lately_s`.
    lately: int = 0
    lately_s: float = float("-inf")
    welcome_until_s: float = float("-inf")
    #: SHA-256 of the key with which it was let through.
    key_sha256: bytes = field(default=b"", repr=False)

    def idle(self, now_s: float) -> bool:
        buckets = max(self.calls.next_s, self.health.next_s, self.rare.next_s)
        return self.held == 0 and max(buckets, self.lately_s + HELD_S, self.welcome_until_s) < now_s

    def lately_at(self, now_s: float) -> int:
        return self.lately if now_s - self.lately_s < HELD_S else 0

    def count(self, now_s: float) -> None:
        if now_s - self.lately_s >= HELD_S:
            self.lately, self.lately_s = 0, now_s
        self.lately += 1


class Pace:
    """`per_s` answers a second, `share` of them for one peer, of which `rare_per_s` wait for no other peer's; `clock`
    is in seconds, `what` the calls, in words, with {} for `whose` they are.

    `counts` holds how many calls waited and how many were refused, as `<name>_waited` and so on, since the start.
    """

    def __init__(
        self,
        *,
        per_s: float,
        share: float = 0.5,
        rare_per_s: float = 0.0,
        name: str = "strangers",
        what: str = "calls without a key from {}",
        whose: str = "this address",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        later: Callable[[float, Callable[[], None]], Any] | None = None,
    ) -> None:
        self._per_s, self._per_peer_s = per_s, per_s * share
        self._rare_per_s = rare_per_s
        self._own, self._others = what.format(whose), what.format("all others")
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
        bucket = known.health if health else known.calls
        await self._wait(bucket, self._per_peer_s, known, turns, Refused, self._own)
        if not health and not self._is_rare(known, turns):
            # Only now: what a peer has to wait for among its own is not taken from the others meanwhile.
            await self._wait(self._all, self._per_s, known, turns, Crowded, self._others)

    def is_behind(self, peer: str) -> bool:
        """Whether the peer's next call that takes a turn would have to wait too long for it."""
        known = self._peers.get(peer)
        return known is not None and known.calls.wait_s(self._clock()) > PATIENCE_S

    async def refuse(self, peer: str) -> None:
        """Refuse a call of a peer that is behind, which takes no turn. Raises Refused, after HELD_S or at once."""
        raise Refused(self._own, hang_up=await self._hold_back(self._peer(peer)))

    def welcome(self, peer: str) -> None:
        """A call with a good key came from there: it may be a proxy, and its connections are let in."""
        self._peer(peer).welcome_until_s = self._clock() + _WELCOME_S

    def vouch(self, peer: str, key_sha256: bytes) -> None:
        """The peer's key was found to be this one."""
        self._peer(peer).key_sha256 = key_sha256

    def vouches(self, peer: str, key_sha256: bytes) -> bool:
        """Whether this is the key that the peer was lately found to have."""
        known = self._peers.get(peer)
        return known is not None and known.key_sha256 == key_sha256

    def crowding(self, peer: str) -> bool:
        """Whether a peer had so many refusals lately that it should open no more connections: four times as many for
        one that has customers behind it."""
        known, now_s = self._peers.get(peer), self._clock()
        if known is None or (lately := known.lately_at(now_s)) < MOST_HELD_BY_PEER:
            return False
        return lately >= MOST_HELD or known.welcome_until_s < now_s

    def wasted(self, peer: str) -> None:
        """A connection from there was of no use, it never asked or was hung up on; it counts as a refusal."""
        self._peer(peer).count(self._clock())

    def _is_rare(self, peer: _Peer, turns: float) -> bool:
        """Whether the peer calls so rarely that the call waits for no others. Those do not count for the others either:
        they come to `rare_per_s` for each peer."""
        now_s = self._clock()
        if self._rare_per_s <= 0 or peer.rare.next_s - now_s > _RARE_BURST_S:
            return False
        peer.rare.take(now_s, self._rare_per_s, turns)
        return True

    async def _wait(
        self, bucket: Bucket, per_s: float, peer: _Peer, turns: float, refused: type[Refused], what: str
    ) -> None:
        now_s = self._clock()
        wait_s = bucket.wait_s(now_s)
        if wait_s > PATIENCE_S:
            hang_up = await self._hold_back(peer)
            raise refused(what, hang_up=hang_up)
        bucket.take(now_s, per_s, turns)
        if wait_s > 0:
            self.counts[self._waited] += 1
            await self._sleep(wait_s)

    async def _hold_back(self, peer: _Peer) -> bool:
        """Keep a refusal for its time. True, at once, when too many are kept: its connection is to be closed."""
        self.counts[self._refused] += 1
        peer.count(self._clock())
        if peer.held >= MOST_HELD_BY_PEER or self._held >= MOST_HELD:
            return True
        peer.held += 1
        self._held += 1
        now_s = self._clock()
        peer.held_until_s = max(now_s + HELD_S, peer.held_until_s + _APART_S)
        # By time, not by the end of the call: a caller who hangs up does not free its place.
        held_s = peer.held_until_s - now_s
        (self._later or asyncio.get_running_loop().call_later)(held_s, lambda: self._release(peer))
        await self._sleep(held_s)
        return False

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
            known = self._peers.setdefault(name, _Peer(calls=Bucket(), health=Bucket(), rare=Bucket()))
        return known

    def _sweep(self) -> None:
        now_s = self._clock()
        if now_s - self._swept_s >= _SWEEP_S:
            self._swept_s = now_s
            self._peers = {name: peer for name, peer in self._peers.items() if not peer.idle(now_s)}


def peer_at(transport: asyncio.BaseTransport | None) -> str:
    """Who is at the other end of a connection, as `peer_of` names it; "" when it is closed."""
    return "" if transport is None else peer_of(transport.get_extra_info("peername"))


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
