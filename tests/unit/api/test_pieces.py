"""Large answers: the same document as whole ones, never more of it at a time than a piece, told while it has room."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import aiohttp
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from api.errors import ApiError
from api.inference import Answer, Inference
from api.middleware import envelope
from api.routes import ROUTES
from api.services import INFERENCE
from api.surfaces import oip, openai
from api.surfaces.pieces import tell_in_pieces, tensor_pieces
from api.surfaces.tensor_json import render_tensor
from schemas.tensors import ELEMENT_SIZE_BYTES, Tensor, bytes_tensor
from tests.conditions import eventually
from tests.factories import finished


def floats(count: int, name: str = "y", *, width: int = 4) -> Tensor:
    return Tensor(
        name=name, datatype="FP32", shape=(count // width, width), data=struct.pack(f"<{count}f", *range(count))
    )


def answer(*outputs: Tensor) -> Answer:
    result = finished(outputs=outputs, quantities={"tokens": 7})
    admission = SimpleNamespace(
        charge=SimpleNamespace(headers={"RateLimit": "r"}),
        claim=None,
        decisions=SimpleNamespace(request_id=result.request_id),
    )
    return Answer(admission=cast(Any, admission), finished=result, is_large=True)


def infer_call(**changes: Any) -> oip.InferCall:
    call = oip.InferCall(cast(web.Request, None))
    for name, value in changes.items():
        setattr(call, name, value)
    return call


@pytest.mark.parametrize("count", [0, 4, 16 * 1024, 16 * 1024 + 4, 100_000])
def test_pieces_of_numbers_are_the_same_document(count: int) -> None:
    whole = answer(floats(count), floats(4, "z"))
    call = infer_call()
    assert b"".join(oip._pieces(call, whole)) == orjson.dumps(oip._document(call, whole))
    wanted = infer_call(wanted=["z"], caller_id="mine")
    assert b"".join(oip._pieces(wanted, whole)) == orjson.dumps(oip._document(wanted, whole))


@pytest.mark.parametrize("datatype", sorted(ELEMENT_SIZE_BYTES))
def test_pieces_of_every_datatype_are_the_same_document(datatype: str) -> None:
    data = bytes(range(256)) * 8 * 40
    count = len(data) // ELEMENT_SIZE_BYTES[datatype]
    tensor = Tensor(name="y", datatype=datatype, shape=(count,), data=data)
    assert b"".join(tensor_pieces(tensor)) == orjson.dumps(render_tensor(tensor))


def test_pieces_of_texts_are_the_same_document_and_what_is_no_text_is_told_before_anything_is() -> None:
    texts = bytes_tensor("t", [f"é{i}".encode() for i in range(40_000)])
    assert b"".join(tensor_pieces(texts)) == orjson.dumps(render_tensor(texts))
    with pytest.raises(ApiError, match="not text"):
        next(oip._pieces(infer_call(), answer(floats(4), bytes_tensor("t", [b"\xff"]))))


@pytest.mark.parametrize("as_base64", [False, True])
def test_pieces_of_embeddings_are_the_same_document(as_base64: bool) -> None:
    call = openai.EmbeddingsCall(cast(web.Request, None))
    call.model, call.base64 = "minilm", as_base64
    whole = answer(floats(100_000))
    assert b"".join(openai._pieces(call, whole)) == orjson.dumps(openai._document(call, whole))


def test_no_piece_holds_the_interpreter_for_long() -> None:
    pieces = list(oip._pieces(infer_call(), answer(floats(300_000, width=100))))
    assert max(map(len, pieces)) < 1_000_000
    embeddings = openai.EmbeddingsCall(cast(web.Request, None))
    assert max(map(len, openai._pieces(embeddings, answer(floats(300_000, width=100))))) < 1_000_000


@asynccontextmanager
async def telling(
    pieces: Iterator[bytes], *, within_s: float = 30, ended: list[bool] | None = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            return await tell_in_pieces(request, pieces, headers={"RateLimit": "r"}, within_s=within_s)
        finally:
            if ended is not None:
                ended.append(True)

    app = web.Application(middlewares=[envelope])
    app.router.add_get("/v2/x", handler)
    async with TestClient(TestServer(app)) as client, client.get("/v2/x") as told:
        yield told


async def test_it_arrives_whole_with_the_headers_of_every_answer() -> None:
    async with telling(iter([b"[", b"1," * 1_000_000, b"1]"])) as told:
        assert await told.json() == [1] * 1_000_001
        assert (told.status, told.headers["Server"], told.headers["RateLimit"]) == (200, "inferlog", "r")
        assert told.headers["Content-Type"] == "application/json"
        assert UUID(told.headers["x-request-id"]).version == 7


def failing_after(pieces: list[bytes]) -> Iterator[bytes]:
    yield from pieces
    raise ApiError("what went wrong")


async def test_what_fails_before_the_first_piece_is_told_and_what_fails_later_cuts_the_answer_off() -> None:
    async with telling(failing_after([])) as told:
        assert (told.status, await told.json()) == (500, {"error": "what went wrong"})
    async with telling(failing_after([b"[1"])) as told:
        assert told.status == 200
        with pytest.raises(aiohttp.ClientError):
            await told.read()


async def test_a_caller_that_does_not_read_is_cut_off() -> None:
    def without_end() -> Iterator[bytes]:
        while True:
            yield b"0," * 500_000

    ended: list[bool] = []
    async with telling(without_end(), within_s=0.2, ended=ended) as told:
        await eventually(lambda: ended)
        with pytest.raises(aiohttp.ClientError):
            await told.read()


class FakeInference:
    """Answers every call with `answer`; `inside` while it is being told."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.inside = 0
        self.told: list[Answer] = []

    def answered(self, answer: Answer) -> None:
        self.told.append(answer)

    @asynccontextmanager
    async def run(self, *_: Any) -> AsyncIterator[Answer]:
        self.inside += 1
        try:
            yield self.answer
        finally:
            self.inside -= 1


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v1/embeddings"])
async def test_a_large_answer_keeps_its_room_until_it_is_written(path: str) -> None:
    inference = FakeInference(answer(floats(2_000_000, width=500)))
    app = web.Application(middlewares=[envelope])
    app.add_routes(ROUTES)
    app[INFERENCE] = cast(Inference, inference)
    async with TestClient(TestServer(app)) as client, client.post(path) as told:
        assert inference.inside == 1, "more than the sockets hold is not written yet"
        assert orjson.loads(await told.read())
        await eventually(lambda: inference.inside == 0)
        assert inference.told == [inference.answer]
