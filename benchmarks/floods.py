"""Callers who mean no good, one kind per process: `python -m benchmarks.floods KIND PORT`, told by lines when to begin
and when to stop; each then prints what it saw as one JSON object.

They run only when nothing else wants to, since they stand for other machines.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import lru_cache

import uvloop

from benchmarks.load import http_request
from schemas.lockfile import versions_of

FLOODERS, MANY, SLOW, LARGE = 64, 600, 500, 16
_MIB = 1024 * 1024
_BODY_BYTES = 4 * _MIB
#: What one process takes of them from one address: 200 turns, of which each takes five.
_BOMBS_PER_S = 40
_SUBJECT = "inference.requests.default.v1-value"
_INFER = "/v2/models/digits/infer"
#: The address they come from, which is not the customer's if nothing else is said.
_FROM = os.environ.get("FLOOD_FROM", "127.0.0.2")
Seen = Counter[str]


async def _connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(_FROM, 0))


def _fat_schema() -> bytes:
    """The largest body that the compatibility check takes."""
    definition = versions_of("inferlog.inference.v1.InferenceRequested")[-1].definition()
    for number in range(560):
        enum = {"type": "enum", "name": f"E{number}", "symbols": ["A", "B"]}
        definition["fields"].append({"name": f"f{number}", "type": ["null", enum], "default": None})
    while len(body := json.dumps({"schema": json.dumps(definition, separators=(",", ":"))})) > 64 * 1024:
        definition["fields"].pop()
    return body.encode()


def _small_call() -> bytes:
    inputs = [{"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}]
    return json.dumps({"inputs": inputs}).encode()


def _head(*headers: str, path: str = _INFER, key: str = "") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


async def _status(reader: asyncio.StreamReader) -> str:
    """The status of the next answer, read whole; "closed" when there is none."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:"))
        await reader.readexactly(int(size.split(b":")[1]))
        return head[9:12].decode()
    except (OSError, asyncio.IncompleteReadError, StopIteration):
        return "closed"


async def _many(count: int, one: Callable[[int], Awaitable[None]], over: asyncio.Event) -> None:
    """So many of these again and again until it is over; a connection that breaks is another try."""

    async def again(number: int) -> None:
        while True:
            with suppress(OSError):
                await one(number)
            await asyncio.sleep(0.001)

    tasks = [asyncio.ensure_future(again(number)) for number in range(count)]
    await over.wait()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _calls(port: int, calls: Sequence[bytes], over: asyncio.Event, *, count: int = FLOODERS) -> Seen:
    """Send calls on connections, each as soon as the last was answered or refused."""
    seen = Seen()

    async def one(turn: int) -> None:
        reader, writer = await _connect(port)
        try:
            while (end := "closed" if writer.is_closing() else "") != "closed":
                writer.write(calls[turn % len(calls)])
                turn += 1
                seen[end := await _status(reader)] += 1
                if end == "closed":
                    return
        finally:
            writer.close()

    await _many(count, one, over)
    return seen


async def registry(port: int, _key: str, over: asyncio.Event) -> Seen:
    """Reads and the dearest check of the schema registry, without a key."""
    check = http_request(f"/registry/compatibility/subjects/{_SUBJECT}/versions", "", _fat_schema())
    reads = [
        f"GET /registry{p} HTTP/1.1\r\nHost: x\r\n\r\n".encode() for p in ("/schemas", "/subjects", "/schemas/ids/1")
    ]
    return await _calls(port, [*reads, *reads, check], over)


async def strangers(port: int, _key: str, over: asyncio.Event) -> Seen:
    """Keys that were made up, and paths that are not there."""
    made_up = "il_test_0123456789abcdef_" + "x" * 40
    return await _calls(port, [http_request(_INFER, made_up, b"{}"), b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n"], over)


async def slow_headers(port: int, _key: str, over: asyncio.Event) -> Seen:
    """SLOW connections on which a header grows by a byte a second; how many were still open."""
    return await _drip(port, b"GET /registry/subj", b"e", over)


async def slow_bodies(port: int, key: str, over: asyncio.Event) -> Seen:
    """SLOW bodies of 4 MiB with a good key, of which 64 KiB come at once and then little; how many are still open."""
    return await _drip(port, _head(f"Content-Length: {_BODY_BYTES}", key=key) + b" " * 65536, b" " * 100, over)


async def _drip(port: int, first: bytes, then: bytes, over: asyncio.Event) -> Seen:
    opened = [await _connect(port) for _ in range(SLOW)]
    for _, writer in opened:
        writer.write(first)
    while not over.is_set():
        for _, writer in opened:
            writer.write(then)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(over.wait(), 1)
    still = sum(not reader.at_eof() for reader, _ in opened)
    for _, writer in opened:
        writer.transport.abort()
    return Seen(open=still, closed=SLOW - still)


async def _pour(port: int, head: bytes, chunk: bytes, over: asyncio.Event) -> Seen:
    """Send bodies that do not end, for as long as somebody takes them."""
    seen = Seen()

    async def one(_number: int) -> None:
        reader, writer = await _connect(port)
        answer = asyncio.ensure_future(_status(reader))
        try:
            writer.write(head)
            while not writer.is_closing() and not answer.done():
                writer.write(chunk)
                await writer.drain()
                seen["mib"] += len(chunk) // _MIB
            seen[await answer] += 1
        finally:
            answer.cancel()
            writer.transport.abort()

    await _many(LARGE, one, over)
    return seen


async def gigabytes(port: int, key: str, over: asyncio.Event) -> Seen:
    """Bodies that say they are a gigabyte, with a good key."""
    return await _pour(port, _head(f"Content-Length: {2**30}", key=key), b"x" * _MIB, over)


async def endless(port: int, key: str, over: asyncio.Event) -> Seen:
    """Chunked bodies that never end, with a good key."""
    chunk = b"100000\r\n" + b"x" * _MIB + b"\r\n"
    return await _pour(port, _head("Transfer-Encoding: chunked", key=key), chunk, over)


@lru_cache(maxsize=1)
def _bomb() -> bytes:
    return gzip.compress(b"\0" * 2**30, 6)


async def bombs(port: int, key: str, over: asyncio.Event) -> Seen:
    """Bodies of 1 MiB that unpack to 1 GiB, said to be packed in one way or another, with a good key."""
    calls = [
        _head(f"Content-Encoding: {encoding}", f"Content-Length: {len(_bomb())}", key=key) + _bomb()
        for encoding in ("gzip", "deflate", "gzip, gzip")
    ]
    return await _calls(port, calls, over, count=LARGE)


async def elsewhere(_port: int, key: str, over: asyncio.Event) -> Seen:
    """The same bombs, sent to a listener that is not the gateway and takes as many: what the machine feels of it."""
    turns = asyncio.Lock()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            async with turns:
                await asyncio.sleep(1 / _BOMBS_PER_S)
            writer.write(b"HTTP/1.1 415 No\r\nContent-Length: 0\r\n\r\n")
            await reader.readexactly(len(_bomb()))
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        return await bombs(server.sockets[0].getsockname()[1], key, over)


async def headers(port: int, key: str, over: asyncio.Event) -> Seen:
    """10,000 headers, and one of 1 MiB, with a good key."""
    many = _head(*(f"X-{n}: y" for n in range(10_000)), key=key)
    return await _calls(port, [many, _head("X: " + "y" * _MIB, key=key)], over)


async def over_rate(port: int, key: str, over: asyncio.Event) -> Seen:
    """Good calls with a good key on MANY connections, each as soon as the last was refused for its customer's rate."""
    return await _calls(port, [http_request(_INFER, key, _small_call())], over, count=MANY)


async def senseless(port: int, key: str, over: asyncio.Event) -> Seen:
    """Calls with a good key that are refused for what they say: 4 MiB of no JSON, and a deadline that has passed."""
    no_json = http_request(_INFER, key, b"[" + b"0," * (_BODY_BYTES // 2 - 1))
    late = json.dumps({**json.loads(_small_call()), "parameters": {"timeout": 1}}).encode()
    return await _calls(port, [no_json, http_request(_INFER, key, late)], over, count=FLOODERS)


async def unread(port: int, key: str, over: asyncio.Event) -> Seen:
    """Callers who vanish after their question: they neither read, nor send, nor close."""
    call, loop, opened = http_request(_INFER, key, _small_call()), asyncio.get_running_loop(), list[socket.socket]()

    async def one(_number: int) -> None:
        silent = socket.socket()
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        silent.setblocking(False)
        silent.bind((_FROM, 0))
        opened.append(silent)
        await loop.sock_connect(silent, ("127.0.0.1", port))
        await loop.sock_sendall(silent, call)
        await asyncio.sleep(0.2)

    await _many(LARGE, one, over)
    for silent in opened:
        silent.close()
    return Seen(open=len(opened))


async def pipelined(port: int, _key: str, over: asyncio.Event) -> Seen:
    """A hundred questions at once on each connection, without a key, and no answer is read before the last."""
    seen, calls = Seen(), b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 100

    async def one(_number: int) -> None:
        reader, writer = await _connect(port)
        try:
            writer.write(calls)
            for _ in range(100):
                seen[end := await _status(reader)] += 1
                if end == "closed":
                    return
        finally:
            writer.close()

    await _many(FLOODERS, one, over)
    return seen


FLOODS: dict[str, Callable[[int, str, asyncio.Event], Awaitable[Seen]]] = {
    flood.__name__: flood
    for flood in (
        registry,
        strangers,
        slow_headers,
        slow_bodies,
        gigabytes,
        endless,
        elsewhere,
        bombs,
        headers,
        over_rate,
        senseless,
        unread,
        pipelined,
    )
}


async def _attack(kind: str, port: int, key: str) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.nice(19)
    if kind in (bombs.__name__, elsewhere.__name__):
        _bomb()
    print(flush=True)  # ready
    while await lines.readline():
        over = asyncio.Event()
        attack = asyncio.ensure_future(FLOODS[kind](port, key, over))
        await lines.readline()
        over.set()
        print(json.dumps(await attack), flush=True)


if __name__ == "__main__":
    uvloop.run(_attack(sys.argv[1], int(sys.argv[2]), os.environ.get("FLOOD_KEY", "")))
