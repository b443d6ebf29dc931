"""The gateway's surfaces through a real process on real servers: what callers send and what they get."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.conditions import eventually
from tests.integration.api_desk import (
    DIGITS,
    TEXTS,
    calling,
    customer,
    open_desk,
    pixels,
    register,
)


async def test_one_call_from_key_to_answer(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env) as desk:
        reply = await desk.caller.infer(2, id="mine", outputs=[{"name": "logits"}])
        assert reply.status == 200
        assert reply.json["id"] == "mine"
        assert reply.json["model_name"] == "digits"
        assert reply.json["model_version"] == DIGITS.version
        (logits,) = reply.json["outputs"]
        assert (logits["name"], logits["datatype"], logits["shape"]) == ("logits", "FP32", [2, 10])
        assert logits["data"] == [32.0, *range(1, 10)] * 2
        (request,) = desk.seen
        assert reply.headers["x-request-id"] == str(request.request_id)
        assert request.customer_id == desk.acme["customer_id"]
        assert request.key_id == desk.acme["key_id"]
        assert request.version == DIGITS.version
        assert request.item_count == 2
        assert [b.bucket for b in request.limiter_buckets] == [
            f"key:{request.key_id}",
            f"customer:{request.customer_id}",
        ]
        assert request.limiter_buckets[0].remaining == 99_999
        assert abs((request.limiter_time - request.occurred_at).total_seconds()) < 5
        assert reply.headers["x-ratelimit-remaining-requests"] == "99999"


async def test_the_deadline_can_be_shortened_and_not_extended(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env, INFERLOG_DEADLINE_S="7") as desk:
        for timeout_us in (2_000_000, 60_000_000):
            assert (await desk.caller.infer(parameters={"timeout": timeout_us})).status == 200
        lengths = [(r.deadline_at - r.occurred_at).total_seconds() for r in desk.seen]
        assert lengths == [2, 7]


async def test_a_version_can_be_pinned_by_the_caller_and_follows_the_route_otherwise(
    env: dict[str, str], spawn: Any
) -> None:
    from tests.fakes import manifest

    newer = manifest(producer="newer")
    async with open_desk(spawn, env) as desk:
        await register(env, "digits", newer)

        async def switched() -> bool:
            return (await desk.caller.infer()).json["model_version"] == newer.version

        await eventually(switched, what="the new route")
        for version in (DIGITS.version, DIGITS.version[:8]):
            path = f"/v2/models/digits/versions/{version}/infer"
            reply = await desk.caller.call("POST", path, {"inputs": [pixels()]})
            assert reply.json["model_version"] == DIGITS.version


async def test_the_unmodified_openai_client(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env) as desk:
        client = openai.AsyncOpenAI(base_url=desk.gateway.url + "/v1", api_key=desk.acme["key"], max_retries=0)
        async with client:
            made = await client.embeddings.create(model="texts", input=["one", "three"])
            assert [d.embedding for d in made.data] == [[3, 1, 2, 3], [5, 1, 2, 3]]
            assert [d.index for d in made.data] == [0, 1]
            assert made.usage.prompt_tokens == made.usage.total_tokens == 8
            assert made.model == "texts"
            as_floats = await client.embeddings.create(
                model=f"texts@sha256:{TEXTS.version[:12]}", input="one", encoding_format="float"
            )
            assert as_floats.data[0].embedding == [3, 1, 2, 3]
            assert {m.id async for m in client.models.list()} == {"digits", "texts"}
            assert (await client.models.retrieve("texts")).id == "texts"
            with pytest.raises(openai.NotFoundError) as missing:
                await client.embeddings.create(model="nope", input="x")
            assert missing.value.code == "model_not_found"
            assert missing.value.request_id
            with pytest.raises(openai.BadRequestError, match="tokens are not supported"):
                await client.embeddings.create(model="texts", input=[1, 2, 3])
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="il_test_x").embeddings.create(model="texts", input="x")


async def test_embeddings_are_base64_only_when_asked(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env) as desk:
        body = {"model": "texts", "input": "one"}
        plain = await desk.caller.call("POST", "/v1/embeddings", body)
        packed = await desk.caller.call("POST", "/v1/embeddings", {**body, "encoding_format": "base64"})
        assert plain.json["data"][0]["embedding"] == [3, 1, 2, 3]
        assert struct.unpack("<4f", base64.b64decode(packed.json["data"][0]["embedding"])) == (3, 1, 2, 3)


async def test_metadata_and_health(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env) as desk:
        stranger = desk.caller.with_key(None)
        for path in ("/healthz", "/readyz", "/v2", "/v2/health/live", "/v2/health/ready"):
            assert (await stranger.call("GET", path)).status == 200
        about = await desk.caller.call("GET", "/v2/models/digits")
        assert about.json["versions"] == [DIGITS.version]
        assert about.json["inputs"] == [{"name": "pixels", "datatype": "FP32", "shape": [-1, 64]}]
        assert (await desk.caller.call("GET", "/v2/models/digits/ready")).json == {"name": "digits", "ready": True}
        for path in ("/v2/models/digits", "/v2/models/digits/ready", "/v1/models", "/v1/models/texts", "/v1/usage"):
            assert (await stranger.call("GET", path)).status == 401


async def too_long() -> AsyncIterator[bytes]:
    for _ in range(100):
        yield b" " * 65536


INFER = "/v2/models/digits/infer"
EMBED = "/v1/embeddings"
GOOD = {"inputs": [pixels()]}
#: (what is wrong, method, path, body, headers, status, words of the error)
BAD: list[tuple[str, str, str, Any, dict[str, str], int, str]] = [
    ("no key", "POST", INFER, GOOD, {"Authorization": ""}, 401, "Authorization: Bearer"),
    ("not a key", "POST", INFER, GOOD, {"Authorization": "Bearer x"}, 401, "not an inferlog key"),
    ("basic auth", "POST", INFER, GOOD, {"Authorization": "Basic eDp5"}, 401, "bearer"),
    ("unknown model", "POST", "/v2/models/nope/infer", GOOD, {}, 404, "unknown model 'nope'"),
    ("unknown version", "POST", "/v2/models/digits/versions/deadbeef/infer", GOOD, {}, 404, "unknown version"),
    ("not JSON", "POST", INFER, b"{", {}, 400, "not JSON"),
    ("no body", "POST", INFER, b"", {}, 400, "not JSON"),
    ("not an object", "POST", INFER, [], {}, 400, "expected an object"),
    ("NaN", "POST", INFER, b'{"inputs": [NaN]}', {}, 400, "not JSON"),
    ("nested deeply", "POST", INFER, b"[" * 100_000, {}, 400, "not JSON"),
    ("no inputs", "POST", INFER, {}, {}, 400, "inputs: expected an array"),
    (
        "wrong name",
        "POST",
        INFER,
        {"inputs": [pixels(name="x")]},
        {},
        400,
        "input 'x': unknown; the model takes 'pixels'",
    ),
    (
        "wrong datatype",
        "POST",
        INFER,
        {"inputs": [pixels(datatype="FP64")]},
        {},
        400,
        "'pixels': datatype: expected 'FP32'",
    ),
    ("wrong shape", "POST", INFER, {"inputs": [pixels(shape=[1, 63])]}, {}, 400, "'pixels': shape: expected [-1, 64]"),
    ("wrong length", "POST", INFER, {"inputs": [pixels(data=[1])]}, {}, 400, "'pixels': data: expected 64 elements"),
    (
        "wrong element",
        "POST",
        INFER,
        {"inputs": [pixels(data=["a"] * 64)]},
        {},
        400,
        "'pixels': data[0]: expected numbers",
    ),
    ("huge number", "POST", INFER, {"inputs": [pixels(data=[10**40] * 64)]}, {}, 400, "'pixels': data"),
    ("too many items", "POST", INFER, {"inputs": [pixels(2049)]}, {}, 400, "holds 2049 items, expected 1 to 2048"),
    ("unknown output", "POST", INFER, {**GOOD, "outputs": [{"name": "q"}]}, {}, 400, "outputs[0].name"),
    ("output twice", "POST", INFER, {**GOOD, "outputs": [{"name": "logits"}] * 2}, {}, 400, "asked for twice"),
    ("bad timeout", "POST", INFER, {**GOOD, "parameters": {"timeout": -1}}, {}, 400, "parameters.timeout"),
    ("bad id", "POST", INFER, {**GOOD, "id": 7}, {}, 400, "id: expected a string"),
    ("binary", "POST", INFER, GOOD, {"Inference-Header-Content-Length": "2"}, 400, "binary_data=False"),
    ("large", "POST", INFER, io.BytesIO(b" " * 5_000_000), {}, 413, "larger than 4194304 bytes"),
    ("large, chunked", "POST", INFER, "too_long", {}, 413, "larger than 4194304 bytes"),
    ("method", "PUT", INFER, GOOD, {}, 405, "allowed: POST"),
    ("path", "GET", "/v2/nowhere", None, {}, 404, "nothing at this path"),
    ("openai: key", "POST", EMBED, {}, {"Authorization": ""}, 401, "Authorization: Bearer"),
    ("openai: JSON", "POST", EMBED, b"x", {}, 400, "not JSON"),
    ("openai: no model", "POST", EMBED, {"input": "x"}, {}, 400, "model: expected"),
    ("openai: task", "POST", EMBED, {"model": "digits", "input": "x"}, {}, 400, "does not make embeddings"),
    ("openai: input", "POST", EMBED, {"model": "texts"}, {}, 400, "input: expected"),
    ("openai: tokens", "POST", EMBED, {"model": "texts", "input": [[1]]}, {}, 400, "tokens are not supported"),
    (
        "openai: encoding",
        "POST",
        EMBED,
        {"model": "texts", "input": "x", "encoding_format": "hex"},
        {},
        400,
        "encoding_format",
    ),
    ("openai: width", "POST", EMBED, {"model": "texts", "input": "x", "dimensions": 3}, {}, 400, "dimensions"),
    ("openai: large", "POST", EMBED, "too_long", {}, 413, "larger than"),
    ("openai: unknown model", "GET", "/v1/models/nope", None, {}, 404, "unknown model 'nope'"),
    ("openai: method", "GET", EMBED, None, {}, 405, "allowed: POST"),
    ("usage: parameter", "GET", "/v1/usage?interval=week", None, {}, 400, "interval: expected 'hour' or 'day'"),
    ("usage: time", "GET", "/v1/usage?from=noon", None, {}, 400, "from: expected a date"),
    ("usage: method", "DELETE", "/v1/usage", None, {}, 405, "DELETE is not allowed"),
    ("elsewhere", "GET", "/nowhere", None, {}, 404, "nothing at this path"),
]


def told(path: str, reply: Any) -> str:
    """The error's words, from the shape its surface promises."""
    if path.startswith("/v2"):
        assert list(reply.json) == ["error"]
        return str(reply.json["error"])
    if path.startswith(("/v1/embeddings", "/v1/models")):
        assert set(reply.json["error"]) == {"message", "type", "param", "code"}
        return str(reply.json["error"]["message"])
    assert reply.headers["Content-Type"] == "application/problem+json"
    assert reply.json["status"] == reply.status
    return str(reply.json["detail"])


async def test_bad_input_is_refused_in_words_and_costs_nothing(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env) as desk:
        wrong = []
        for what, method, path, body, headers, status, words in BAD:
            sent = too_long() if body == "too_long" else body
            reply = await desk.caller.call(method, path, sent, **headers)
            said = told(path, reply)
            if reply.status != status or words not in said:
                wrong.append(f"{what}: expected {status} '{words}', got {reply.status} '{said}'")
            assert "x-request-id" in reply.headers
        assert not wrong, "\n".join(wrong)
        assert desk.seen == []
        # Nothing was taken from the limits either, and the process is as good as new.
        reply = await desk.caller.infer()
        assert reply.status == 200
        assert reply.headers["x-ratelimit-remaining-requests"] == "99999"
        assert "Traceback" not in desk.gateway.process.log.read_text()


async def test_many_customers_at_once_each_get_their_own_answers(env: dict[str, str], spawn: Any) -> None:
    async with open_desk(spawn, env) as desk:
        other = customer(env, "Other")
        async with calling(desk.gateway, other["key"]) as second:

            async def one(n: int) -> tuple[float, float]:
                data = [float(n)] * 64
                reply = await (desk.caller, second)[n % 2].call("POST", INFER, {"inputs": [pixels(data=data)]})
                assert reply.status == 200, reply.text
                return reply.json["outputs"][0]["data"][0], 64.0 * n

            answers = await asyncio.gather(*(one(n) for n in range(200)))
        assert all(got == expected for got, expected in answers)
        assert len({r.request_id for r in desk.seen}) == 200
