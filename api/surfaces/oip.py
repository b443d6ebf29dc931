"""The Open Inference Protocol, version 2, over HTTP with JSON tensors (KServe's and Triton's common language)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson
from aiohttp import web

from api.admission.caller import Caller
from api.admission.deadlines import require_time
from api.errors import NO_RETRY, ApiError, BadInput, Unavailable
from api.gate import Inputs
from api.inference import Answer
from api.routing.catalogue import Deployment
from api.routing.references import split_name
from api.services import GATE, HEALTH, INFERENCE, QUEUES, REQUEST_ID, TRACEPARENT
from api.surfaces.call import HttpCall, tell, tell_whole
from api.surfaces.http import json_answer, json_kind, parse_object, read_body
from api.surfaces.pieces import require_text, tensor_pieces
from api.surfaces.tensor_json import parse_inputs, render_tensor
from api.surfaces.token_bound import tokens_of
from schemas.manifest import TensorSpec
from schemas.tensors import Tensor

SERVER_NAME = "inferlog"


def server_version() -> str:
    """Version of this program."""
    try:
        return version("inferlog")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"


class InferCall(HttpCall):
    """One infer call; implements the port Ask."""

    __slots__ = ("caller_id", "wanted")

    def __init__(self, request: web.Request) -> None:
        super().__init__(request)
        self.caller_id: str | None = None
        self.wanted: Sequence[str] = ()

    @property
    def operation(self) -> str:
        """See Ask."""
        return "infer"

    async def target(self) -> tuple[str, str | None]:
        """See Ask: the path says it."""
        match = self._request.match_info
        return split_name(match["model"], match.get("version"))

    async def inputs(self, deployment: Deployment) -> Inputs:
        """See Ask."""
        if "Inference-Header-Content-Length" in self._request.headers:
            raise BadInput(
                "binary tensor data is not supported here; send the tensors as JSON (binary_data=False)",
                code="binary_unsupported",
            )
        document = parse_object(await read_body(self._request))
        caller_id = document.get("id")
        if caller_id is not None and not isinstance(caller_id, str):
            raise BadInput(f"id: expected a string, found {json_kind(caller_id)}", param="id")
        self.caller_id = caller_id
        self.wanted = _wanted(document.get("outputs"), deployment.manifest.outputs)
        tensors, items = parse_inputs(document.get("inputs"), deployment.manifest)
        timeout_s, tokens = _timeout_s(document.get("parameters")), tokens_of(tensors, deployment)
        return Inputs(tensors=tensors, item_count=items, tokens=tokens, timeout_s=timeout_s)


async def infer(request: web.Request) -> web.StreamResponse:
    """`POST /v2/models/{model}[/versions/{version}]/infer`."""
    call = InferCall(request)
    async with request.app[INFERENCE].run(call, request[REQUEST_ID], request[TRACEPARENT]) as answer:
        if answer.is_large:
            return await tell_whole(request, answer, _pieces(call, answer))
    return await tell(request, answer, json_answer(_document(call, answer), headers=answer.headers))


def _document(call: InferCall, answer: Answer) -> dict[str, Any]:
    try:
        tensors = [render_tensor(tensor) for tensor in _outputs(call, answer)]
    except UnicodeDecodeError as error:
        raise _not_text(answer, error) from error
    return {**_head(call, answer), "outputs": tensors}


def _pieces(call: InferCall, answer: Answer) -> Iterator[bytes]:
    """The same document as JSON, piece by piece. Raises ApiError before the first piece or not at all."""
    outputs = _outputs(call, answer)
    try:
        for tensor in outputs:
            require_text(tensor)
    except UnicodeDecodeError as error:
        raise _not_text(answer, error) from error
    yield orjson.dumps(_head(call, answer))[:-1] + b',"outputs":['
    for at, tensor in enumerate(outputs):
        if at:
            yield b","
        yield from tensor_pieces(tensor)
    yield b"]}"


def _head(call: InferCall, answer: Answer) -> dict[str, Any]:
    return {
        "model_name": answer.finished.model,
        "model_version": answer.finished.version,
        "id": call.caller_id if call.caller_id is not None else str(answer.finished.request_id),
    }


def _outputs(call: InferCall, answer: Answer) -> list[Tensor]:
    outputs = {t.name: t for t in answer.finished.outputs}
    return [outputs[name] for name in call.wanted or outputs]


def _not_text(answer: Answer, error: UnicodeDecodeError) -> ApiError:
    return ApiError(
        f"an output holds bytes that are not text, which JSON cannot carry: {error}",
        headers={**answer.headers, **NO_RETRY},  # it has run
    )


def _wanted(entries: Any, specs: Sequence[TensorSpec]) -> Sequence[str]:
    if entries is None:
        return ()
    if not isinstance(entries, list):
        raise BadInput(f"outputs: expected an array, found {json_kind(entries)}", param="outputs")
    known = {s.name for s in specs}
    names: list[str] = []
    for at, entry in enumerate(entries):
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name not in known:
            raise BadInput(
                f"outputs[{at}].name: expected one of {', '.join(sorted(known))}", param=f"outputs[{at}].name"
            )
        if name in names:  # each would be rendered again: a small request could fill the gateway's memory
            raise BadInput(f"output '{name}': asked for twice", param=f"outputs[{at}].name")
        names.append(name)
    return names


def _timeout_s(parameters: Any) -> float | None:
    """The scheduling extension's `timeout`: whole microseconds."""
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise BadInput(f"parameters: expected an object, found {json_kind(parameters)}", param="parameters")
    timeout_us = parameters.get("timeout")
    if timeout_us is None:
        return None
    if type(timeout_us) is not int or timeout_us <= 0:
        raise BadInput(
            "parameters.timeout: expected a whole number of microseconds above 0", param="parameters.timeout"
        )
    require_time(timeout_us / 1_000_000, param="parameters.timeout")
    return timeout_us / 1_000_000


async def server_metadata(_request: web.Request) -> web.Response:
    """`GET /v2`."""
    return json_answer({"name": SERVER_NAME, "version": server_version(), "extensions": []})


async def live(_request: web.Request) -> web.Response:
    """`GET /v2/health/live`."""
    return json_answer({"live": True})


async def ready(request: web.Request) -> web.Response:
    """`GET /v2/health/ready`."""
    reasons = request.app[HEALTH].reasons()
    if reasons:
        raise Unavailable("not ready: " + "; ".join(f"{k}: {v}" for k, v in reasons.items()), code="not_ready")
    return json_answer({"ready": True})


async def model_metadata(request: web.Request) -> web.Response:
    """`GET /v2/models/{model}[/versions/{version}]`."""
    deployment, caller, is_named = await _known(request)
    known = () if is_named else request.app[GATE].models(caller)
    listed = next((k for k in known if k[0].model == deployment.model), ())
    return json_answer(
        {
            "name": deployment.model,
            "versions": [deployment.version, *(d.version for d in listed if d.version != deployment.version)],
            "platform": f"pytorch_{deployment.manifest.layout}",
            "inputs": [_spec(s) for s in deployment.manifest.inputs],
            "outputs": [_spec(s) for s in deployment.manifest.outputs],
        }
    )


async def model_ready(request: web.Request) -> web.Response:
    """`GET /v2/models/{model}[/versions/{version}]/ready`: 503 when the model's pool has no queue or too long a one."""
    deployment, _, _ = await _known(request)
    request.app[QUEUES].check(deployment.pool)
    return json_answer({"name": deployment.model, "ready": True})


async def _known(request: web.Request) -> tuple[Deployment, Caller, bool]:
    """What the path means for the caller, who that is, and whether the path names a version."""
    gate = request.app[GATE]
    caller = await gate.caller(request.headers.get("Authorization"), "models")
    model, reference = split_name(request.match_info["model"], request.match_info.get("version"))
    return gate.resolve(model, reference, caller), caller, reference is not None


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
