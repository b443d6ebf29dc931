"""A way between a client and gateways on which answers get lost, and a text model small enough to be made at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import aiohttp
import torch
from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.processes import free_port

#: What happens to the answer of a call that was passed on: the client is told 500, or its connection is closed, or it
#: waits longer than it wants to. LOST_BEFORE: the call is not passed on at all.
FAILED, LOST, LATE, LOST_BEFORE = "failed", "lost", "late", "lost before"


class Crossing:
    """Passes calls on to one gateway after another. `faults` has one for each of the next calls; then all goes well.

    `on_fault` runs after a call was answered by the gateway and before its client hears anything.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = itertools.cycle(urls)
        self.faults: list[str] = []
        self.on_fault: Callable[[], Awaitable[None]] | None = None
        self.seen: list[tuple[str, int]] = []
        self.late_s = 2.0

    async def handle(self, session: aiohttp.ClientSession, request: web.Request) -> web.StreamResponse:
        body, fault = await request.read(), self.faults.pop(0) if self.faults else None
        if fault == LOST_BEFORE:
            return _hang_up(request)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")}
        target = next(self._urls) + request.path
        async with session.request(request.method, target, data=body, headers=headers) as answer:
            text = await answer.read()
            self.seen.append((answer.headers.get("x-request-id", ""), answer.status))
            if fault is not None and self.on_fault is not None:
                await self.on_fault()
            if fault == FAILED:
                return web.Response(status=500, text="the proxy failed")
            if fault == LOST:
                return _hang_up(request)
            if fault == LATE:
                await asyncio.sleep(self.late_s)
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in ("content-length", "transfer-encoding")}
            return web.Response(status=answer.status, body=text, headers=kept)


def _hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@asynccontextmanager
async def crossing(*urls: str) -> AsyncIterator[tuple[Crossing, str]]:
    """The way, and the address at which it begins."""
    way, port = Crossing(urls), free_port()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        app = web.Application()

        async def handle(request: web.Request) -> web.StreamResponse:
            return await way.handle(session, request)

        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield way, f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()


class _Mean(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, width)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        weight = attention_mask.unsqueeze(-1).to(torch.float32)
        found: torch.Tensor = (self.table(input_ids) * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return found


def text_bundle(folder: Path, *, width: int = 4) -> Path:
    """A bundle that makes embeddings of this width."""
    folder.mkdir()
    ids, batch = torch.full((2, 8), 3), torch.export.Dim("batch", min=1, max=64)
    shape = {0: batch, 1: torch.export.Dim("length", min=2, max=32)}
    with torch.no_grad():
        program = torch.export.export(_Mean(width).eval(), (ids, torch.ones_like(ids)), dynamic_shapes=(shape, shape))
    torch.export.save(program, folder / "model.pt2")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    description = {
        "task": "EMBEDDINGS",
        "layout": "pt2",
        "architecture": "",
        "architecture_args": {},
        "files": ["model.pt2", "tokenizer.json"],
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [-1]}],
        "outputs": [{"name": "embedding", "datatype": "FP32", "shape": [-1, width]}],
        "max_batch_items": 64,
        "max_length": 32,
        "torch_version": torch.__version__,
        "producer": f"a test, {uuid4()}",
    }
    (folder / "model.json").write_text(json.dumps(description))
    return folder


def another(bundle: Path, folder: Path) -> Path:
    """The same model as another version."""
    shutil.copytree(bundle, folder)
    description = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**description, "producer": f"a test, {uuid4()}"}))
    return folder
