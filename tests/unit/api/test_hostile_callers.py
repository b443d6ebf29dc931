"""Callers who mean no good, on real sockets against the server as it is wired: what they get, and what they take."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timezone
from typing import Any

import pytest
from aiohttp import web

from api import middleware
from api.access.key_shape import mint
from api.door import bodies as bodies_module
from api.door import connections as module
from api.door import pace, unread
from api.door.bodies import Bodies
from api.door.connection import CHUNK_BYTES, Connection
from api.door.connections import IDLE_S, MOST_AHEAD_BYTES, MOST_UNWANTED_BYTES, SPOILT_S, Connections
from api.door.pace import Pace, Refused
from api.door.server import make_runner, open_door
from api.door.unread import UNREAD_S
from api.errors import (
    AcceptanceUnknown,
    AnswerLost,
    ApiError,
    BadInput,
    DeadlinePassed,
    RateLimited,
    Unauthorized,
    Unavailable,
)
from api.gate import refused
from api.limits.verdicts import Charge
from api.middleware import MOST_HEAD_BYTES, connected, envelope, paced
from api.services import BODIES, CONNECTIONS, FREE, STRANGERS, TOOK_TOKENS
from api.surfaces.http import parse_object, read_body
from tests.conditions import eventually
from tests.fakes import Clock

MIB = 1024 * 1024
MOST_BODY = 4 * MIB
TOKENS = Charge(at=datetime(2026, 1, 1, tzinfo=timezone.utc), buckets=(), headers={})
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class House:
    """A gateway's front: `/read` reads its body, `/secret` refuses before, `/slow` waits, `/fat` answers much."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.clock = Clock()
        self.port = 0
        self.read: list[int] = []
        self.app = web.Application(middlewares=[connected, envelope, paced], client_max_size=MOST_BODY)
        for path in ("read", "secret", "slow", "fat"):
            self.app.router.add_route("*", f"/{path}", getattr(self, f"_{path}"))
        self.app[STRANGERS] = Pace(per_s=1e6)
        self.app[FREE] = Pace(per_s=1e6, name="free_calls")
        self.app[BODIES] = Bodies(most_bytes=16 * MIB)
        self._writers: list[asyncio.StreamWriter] = []

    async def _read(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        self.read.append(len(body))
        return web.json_response({"size": len(body)})

    async def _secret(self, _request: web.Request) -> web.Response:
        raise Unauthorized("no key")

    async def _slow(self, _request: web.Request) -> web.Response:
        await self.go.wait()
        return web.json_response({})

    async def _fat(self, _request: web.Request) -> web.Response:
        return web.Response(body=b"x" * 16 * MIB)

    @property
    def connections(self) -> Connections:
        return self.app[CONNECTIONS]

    @property
    def bodies(self) -> Bodies:
        return self.app[BODIES]

    async def send(self, *parts: bytes, **options: Any) -> Streams:
        if options:
            own = socket.socket()
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["receives"])
            own.setblocking(False)
            await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", self.port))
            reader, writer = await asyncio.open_connection(sock=own, limit=1024)
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        for part in parts:
            writer.write(part)
        return reader, writer

    async def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def open_house(house: House | None = None) -> AsyncIterator[House]:
    house = house or House()
    runner = make_runner(house.app)
    house.app[CONNECTIONS] = open_door(runner, house.app[STRANGERS], most=2000, clock=house.clock)
    await runner.setup()
    server = await asyncio.get_running_loop().create_server(house.connections, "127.0.0.1", 0)
    house.port = server.sockets[0].getsockname()[1]
    try:
        yield house
    finally:
        house.go.set()
        await house.close()
        server.close()
        await runner.cleanup()
        await eventually(lambda: len(house.connections) == 0)
        assert house.bodies.held_bytes == 0
        assert house.connections.held_bytes == 0


def head(path: str = "/read", *headers: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


async def status(reader: asyncio.StreamReader) -> int:
    line = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    size = next((int(x.split(b":")[1]) for x in line.lower().split(b"\r\n") if x.startswith(b"content-length:")), 0)
    await reader.readexactly(size)
    return int(line[9:12])


async def closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await asyncio.wait_for(reader.read(2**16), 30):
            pass


async def pour(writer: asyncio.StreamWriter, chunk: bytes, times: int, *, patience_s: float = 0.5) -> int:
    """Send until it is all sent or nothing more is taken; how much that was."""
    sent = 0
    with suppress(ConnectionError, asyncio.TimeoutError):
        for _ in range(times):
            writer.write(chunk)
            await asyncio.wait_for(writer.drain(), patience_s)
            sent += len(chunk)
    return sent


BOMB = b"\0" * 200 * MIB


@pytest.mark.parametrize(
    "encoding", ["gzip", "x-gzip", "deflate", "br", "zstd", "GZIP", "gzip, gzip", "identity, gzip", "aws-chunked"]
)
async def test_packed_bodies_are_refused_by_the_name_of_their_header_and_never_unpacked(encoding: str) -> None:
    packed = zlib.compress(BOMB, 1) if encoding == "deflate" else gzip.compress(BOMB[: 50 * MIB], 1)
    if encoding == "gzip, gzip":
        packed = gzip.compress(packed)
    async with open_house() as house:
        tracemalloc.start()
        reader, _ = await house.send(
            head("/read", f"Content-Encoding: {encoding}", f"Content-Length: {len(packed)}"), packed
        )
        answer = await asyncio.wait_for(reader.readuntil(b"}"), 30)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert b" 415 " in answer
        assert b"Content-Encoding" in answer
        assert peak < 4 * MIB
        assert house.read == []


async def test_two_headers_say_no_more_than_one_and_identity_is_nothing() -> None:
    async with open_house() as house:
        reader, _ = await house.send(
            head("/read", "Content-Encoding: identity", "Content-Encoding: gzip", "Content-Length: 2"), b"{}"
        )
        assert await status(reader) == 415
        reader, _ = await house.send(head("/read", "Content-Encoding: identity", "Content-Length: 2"), b"{}")
        assert await status(reader) == 200


async def test_a_body_that_says_it_is_a_gigabyte_is_not_read() -> None:
    async with open_house() as house:
        reader, writer = await house.send(head("/read", f"Content-Length: {2**30}"))
        assert await status(reader) == 413
        assert await pour(writer, b"x" * MIB, 64) < 64 * MIB
        await closed(reader)


async def test_an_endless_body_is_read_to_the_limit() -> None:
    async with open_house() as house:
        reader, writer = await house.send(head("/read", "Transfer-Encoding: chunked"))
        pouring = asyncio.ensure_future(pour(writer, b"100000\r\n" + b"x" * MIB + b"\r\n", 1000))
        assert await status(reader) == 413
        await closed(reader)
        assert await pouring < 100 * MIB


async def test_a_body_of_tiny_chunks_is_read_however_much_their_frames_are() -> None:
    async with open_house() as house:
        reader, _ = await house.send(head("/read", "Transfer-Encoding: chunked"), b"1\r\nx\r\n" * 200_000, b"0\r\n\r\n")
        assert await status(reader) == 200
        assert house.read == [200_000]


async def test_who_has_no_key_makes_nobody_read_a_body() -> None:
    async with open_house() as house:
        reader, writer = await house.send(head("/secret", f"Content-Length: {3 * MIB}"))
        pouring = asyncio.ensure_future(pour(writer, b"x" * MIB, 3))
        assert await status(reader) == 401
        await pouring
        await closed(reader)
        assert house.bodies.held_bytes == 0
        assert house.connections.held_bytes <= MOST_UNWANTED_BYTES + module.MOST_AHEAD_BYTES


async def test_many_slow_large_bodies_take_a_bounded_part_and_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies_module, "YIELD_AFTER_S", 0.5)
    monkeypatch.setattr(bodies_module, "PATIENCE_S", 1.5)
    async with open_house() as house:
        said = [f"Content-Length: {MOST_BODY}", "Authorization: key {}"]
        slow = [await house.send(head("/read", said[0], said[1].format(n % 4)), b"x" * 1000) for n in range(100)]
        await eventually(lambda: house.bodies.counts["bodies_waited"] > 90)
        for _, writer in slow:
            writer.write(b"x" * MIB)
        assert house.bodies.held_bytes <= 16 * MIB
        small, _ = await house.send(head("/read", "Content-Length: 10000"), b"x" * 5000, b"x" * 5000)
        assert await status(small) == 200
        # However many of them come, the oldest give way.
        ends = [asyncio.ensure_future(status(reader)) for reader, _ in slow]
        await eventually(lambda: sum(end.done() for end in ends) > 90)
        assert {end.result() for end in ends if end.done()} == {503}
        large, _ = await house.send(head("/read", f"Content-Length: {MIB}", "Authorization: key 9"), b"x" * MIB)
        assert await status(large) == 200
        assert house.bodies.held_bytes <= 16 * MIB
        for end in ends:
            end.cancel()
        await asyncio.wait(ends)


@pytest.mark.parametrize(
    "headers",
    [
        [f"X-{n}: y" for n in range(10_000)],
        ["X: " + "y" * MIB],
        [f"X-{n}: " + "y" * 8000 for n in range(90)],
        [f"X-{n}: " + "y" * 1000 for n in range(60)],
    ],
    ids=["10,000 headers", "a header of 1 MiB", "720 KB in 90", "60 KB in 60"],
)
async def test_floods_of_headers_are_refused_and_closed(headers: list[str]) -> None:
    async with open_house() as house:
        reader, _ = await house.send(head("/read", *headers, method="GET"))
        said = b""
        is_large = len(headers) == 90
        if is_large:  # nobody answers it, and it is closed when it has been unread for its time
            await eventually(lambda: house.connections.counts["heads_large"] == 1)
            house.connections.close_late()
            assert len(house.connections) == 1
            house.clock.now_s += SPOILT_S
            house.connections.close_late()
        with suppress(ConnectionError):
            said = await asyncio.wait_for(reader.read(20), 30)
            await closed(reader)
        assert said[9:12] in (b"400", b"431", b"")
        # None of them is put together: aiohttp would take 100 headers of 8 KB.
        assert house.connections.counts["heads_large"] == int(is_large)
        assert house.read == []
        await eventually(lambda: len(house.connections) == 0)
        reader, _ = await house.send(head("/read", f"X: {'y' * 5000}", method="GET"))
        assert await status(reader) == 200


async def test_headers_that_are_a_little_too_large_hear_why() -> None:
    async with open_house() as house:
        many = [f"X-{n}: {'y' * 1000}" for n in range(MOST_HEAD_BYTES // 1000 + 1)]
        reader, _ = await house.send(head("/read", *many, method="GET"))
        assert await status(reader) == 431


async def test_heads_of_thousands_do_not_fill_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HELD_BYTES", MIB)
    async with open_house() as house:
        part = head("/read", *[f"X-{n}: {'y' * 900}" for n in range(60)], method="GET")[:-2]
        for _ in range(100):
            await house.send(part)
        await eventually(lambda: house.connections.counts["connections_closed_for_others"] > 50)
        assert house.connections.held_bytes <= MIB + len(part)
        reader, _ = await house.send(head("/read", method="GET"))
        assert await status(reader) == 200


async def test_who_sends_ahead_is_read_no_further_until_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_house() as house:
        held, heard = [0], house.connections.heard

        def watched(connection: Connection, size_bytes: int) -> bool:
            is_to_be_read = heard(connection, size_bytes)
            held.append(connection.held_bytes)
            return is_to_be_read

        monkeypatch.setattr(house.connections, "heard", watched)
        reader, writer = await house.send(head("/slow", method="GET"))
        await eventually(lambda: not house.connections._owing)
        large = head("/read", *[f"X-{n}: {'y' * 1000}" for n in range(30)], method="GET")
        pouring = asyncio.ensure_future(pour(writer, large * 10, 40, patience_s=30))
        await eventually(lambda: house.connections.held_bytes > MOST_AHEAD_BYTES)
        house.go.set()
        assert [await status(reader) for _ in range(401)] == [200] * 401
        await pouring
        assert max(held) <= MOST_AHEAD_BYTES + CHUNK_BYTES


async def test_who_vanishes_while_its_call_is_answered_is_closed_without_a_word() -> None:
    """Neither an end nor a reset comes from it: as after a cable was pulled."""
    async with open_house() as house:
        await house.send(head("/slow", method="GET"))
        await eventually(lambda: not house.connections._owing)
        house.go.set()
        await eventually(lambda: len(house.connections._idle) == 1)
        house.clock.now_s += IDLE_S
        house.connections.close_late()
        assert len(house.connections) == 0


async def test_who_does_not_read_its_answer_is_closed_and_much_of_that_kind_at_once() -> None:
    async with open_house() as house:
        for _ in range(4):
            await house.send(head("/fat", method="GET"), receives=4096)
        await eventually(lambda: len(house.connections._unread) == 4)
        house.clock.now_s += UNREAD_S - 1
        house.connections.close_late()
        assert len(house.connections) == 4
        house.clock.now_s += 1
        house.connections.close_late()
        assert len(house.connections) == 0
        assert house.connections.counts["answers_unread"] == 4


async def test_answers_that_nobody_reads_do_not_fill_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread, "MOST_UNREAD_BYTES", 80 * MIB)
    async with open_house() as house:
        for _ in range(20):
            await house.send(head("/fat", method="GET"), receives=4096)
        await eventually(lambda: house.connections.counts["answers_unread"] > 10)
        assert house.connections._unread.size_bytes <= 80 * MIB
        reader, _ = await house.send(head("/read", method="GET"))
        assert await status(reader) == 200


async def test_who_reads_slowly_but_reads_gets_all_of_it() -> None:
    async with open_house() as house:
        reader, _ = await house.send(head("/fat", method="GET"), receives=4096)
        await eventually(lambda: len(house.connections._unread) == 1)
        assert await status(reader) == 200
        await eventually(lambda: not house.connections._unread)
        house.clock.now_s += UNREAD_S
        house.connections.close_late()
        assert len(house.connections) == 1


async def test_what_is_no_http_hears_why_as_other_errors_do_and_nothing_of_what_it_sent() -> None:
    async with open_house() as house:
        for junk in (b"secret junk\r\n\r\n", head("/read", "X: " + "secret" * 2000)):
            reader, _ = await house.send(junk)
            said = (await asyncio.wait_for(reader.read(), 30)).decode()
            top, _, told = said.partition("\r\n\r\n")
            assert "x-error-code: unreadable" in top.lower()
            assert "server: inferlog\r\n" in f"{top}\r\n".lower(), "not which library in which version"
            assert json.loads(told)["request_id"] in top
            assert "secret" not in said


async def test_what_is_no_http_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async with open_house() as house:
        for junk in (b"\x16\x03\x01\x00junk\r\n\r\n", head("/read", *[f"X-{n}: y" for n in range(1000)])):
            reader, _ = await house.send(junk)
            assert b" 400 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), 30)
            await closed(reader)
        assert caplog.records == []


async def test_who_sends_what_nobody_takes_waits_like_a_stranger() -> None:
    async with open_house() as house:
        house.app[STRANGERS]._per_peer_s = 20
        asks = [
            head("/read", "Content-Encoding: gzip"),
            head("/read", f"Content-Length: {2**30}"),
            head("/read", *[f"X-{n}: {'y' * 1000}" for n in range(40)]),
            head("/read", *[f"X-{n}: y" for n in range(1000)]),
            head("/read", "X: " + "y" * 20_000),
            b"\x16\x03\x01\x00junk\r\n\r\n",
        ]
        for wanted, ask in zip((415, 413, 431, 400, 400, 400), asks, strict=True):
            before = house.app[STRANGERS].counts["strangers_waited"]
            for _ in range(4):
                reader, _ = await house.send(ask)
                assert await status(reader) == wanted
            assert house.app[STRANGERS].counts["strangers_waited"] >= before + 2


async def test_the_reading_of_bodies_that_nobody_wants_takes_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    async with open_house() as house:

        async def turn(_peer: str, *, turns: float = 1) -> None:
            asked.append(turns)

        monkeypatch.setattr(house.app[STRANGERS], "turn", turn)
        for length in (f"Content-Length: {2**30}", "Transfer-Encoding: chunked", "Content-Length: 100000", "X: y"):
            reader, _ = await house.send(head("/read", "Content-Encoding: gzip", length))
            assert await status(reader) == 415
    assert asked == [5, 5, pytest.approx(1 + 100_000 / (256 * 1024)), 1]


async def test_what_is_no_http_is_refused_like_any_call_when_there_is_too_much_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "HELD_S", 0.0)
    async with open_house() as house:
        house.app[STRANGERS]._per_peer_s = 1
        readers = [(await house.send(b"junk\r\n\r\n"))[0] for _ in range(10)]
        said = sorted([await status(reader) for reader in readers])
        assert 429 in said
        assert said[0] == 400
        for reader in readers:
            await closed(reader)


@pytest.mark.parametrize(
    ("outcome", "wanted", "turns"),
    [
        ("read", 200, 1),
        ("told", 200, 1),
        ("paid", 200, None),
        ("unreadable", 400, 2),
        ("over_rate", 429, 2),
        ("customer_crowded", 503, 2),
        *[(code, 503, 2) for code in ("overloaded", "spend_unknown", "no_such_pool", "claims_away", "limiter_away")],
        ("lost", 503, 2),
        ("late", 504, None),
        ("acceptance_unknown", 503, None),
        ("invalid_input", 400, None),
        ("broken", 500, None),
        ("bug", 500, None),
    ],
)
async def test_calls_with_a_good_key_that_take_no_tokens_wait_for_their_turn_and_others_do_not(
    outcome: str, wanted: int, turns: float | None
) -> None:
    asked: list[tuple[str, float]] = []
    accepted: dict[str, ApiError] = {"late": DeadlinePassed("late"), "acceptance_unknown": AcceptanceUnknown("perhaps")}
    accepted["invalid_input"] = BadInput("so says the model")
    others: dict[str, Exception] = {
        "unreadable": BadInput("no JSON"),
        "over_rate": RateLimited("too early"),
        "broken": ApiError("broken"),
    }
    # A repetition's: it took no tokens, whatever came of the first call.
    others |= {"lost": AnswerLost("lost", code="answer_lost"), "bug": ValueError("a bug")}

    async def answer(request: web.Request) -> web.StreamResponse:
        if outcome in accepted:
            raise refused(accepted[outcome], TOKENS)
        if outcome in others:
            raise others[outcome]
        if wanted == 503:
            raise Unavailable("later", code=outcome)
        request[TOOK_TOKENS] = outcome == "paid"
        response = web.json_response({})
        if outcome == "told":
            await response.prepare(request)
            await response.write_eof()
        return response

    house = House()
    house.app.router.add_post("/call", answer)

    async def turn(who: str, *, turns: float) -> None:
        asked.append((who, turns))
        if outcome != "read":  # it does not change what the caller hears
            raise Refused("calls", hang_up=False)

    house.app[FREE].turn = turn  # type: ignore[assignment, method-assign]
    async with open_house(house):
        secret = mint("test").secret
        for _ in range(2):
            reader, _ = await house.send(head("/call", f"Authorization: Bearer {secret}"))
            assert await status(reader) == wanted
        assert asked == ([] if turns is None else [(secret.split("_")[2], turns)] * 2)


async def test_a_refused_call_takes_turns_for_the_body_that_was_read_too() -> None:
    asked: list[float] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        await read_body(request)
        raise BadInput("no JSON")

    async def turn(_who: str, *, turns: float) -> None:
        asked.append(turns)

    house = House()
    house.app.router.add_post("/call", answer)
    house.app[FREE].turn = turn  # type: ignore[assignment, method-assign]
    async with open_house(house):
        for size in (0, 100_000, MIB):
            reader, writer = await house.send(
                head("/call", f"Authorization: Bearer {mint('test').secret}", f"Content-Length: {size}")
            )
            writer.write(b"x" * size)
            assert await status(reader) == 400
    assert asked == [2, pytest.approx(2 + 100_000 / (16 * 1024)), 66]


async def test_a_key_that_is_far_behind_with_its_refusals_is_refused_before_any_work_and_no_other_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "HELD_S", 0.0)
    judged: list[str] = []
    good = [mint("test").secret for _ in range(2)]

    async def answer(request: web.Request) -> web.StreamResponse:
        secret = request.headers["Authorization"].removeprefix("Bearer ")
        judged.append(secret)
        if secret not in good:
            raise Unauthorized("no such key")
        if "X-Refused" in request.headers:
            raise RateLimited("too early")
        request[TOOK_TOKENS] = True
        return web.json_response({})

    house = House()
    house.app.router.add_post("/call", answer)
    clock = Clock()
    house.app[FREE] = Pace(per_s=4, share=0.25, clock=clock)  # a turn a second for one key

    async def call(secret: str, *headers: str) -> int:
        reader, _ = await house.send(head("/call", f"Authorization: Bearer {secret}", *headers))
        return await status(reader)

    async with open_house(house):
        flooding, other = good
        assert await call(flooding, "X-Refused: yes") == 429
        assert await call(flooding) == 200, "two turns: the next would wait for less than two seconds"
        clock.now_s += 1
        assert await call(flooding, "X-Refused: yes") == 429  # three are owed now
        judged.clear()
        assert await call(flooding) == 429
        assert judged == [], "not even one that would have been good"
        assert await call(other) == 200
        made_up = flooding[: len("il_test_") + 12] + mint("test").secret[len("il_test_") + 12 :]
        assert await call(made_up) == 401, "one with its public id is no key of its customer's"
        clock.now_s += 2
        assert await call(flooding) == 200


async def test_refused_calls_that_wait_for_their_turn_hold_nothing_of_their_bodies() -> None:
    async def parse(request: web.Request) -> web.Response:
        body = await read_body(request)
        try:
            document = parse_object(body)
        except BadInput as error:
            raise BadInput("refused", code=error.code) from error
        raise BadInput(f"{len(document)} fields that nobody knows")

    waiting, go = [0], asyncio.Event()

    async def turn(_who: str, *, turns: float) -> None:
        waiting[0] += 1
        await go.wait()

    house = House()
    house.app.router.add_post("/parse", parse)
    house.app[FREE].turn = turn  # type: ignore[assignment, method-assign]
    tracemalloc.start()
    try:
        async with open_house(house):
            before, _ = tracemalloc.get_traced_memory()
            key = f"Authorization: Bearer {mint('test').secret}"
            readers = []
            for n in range(16):
                body = (b"[" if n % 2 else b'{"a":"') + b"x" * (MOST_BODY - 100) + (b"" if n % 2 else b'"}')
                reader, writer = await house.send(head("/parse", key, f"Content-Length: {len(body)}"), body)
                await writer.drain()
                del body
                await eventually(lambda n=n: waiting[0] == n + 1)  # type: ignore[misc]
                readers.append(reader)
            after, _ = tracemalloc.get_traced_memory()
            assert house.bodies.held_bytes == 0
            assert after - before < MOST_BODY
            go.set()
            assert [await status(reader) for reader in readers] == [400] * 16
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kept_s", [0.0, 3600.0])
@pytest.mark.parametrize("path", ["/read", "/refused"])
async def test_a_key_with_too_many_refusals_is_kept_on_its_connections_and_then_hung_up_on(
    path: str, kept_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert middleware.HUNG_UP_S < SPOILT_S

    async def refuse(_request: web.Request) -> web.Response:
        raise RateLimited("over the rate of this key")

    house = House()
    house.app.router.add_post("/refused", refuse)
    house.app[FREE] = Pace(per_s=8, share=0.25)
    monkeypatch.setattr(pace, "MOST_HELD_BY_PEER", 0)
    monkeypatch.setattr(middleware, "HUNG_UP_S", kept_s)
    key = f"Authorization: Bearer {mint('test').secret}"
    async with open_house(house):
        house.app[STRANGERS].welcome("127.0.0.1")
        calls = [await house.send(head(path, key) * 3) for _ in range(20)]
        if kept_s:
            await eventually(lambda: len(house.connections._spoilt) >= 10)
            assert all(connection._is_paused for connection in house.connections._spoilt)
            house.clock.now_s += SPOILT_S
            house.connections.close_late()
            assert not house.connections._spoilt
            assert len(house.connections) <= 10
        else:
            assert await status(calls[-1][0]) == 429
            await closed(calls[-1][0])  # and none of what it sent ahead is answered
        # To come again costs: its address is barred when it does so too often.
        assert house.app[STRANGERS]._peer("127.0.0.1").lately >= 10


async def test_reads_of_a_known_key_take_their_turn_before_their_work_and_made_up_keys_take_none_of_it() -> None:
    worked, asked = [0], []
    good = mint("test").secret

    async def work(request: web.Request) -> web.Response:
        worked[0] += 1
        if good not in request.headers.get("Authorization", ""):
            raise Unauthorized("unknown key")
        return web.json_response({})

    house = House()
    house.app.router.add_get("/work", work)

    async def turn(who: str, *, turns: float = 1.0) -> None:
        asked.append((who, worked[0]))
        if len(asked) > 2:
            raise Refused("calls", hang_up=False)

    house.app[FREE].turn = turn  # type: ignore[assignment, method-assign]
    key_id = good.split("_")[2]
    fake = mint("test").secret.split("_")
    fake[2] = key_id
    async with open_house(house):

        async def read(authorization: str) -> int:
            return await status((await house.send(head("/work", f"Authorization: {authorization}", method="GET")))[0])

        assert await read(f"Bearer {good}") == 200
        assert asked == [(key_id, 1)]  # it had to be looked up first
        assert await read("Bearer " + "_".join(fake)) == 401
        assert await read(f"bearer   {good}") == 200  # however it is spelt
        assert asked[1:] == [(key_id, 2)]
        assert await read(f"Bearer {good}") == 429
        assert worked == [3]


async def test_half_of_the_room_for_bodies_is_for_one_key_however_it_is_spelt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies_module, "PATIENCE_S", 0.2)
    async with open_house() as house:
        secret = mint("test").secret
        for spelt in ("Bearer {}", "bearer {}", "Bearer  {}", "BEARER {}", "Bearer {} "):
            said = head("/read", f"Authorization: {spelt.format(secret)}", f"Content-Length: {MOST_BODY}")
            await house.send(said, b"x" * 1000)
        await eventually(lambda: house.bodies.counts["bodies_crowded"] == 3)
        assert house.bodies.held_bytes == 8 * MIB
        assert all(secret not in holder for holder in house.bodies._holders)


SHAPES: dict[str, Callable[[bytes], tuple[str, bytes]]] = {
    "plain": lambda body: (f"Content-Length: {len(body)}", body),
    "chunked": lambda body: ("Transfer-Encoding: chunked", b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)),
    "crumbs": lambda body: ("Transfer-Encoding: chunked", b"1\r\nx\r\n" * len(body) + b"0\r\n\r\n"),
    "spaces": lambda body: (f"Content-Length:{' ' * 500}{len(body)}", body),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("path", "ahead", "size"),
    # A body that nobody reads is small here: were it to come in two parts, its connection would be closed.
    [("/read", 1, 15_000), ("/read", 1, 2), ("/read", 8, 3000), ("/read", 300, 10), ("/secret", 1, 2)],
)
async def test_who_sends_questions_with_bodies_ahead_gets_all_answers_and_nothing_stays_counted(
    path: str, shape: str, ahead: int, size: int
) -> None:
    """Both want to stop the reading, aiohttp after 32 questions and the door after so many bytes; neither for ever."""
    line, body = SHAPES[shape](b"x" * size)
    question = head(path, line) + body
    async with open_house() as house:
        reader, writer = await house.send(*[question] * ahead)
        # Plainly written ones are counted to the byte; of the others something is left over.
        sweeping = asyncio.ensure_future(asyncio.Event().wait() if shape == "plain" else sweep(house))
        for n in range(60 + ahead):
            if n < 60:
                writer.write(question)
            assert await status(reader) == (200 if path == "/read" else 401)
        await eventually(lambda: house.connections.held_bytes == 0)
        sweeping.cancel()
        assert len(house.connections) == 1


async def sweep(house: House) -> None:
    """As the gateway does, but at once: what a second is there is a turn of the loop here."""
    while True:
        house.clock.now_s += 1
        for connection in house.connections._idle:
            connection.since_s = max(connection.since_s, house.clock.now_s - 1)
        house.connections.close_late()
        await asyncio.sleep(0)


async def test_however_small_questions_are_no_more_of_them_are_taken_in_while_they_wait() -> None:
    async with open_house() as house:
        held: list[int] = []
        await_slow = head("/slow", method="GET")
        reader, writer = await house.send(await_slow)
        await eventually(lambda: not house.connections._owing)
        fed = house.connections.fed

        def watched(connection: Connection) -> None:
            held.append(connection.held_bytes)
            fed(connection)

        house.connections.fed = watched  # type: ignore[method-assign]
        small, count = head("/read", method="GET"), 20_000
        pouring = asyncio.ensure_future(pour(writer, small * 1000, count // 1000, patience_s=30))
        await eventually(lambda: house.connections.held_bytes > 1000)
        house.go.set()
        for _ in range(count + 1):
            assert await status(reader) == 200
        await pouring
        assert max(held) <= MOST_AHEAD_BYTES + CHUNK_BYTES
