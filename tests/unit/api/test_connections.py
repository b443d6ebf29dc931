"""Which connections keep their place and which are closed; the rules on made-up ones, then aiohttp on the wire."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from aiohttp import web

from api.door.connection import Connection
from api.door.connections import (
    HEAD_WITHIN_S,
    IDLE_S,
    MOST_AHEAD_BYTES,
    MOST_OWED_BYTES,
    SPOILT_S,
    Connections,
)
from api.door.files import room_for_files
from api.door.pace import Pace
from api.door.unread import UNREAD_S
from api.errors import Unauthorized, Unavailable
from api.middleware import connected, envelope, paced
from api.services import CONNECTIONS, FREE, STRANGERS
from tests.conditions import eventually
from tests.fakes import Clock

MIB = 1024 * 1024


class Wire(asyncio.Transport):
    """A transport that only notes that it was closed."""

    def __init__(self, peer: str) -> None:
        super().__init__({"peername": (peer, 1)})
        self.aborted = self.paused = False
        self.unsent_bytes = 0

    def is_closing(self) -> bool:
        return self.aborted

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def write(self, data: object) -> None: ...

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def abort(self) -> None:
        self.aborted = True


def real(wire: Any) -> Wire:
    """The socket's transport behind the one that a protocol has."""
    return cast(Wire, wire._transport)


class Hall:
    """Connections with nobody behind them."""

    def __init__(self, **changes: Any) -> None:
        self.clock = Clock()
        self.connections = Connections(**{"serve": asyncio.Protocol, "most": 8, "clock": self.clock, **changes})

    def connect(self, peer: str = "1.1.1.1") -> tuple[Connection, Wire]:
        connection = self.connections()
        connection.connection_made(Wire(peer))
        self.clock.now_s += 0.001
        return connection, cast(Wire, connection.transport)

    def late_after(self, seconds: float, wire: Wire) -> bool:
        self.clock.now_s += seconds
        self.connections.close_late()
        return wire.aborted


def test_a_head_has_its_time_from_the_start_and_however_slowly_its_bytes_come() -> None:
    hall = Hall()
    connection, wire = hall.connect()
    for _ in range(9):
        connection.data_received(b"G")
        assert not hall.late_after((HEAD_WITHIN_S - 0.1) / 9, wire)
    assert hall.late_after(0.1, wire)
    assert len(hall.connections) == 0
    assert hall.connections.counts["heads_late"] == 1


def test_a_call_may_take_as_long_as_it_wants_and_an_idle_connection_waits_long() -> None:
    hall = Hall()
    connection, wire = hall.connect()
    hall.connections.asked(wire)
    connection.data_received(b"a body")
    assert not hall.late_after(10 * IDLE_S, wire)
    hall.connections.answered(wire)
    assert not hall.late_after(IDLE_S - 1, wire)
    # The first byte of another head begins the shorter time.
    connection.data_received(b"G")
    assert not hall.late_after(HEAD_WITHIN_S - 1, wire)
    assert hall.late_after(1, wire)
    _, idle = hall.connect()
    hall.connections.asked(idle)
    hall.connections.answered(idle)
    assert hall.late_after(IDLE_S, idle)


def test_a_new_one_takes_the_place_of_what_has_asked_for_nothing_longest() -> None:
    hall = Hall(most=4)
    idle, owing, busy, late = [hall.connect(f"1.1.1.{n}")[1] for n in range(4)]
    for wire in (idle, busy):
        hall.connections.asked(wire)
    hall.connections.answered(idle)
    for gone in (owing, late, idle):
        _, new = hall.connect("2.2.2.2" if gone is owing else "3.3.3.3")
        assert (gone.aborted, new.aborted) == (True, False)
        hall.connections.asked(new)
        assert len(hall.connections) == 4
    # All are being answered: there is no place.
    _, refused = hall.connect("4.4.4.4")
    assert refused.aborted
    assert not busy.aborted
    assert hall.connections.counts == {
        "connections_refused": 1,
        "connections_closed_for_others": 3,
        "heads_late": 0,
        "heads_large": 0,
        "answers_unread": 0,
    }


def test_one_peer_has_at_most_half_and_takes_it_from_itself() -> None:
    hall = Hall(most=8)
    _, other = hall.connect("2.2.2.2")
    mine = [hall.connect("1.1.1.1")[1] for _ in range(20)]
    assert [w.aborted for w in mine] == [True] * 16 + [False] * 4
    assert not other.aborted
    for wire in mine:
        hall.connections.asked(wire)
    assert hall.connect("1.1.1.1")[1].aborted
    assert not hall.connect("2.2.2.2")[1].aborted


def test_places_are_free_again_when_connections_are_lost_however_they_ended() -> None:
    hall = Hall(most=2)
    for _ in range(50):
        connection, wire = hall.connect()
        hall.connections.asked(wire)
        connection.connection_lost(None)
        hall.connections.answered(wire)  # its handler ends later
        connection, wire = hall.connect()
        hall.connect()
        connection.connection_lost(None)  # as asyncio tells of one that was closed
    assert len(hall.connections) <= 1
    assert sum(hall.connections._peers.values()) == len(hall.connections)


def test_who_never_asked_is_told_of() -> None:
    wasted: list[str] = []
    hall = Hall(wasted=wasted.append, most=4)
    for n in range(4):
        connection, wire = hall.connect(f"{n}.1.1.1")
        if n % 2:
            hall.connections.asked(wire)
        connection.connection_lost(None)
        connection.connection_lost(None)
    _, late = hall.connect("7.1.1.1")
    assert hall.late_after(HEAD_WITHIN_S, late)
    assert wasted == ["0.1.1.1", "2.1.1.1", "7.1.1.1"]


def test_a_barred_peer_is_not_served_but_kept_for_a_while_so_that_it_does_not_come_again_at_once() -> None:
    wasted: list[str] = []
    hall = Hall(barred=lambda peer: peer == "6.6.6.6", wasted=wasted.append)
    barred, wire = hall.connect("6.6.6.6")
    assert wire.paused
    assert not hall.connect("1.1.1.1")[1].paused
    barred.data_received(b"GET")  # nobody hears it
    assert not hall.late_after(SPOILT_S - 0.1, wire)
    assert hall.late_after(0.1, wire)
    assert hall.connections.counts["connections_refused"] == 1
    assert len(hall.connections) == 1
    assert wasted == []  # it was counted before, or it would never end


def test_what_is_no_question_is_read_no_further_and_gives_its_place_to_others_first() -> None:
    hall = Hall(most=4)
    _, owing = hall.connect("2.2.2.2")
    spoilt, wire = hall.connect("1.1.1.1")
    hall.connections.spoilt(wire)
    assert wire.paused
    assert not hall.connections.heard(spoilt, 10)
    hall.connect("3.3.3.3")
    hall.connect("4.4.4.4")
    hall.connect("5.5.5.5")
    assert (wire.aborted, owing.aborted) == (True, False)
    large, wire = hall.connect("6.6.6.6")
    assert not hall.connections.heard(large, MOST_OWED_BYTES + 1)
    assert wire.paused
    assert hall.connections.held_bytes == MOST_OWED_BYTES + 1  # its protocol may hold them still
    assert not hall.late_after(SPOILT_S - 0.1, wire)
    assert hall.late_after(0.1, wire)
    assert hall.connections.held_bytes == 0


class Listener(asyncio.Protocol):
    """Keeps the transport that it was given."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)


def test_a_connection_is_read_while_neither_the_door_nor_the_protocol_would_have_it_otherwise() -> None:
    listener = Listener()
    hall = Hall(serve=lambda: listener)
    connection, wire = hall.connect()
    for first, second in (
        ((connection.pause, connection.resume), (listener.transport.pause_reading, listener.transport.resume_reading)),
        ((listener.transport.pause_reading, listener.transport.resume_reading), (connection.pause, connection.resume)),
    ):
        first[0]()
        second[1]()  # it never had anything against it
        assert wire.paused
        second[0]()
        first[1]()
        assert wire.paused
        second[1]()
        assert not wire.paused


def test_what_a_call_read_is_let_go_of_with_its_answer_and_the_rest_when_nothing_more_is_asked() -> None:
    hall = Hall()
    connection, wire = hall.connect()
    question = 100 + 15_000
    hall.connections.heard(connection, question)
    for _ in range(40):
        # Always one ahead.
        hall.connections.asked(wire, 100)
        assert hall.connections.heard(connection, question)
        hall.connections.fed(connection)
        hall.connections.answered(wire, 15_000)
        assert (connection.held_bytes, wire.paused) == (question, False)
    # A body that was read piece by piece was counted then.
    hall.connections.asked(wire, 100)
    hall.connections.took(wire)
    hall.connections.heard(connection, 7 + 5_000)
    hall.connections.answered(wire, 15_000)
    assert connection.held_bytes == 5_007
    # How it was written is not known to the byte; what no call begins with is nothing that waits.
    hall.connections.asked(wire, 7)
    hall.connections.answered(wire, 4_990)
    assert connection.held_bytes == 10
    assert not hall.late_after(1, wire)
    assert (connection.held_bytes, hall.connections.held_bytes) == (0, 0)


def test_who_stopped_reading_its_answer_is_not_let_to_send_more_meanwhile() -> None:
    hall = Hall()
    connection, wire = hall.connect()
    hall.connections.asked(wire)
    hall.connections.heard(connection, MOST_AHEAD_BYTES + 1)
    hall.connections.fed(connection)
    hall.connections.answered(wire)
    hall.connections.stuck(connection)
    for _ in range(3):
        hall.late_after(1, wire)
        assert wire.paused
    hall.connections.read_on(connection)
    hall.late_after(1, wire)
    assert not wire.paused


def test_who_reads_slowly_all_the_time_is_not_cut_off_and_who_stops_is() -> None:
    hall = Hall()
    connection, wire = hall.connect()
    hall.connections.asked(wire)
    real(wire).unsent_bytes = MIB
    hall.connections.stuck(connection)
    for _ in range(5):
        assert not hall.late_after(UNREAD_S - 1, wire)
        real(wire).unsent_bytes -= 1000
    assert not hall.late_after(UNREAD_S - 1, wire)
    # To be given more to read is not to read.
    real(wire).unsent_bytes += MIB
    assert not hall.late_after(UNREAD_S - 1, wire)
    assert hall.late_after(1, wire)


def test_of_those_who_do_not_read_the_one_with_the_most_left_is_cut_off_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.door.unread.MOST_UNREAD_BYTES", 10 * MIB)
    hall = Hall(most=20)
    wires = []
    for size in (1, 2, 6, 1):
        connection, wire = hall.connect()
        hall.connections.asked(wire)
        real(wire).unsent_bytes = size * MIB
        hall.connections.stuck(connection)
        wires.append(wire)
    assert not any(wire.aborted for wire in wires)
    connection, wire = hall.connect()
    hall.connections.asked(wire)
    real(wire).unsent_bytes = MIB
    hall.connections.stuck(connection)
    assert [w.aborted for w in (*wires, wire)] == [False, False, True, False, False]
    assert hall.connections.counts["answers_unread"] == 1
    # Also when it was given more to read since.
    real(wires[1]).unsent_bytes = 9 * MIB
    assert hall.late_after(1, wires[1])
    assert not wires[0].aborted


def test_a_spoilt_connection_stays_so_whatever_is_told_of_its_call() -> None:
    hall = Hall()
    _, wire = hall.connect()
    hall.connections.asked(wire, 0)
    hall.connections.spoilt(wire)
    for tell in (hall.connections.took, hall.connections.answered, hall.connections.leaving):
        tell(wire)
        assert wire.paused
        assert not hall.connections._idle
        assert not hall.connections._owing
    assert not hall.late_after(SPOILT_S - 0.1, wire)
    assert hall.late_after(0.1, wire)


@pytest.mark.parametrize(
    ("limits", "wanted", "room", "raised"),
    [
        ((1024, 1_048_576), 4096, 4096, 4352),
        ((1024, 2048), 4096, 1792, 2048),
        ((1_000_000, 1_000_000), 4096, 4096, None),
        ((1024, resource.RLIM_INFINITY), 4096, 4096, 4352),
        ((100, 100), 4096, 1, 100),
    ],
)
def test_the_limit_of_open_files_is_raised_or_bounds_the_connections(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: int, room: int, raised: int | None
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _which, both: set_to.append(both[0]))
    assert room_for_files(wanted) == room
    assert set_to == ([] if raised is None else [raised])


class Shop:
    """A gateway's front on a real socket: two paths, and a clock of the test's."""

    def __init__(self, app: web.Application, port: int, clock: Clock, go: asyncio.Event) -> None:
        self.port, self.clock, self.go = port, clock, go
        self._writers: list[asyncio.StreamWriter] = []
        self.connections, self.strangers = app[CONNECTIONS], app[STRANGERS]

    async def pass_s(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.connections.close_late()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

    async def send(self, text: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        before = len(self.connections)
        reader, writer = await self.connect()
        await eventually(lambda: len(self.connections) > before)
        writer.write(text)
        await writer.drain()
        return reader, writer


@asynccontextmanager
async def open_shop(*, per_s: float = 1e6, most: int = 2000) -> AsyncIterator[Shop]:
    go = asyncio.Event()

    async def ask(_request: web.Request) -> web.Response:
        return web.Response(body=b"{}")

    async def slow(_request: web.Request) -> web.Response:
        await go.wait()
        return web.Response(body=b"{}")

    async def secret(_request: web.Request) -> web.Response:
        raise Unauthorized("no key")

    async def busy(_request: web.Request) -> web.Response:
        raise Unavailable("later", code="keys_busy")

    clock = Clock()
    app = web.Application(middlewares=[connected, envelope, paced])
    app.add_routes(
        [
            web.get("/ask", ask),
            web.post("/ask", ask),
            web.get("/slow", slow),
            web.get("/registry/x", ask),
            web.get("/healthz", ask),
            web.get("/secret", secret),
            web.get("/busy", busy),
        ]
    )
    app[STRANGERS] = Pace(per_s=per_s)
    app[FREE] = Pace(per_s=1e6, name="free_calls")
    runner = web.AppRunner(app, access_log=None, lingering_time=0.1, shutdown_timeout=1, handler_cancellation=True)

    def serve() -> asyncio.Protocol:
        assert runner.server is not None
        return runner.server()

    app[CONNECTIONS] = connections = Connections(serve, most=most, clock=clock)
    await runner.setup()
    server = await asyncio.get_running_loop().create_server(connections, "127.0.0.1", 0)
    shop = Shop(app, server.sockets[0].getsockname()[1], clock, go)
    try:
        yield shop
    finally:
        await shop.close()
        server.close()
        await runner.cleanup()
        await eventually(lambda: len(connections) == 0)


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    size = next(int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:"))
    return int(head[9:12]), head + await reader.readexactly(size)


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What still came before the end."""
    try:
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionResetError:
        return b""


ASK = b"GET /ask HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "begun",
    [b"", b"G", b"GET /ask HTTP/1.1\r\nHost: x\r\n", b"GET /ask HTTP/1.1\r\nX: " + b"y" * 1000, ASK + b"GET /as"],
)
async def test_a_head_that_never_ends_is_closed_and_others_are_answered(begun: bytes) -> None:
    async with open_shop() as shop:
        reader, writer = await shop.send(begun)
        if begun.startswith(ASK):
            assert (await answer(reader))[0] == 200
            writer.write(b"k")
            await eventually(lambda: len(shop.connections._owing) == 1)
        other_reader, other = await shop.send(ASK)
        assert (await answer(other_reader))[0] == 200
        await shop.pass_s(HEAD_WITHIN_S)
        assert await closed(reader) == b""
        other.write(ASK)
        assert (await answer(other_reader))[0] == 200


async def test_a_call_that_takes_long_is_answered_and_an_idle_connection_is_closed_later() -> None:
    async with open_shop() as shop:
        reader, writer = await shop.send(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: len(shop.connections._owing) == 0)
        await shop.pass_s(10 * IDLE_S)
        shop.go.set()
        assert (await answer(reader))[0] == 200
        await eventually(lambda: len(shop.connections._idle) == 1)
        await shop.pass_s(IDLE_S - 1)
        writer.write(ASK)
        assert (await answer(reader))[0] == 200
        await eventually(lambda: len(shop.connections._idle) == 1)
        await shop.pass_s(IDLE_S)
        assert await closed(reader) == b""


async def test_pipelined_calls_are_answered_in_order_and_garbage_behind_them_closes() -> None:
    async with open_shop() as shop:
        reader, writer = await shop.send(ASK * 40)
        assert [(await answer(reader))[0] for _ in range(40)] == [200] * 40
        writer.write(b"\x00garbage\r\n\r\n")
        assert b" 400 " in await closed(reader)
        await eventually(lambda: len(shop.connections) == 0)


async def test_hundreds_of_slow_heads_leave_places_to_others() -> None:
    async with open_shop(most=100) as shop:
        slow = [await shop.connect() for _ in range(300)]
        for _, writer in slow:
            writer.write(b"GET /as")
        reader, writer = await shop.connect()
        writer.write(ASK)
        assert (await answer(reader))[0] == 200
        assert len(shop.connections) <= 50


@pytest.mark.parametrize("path", ["/registry/x", "/registry/nowhere", "/nowhere", "/secret", "/busy"])
async def test_strangers_are_answered_at_their_rate_refused_past_it_and_the_keyed_are_not(path: str) -> None:
    async with open_shop(per_s=4) as shop:
        calls = [await shop.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()) for _ in range(9)]
        keyed_reader, _ = await shop.send(ASK)
        assert (await answer(keyed_reader))[0] == 200  # while all of them wait
        health_reader, _ = await shop.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await answer(health_reader))[0] == 200
        answers = [await answer(reader) for reader, _ in calls]
        refused = [text for status, text in answers if status == 429]
        assert refused
        assert len({status for status, _ in answers} - {429}) == 1
        assert all(b"retry-after: 1" in text.lower() for text in refused)
        assert not path.startswith("/registry") or all(b'"error_code":429' in text for text in refused)
        assert 1 <= sum(status != 429 for status, _ in answers) <= 6


async def test_when_too_many_refusals_are_held_the_next_is_told_at_once_and_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("api.door.pace.MOST_HELD_BY_PEER", 0)
    async with open_shop(per_s=2) as shop:
        first, *calls = [await shop.send(b"GET /registry/x HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(5)]
        assert (await answer(first[0]))[0] == 200
        status, text = await answer(calls[-1][0])
        assert (status, b"connection: close" in text.lower()) == (429, True)
        assert await closed(calls[-1][0]) == b""


async def test_a_call_with_a_good_key_makes_its_peer_welcome() -> None:
    async with open_shop() as shop:
        while not shop.strangers.crowding("127.0.0.1"):
            shop.strangers.wasted("127.0.0.1")
        reader, _ = await shop.send(ASK)
        assert (await answer(reader))[0] == 200
        assert not shop.strangers.crowding("127.0.0.1")
