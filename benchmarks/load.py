"""Load on the loopback address: closed loops and an open loop over plain HTTP/1.1, cheap enough to share the cores.

A closed loop shows peak throughput; only the open loop shows latency, because there a slow answer does not slow the
arrivals: each latency counts from the moment the request was due, whether or not a connection was free.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Run:
    """What one run saw: latencies in seconds, answers by status, and how long it took."""

    latencies_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    unanswered: int = 0
    wall_s: float = 0.0
    by_customer: Counter[int] = field(default_factory=Counter)

    def figures(self) -> dict[str, float]:
        """requests_per_s of successful answers, and percentiles of their latency in milliseconds."""
        ordered = sorted(self.latencies_s)

        def percentile(p: float) -> float:
            return round(1000 * ordered[min(len(ordered) - 1, int(p * len(ordered)))], 2) if ordered else float("nan")

        return {
            "requests_per_s": round(self.statuses[200] / self.wall_s, 1) if self.wall_s else 0.0,
            "p50_ms": percentile(0.50),
            "p95_ms": percentile(0.95),
            "p99_ms": percentile(0.99),
        }


class Connection(asyncio.Protocol):
    """One keep-alive connection with one request on it at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._answer: asyncio.Future[int] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head = self._buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        at = self._buffer.lower().find(b"content-length:", 0, head)
        end = self._buffer.find(b"\r\n", at)
        size = int(self._buffer[at + 15 : end]) if at >= 0 else 0
        if len(self._buffer) < head + 4 + size:
            return
        status = int(self._buffer[9:12])
        del self._buffer[: head + 4 + size]
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(status)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("closed"))

    async def call(self, request: bytes) -> int:
        """Send a whole request and return the answer's status."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await asyncio.wait_for(self._answer, 30)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def _connect(host: str, port: int) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    return connection


async def closed_loop(host: str, port: int, requests: Sequence[bytes], *, clients: int, seconds: float) -> Run:
    """`clients` connections, each sending its next request when the last is answered, for `seconds`."""
    run = Run()
    ends = time.perf_counter() + seconds

    async def client(number: int) -> None:
        connection = await _connect(host, port)
        turn = number
        while (started := time.perf_counter()) < ends:
            which = turn % len(requests)
            turn += clients
            await _call(connection, requests[which], which, started, run)
        connection.close()

    started = time.perf_counter()
    await asyncio.gather(*(client(n) for n in range(clients)))
    run.wall_s = time.perf_counter() - started
    return run


async def open_loop(
    host: str,
    port: int,
    requests: Sequence[bytes],
    *,
    rate: float,
    seconds: float,
    connections: int,
    seed: int,
    made: Callable[[bytes], bytes] = lambda request: request,
) -> Run:
    """Poisson arrivals at `rate` a second for `seconds`, each by a customer drawn at random; `made` of its request is
    what is sent."""
    run = Run()
    rng = random.Random(seed)
    waiting: deque[tuple[int, float]] = deque()
    arrived = asyncio.Event()
    over = False

    async def server(connection: Connection) -> None:
        while True:
            while not waiting:
                if over:
                    connection.close()
                    return
                arrived.clear()
                await arrived.wait()
            which, due = waiting.popleft()
            await _call(connection, made(requests[which]), which, due, run)

    tasks = [asyncio.ensure_future(server(await _connect(host, port))) for _ in range(connections)]
    started = time.perf_counter()
    due = started
    while due < started + seconds:
        due += rng.expovariate(rate)
        pause = due - time.perf_counter()
        if pause > 0:
            await asyncio.sleep(pause)
        waiting.append((rng.randrange(len(requests)), due))
        arrived.set()
    over = True
    arrived.set()
    await asyncio.gather(*tasks)
    run.wall_s = time.perf_counter() - started
    return run


async def _call(connection: Connection, request: bytes, which: int, due: float, run: Run) -> None:
    try:
        status = await connection.call(request)
    except (OSError, asyncio.TimeoutError):
        run.unanswered += 1
        raise
    run.statuses[status] += 1
    if status == 200:
        run.latencies_s.append(time.perf_counter() - due)
        run.by_customer[which] += 1


def http_request(path: str, key: str, body: bytes) -> bytes:
    """A whole HTTP/1.1 POST as bytes."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


Progress = Callable[[str], None]
