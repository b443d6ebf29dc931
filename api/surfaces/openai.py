"""OpenAI's embeddings and model list, so that its unmodified client works here."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from aiohttp import web

from api.errors import BadInput, NotFound
from api.gate import Inputs
from api.inference import Answer
from api.routing.catalogue import Deployment
from api.routing.references import split_name
from api.services import GATE, INFERENCE, REQUEST_ID, TRACEPARENT
from api.surfaces.call import HttpCall, tell, tell_whole
from api.surfaces.http import json_answer, json_kind, parse_object, read_body
from api.surfaces.pieces import PIECE_ELEMENTS, array_pieces, in_groups
from api.surfaces.tensor_json import item_count
from api.surfaces.token_bound import most_tokens
from schemas.records import Task
from schemas.tensors import Tensor, bytes_tensor

_FLOAT_SIZE_BYTES = 4
_OWNER = "inferlog"


class EmbeddingsCall(HttpCall):
    """One embeddings call; implements the port Ask."""

    __slots__ = ("_document", "base64", "model")

    def __init__(self, request: web.Request) -> None:
        super().__init__(request)
        self._document: dict[str, Any] = {}
        self.model = ""
        self.base64 = False

    @property
    def operation(self) -> str:
        """See Ask."""
        return "embeddings"

    async def target(self) -> tuple[str, str | None]:
        """See Ask: the body says it, as `name` or `name@reference`."""
        self._document = parse_object(await read_body(self._request))
        model = self._document.get("model")
        if not isinstance(model, str) or not model:
            raise BadInput(f"model: expected a model's name, found {json_kind(model)}", param="model")
        self.model = model
        return split_name(model)

    async def inputs(self, deployment: Deployment) -> Inputs:
        """See Ask."""
        if deployment.task is not Task.EMBEDDINGS:
            raise BadInput(f"model '{deployment.model}' does not make embeddings", code="wrong_task", param="model")
        self.base64 = self._encoding() == "base64"
        width = deployment.manifest.outputs[0].shape[-1]
        dimensions = self._document.get("dimensions")
        if dimensions is not None and dimensions != width:
            raise BadInput(
                f"dimensions: model '{deployment.model}' has {width}, others cannot be asked for", param="dimensions"
            )
        texts = _texts(self._document.get("input"))
        tensor = bytes_tensor(deployment.manifest.inputs[0].name, (text.encode() for text in texts))
        self._document = {}  # it may hold far more than its texts, and the call lasts
        tokens = most_tokens(texts, max_length=deployment.manifest.max_length)
        return Inputs(tensors=(tensor,), item_count=item_count((tensor,)), tokens=tokens)

    def _encoding(self) -> str:
        encoding = self._document.get("encoding_format", "float")
        if encoding not in ("float", "base64"):
            raise BadInput("encoding_format: expected 'float' or 'base64'", param="encoding_format")
        return str(encoding)


def _texts(found: Any) -> Sequence[str]:
    """`input` as texts. Tokens are refused: which tokenizer made them is not known here."""
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not texts:
        raise BadInput(
            f"input: expected a string or a non-empty array of strings, found {json_kind(found)}", param="input"
        )
    for at, text in enumerate(texts):
        if isinstance(text, (int, list)) and not isinstance(text, bool):
            raise BadInput(
                "input: tokens are not supported; send the text itself", code="tokens_unsupported", param="input"
            )
        if not isinstance(text, str):
            raise BadInput(f"input[{at}]: expected a string, found {json_kind(text)}", param="input")
        if not text:
            raise BadInput(f"input[{at}]: expected text, found an empty string", param="input")
    return texts


async def embeddings(request: web.Request) -> web.StreamResponse:
    """`POST /v1/embeddings`."""
    call = EmbeddingsCall(request)
    async with request.app[INFERENCE].run(call, request[REQUEST_ID], request[TRACEPARENT]) as answer:
        if answer.is_large:
            return await tell_whole(request, answer, _pieces(call, answer))
    return await tell(request, answer, json_answer(_document(call, answer), headers=answer.headers))


def _document(call: EmbeddingsCall, answer: Answer) -> dict[str, Any]:
    return {"object": "list", "data": list(_data(call, answer)), **_tail(call, answer)}


def _pieces(call: EmbeddingsCall, answer: Answer) -> Iterator[bytes]:
    """The same document as JSON, piece by piece."""
    yield b'{"object":"list","data":['
    width = answer.finished.outputs[0].shape[-1]
    yield from array_pieces(in_groups(_data(call, answer), max(1, PIECE_ELEMENTS // width)))
    yield b"]," + orjson.dumps(_tail(call, answer))[1:]


def _data(call: EmbeddingsCall, answer: Answer) -> Iterator[dict[str, Any]]:
    for i, vector in enumerate(_vectors(answer.finished.outputs[0], call.base64)):
        yield {"object": "embedding", "index": i, "embedding": vector}


def _tail(call: EmbeddingsCall, answer: Answer) -> dict[str, Any]:
    tokens = answer.finished.quantities.get("tokens", 0)
    return {"model": call.model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _vectors(tensor: Tensor, as_base64: bool) -> Iterator[Any]:
    """One vector per item, each as base64 of little-endian 32-bit floats or as a list of numbers."""
    width = tensor.shape[-1]
    size = width * _FLOAT_SIZE_BYTES
    for at in range(0, len(tensor.data), size):
        part = tensor.data[at : at + size]
        yield base64.b64encode(part).decode() if as_base64 else struct.unpack(f"<{width}f", part)


async def models(request: web.Request) -> web.Response:
    """`GET /v1/models`: those that the key may call."""
    gate = request.app[GATE]
    caller = await gate.caller(request.headers.get("Authorization"), "models")
    names = [known[0].model for known in gate.models(caller)]
    return json_answer({"object": "list", "data": [_model(name, gate.resolve(name, None, caller)) for name in names]})


async def model(request: web.Request) -> web.Response:
    """`GET /v1/models/{id}`, where id is `name` or `name@reference`."""
    gate = request.app[GATE]
    caller = await gate.caller(request.headers.get("Authorization"), "models")
    name = request.match_info["id"]
    try:
        deployment = gate.resolve(*split_name(name), caller)
    except NotFound as error:
        raise NotFound(error.message, code="model_not_found", param="model") from error
    return json_answer(_model(name, deployment))


def _model(name: str, deployment: Deployment) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(deployment.created_at.timestamp()),
        "owned_by": _OWNER,
        "version": deployment.version,
    }
