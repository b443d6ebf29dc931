"""Large answers, rendered in pieces by a thread and written as their caller takes them.

Whole, a result of 32 MiB would be some 160 MB of JSON, and rendering it one second in which nobody else is answered: a
thread alone does not help, since one call into the encoder holds the interpreter until it returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import orjson
from aiohttp import web

from api.door.answers import marks
from api.services import REQUEST_ID
from api.surfaces.tensor_json import numbers
from schemas.tensors import BYTES, ELEMENT_SIZE_BYTES, Tensor

logger = logging.getLogger(__name__)

#: Elements rendered in one go: some 300 KB of JSON and a few milliseconds.
PIECE_ELEMENTS = 16 * 1024
#: How long a caller may take to read a large answer, whose outputs take room that others wait for.
READ_WITHIN_S = 30.0


async def tell_in_pieces(
    request: web.Request,
    pieces: Iterator[bytes],
    *,
    headers: Mapping[str, str],
    within_s: float = READ_WITHIN_S,
    told: Callable[[], None] = lambda: None,
) -> web.StreamResponse:
    """Answer with these pieces of JSON, chunked. A caller that has not read them within `within_s` is cut off; `told`
    is called when all of them were handed to its connection.

    What rendering the first piece raises is raised here; later there is no way to tell it but to cut the answer off.
    """
    loop = asyncio.get_running_loop()
    first = await loop.run_in_executor(None, next, pieces, None)
    response = web.StreamResponse(headers={**headers, **marks(request[REQUEST_ID]), "Content-Type": "application/json"})

    async def write() -> None:
        await response.prepare(request)
        piece = first
        while piece is not None:
            await response.write(piece)
            piece = await loop.run_in_executor(None, next, pieces, None)
        await response.write_eof()
        told()

    try:
        await asyncio.wait_for(write(), within_s)
    except ConnectionError:
        pass  # the caller has gone
    except Exception as error:  # the answer has begun, so no other one can be given
        late = isinstance(error, asyncio.TimeoutError)
        fields = {
            "request_id": request[REQUEST_ID],
            "reason": f"not read within {within_s:g} s" if late else repr(error),
        }
        logger.warning("a large answer was cut off", extra={"fields": fields}, exc_info=not late)
        if request.transport is not None:
            request.transport.abort()
    return response


def tensor_pieces(tensor: Tensor) -> Iterator[bytes]:
    """What `render_tensor` gives, as JSON. Raises UnicodeDecodeError where `require_text` does."""
    head = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    yield orjson.dumps(head)[:-1] + b',"data":['
    if tensor.datatype == BYTES:
        yield from array_pieces(in_groups((element.decode() for element in tensor.elements()), PIECE_ELEMENTS))
    else:
        yield from array_pieces(_numbers(tensor))
    yield b"]}"


def require_text(tensor: Tensor) -> None:
    """Raise UnicodeDecodeError for BYTES elements that are not text."""
    if tensor.datatype == BYTES:
        for element in tensor.elements():
            element.decode()


def array_pieces(groups: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    """The inside of a JSON array of what these groups hold, a group at a time. No group may be empty."""
    comma = b""
    for group in groups:
        yield comma + orjson.dumps(group)[1:-1]
        comma = b","


def in_groups(values: Iterable[Any], size: int) -> Iterator[Sequence[Any]]:
    """So many values at a time."""
    left = iter(values)
    while group := list(islice(left, size)):
        yield group


def _numbers(tensor: Tensor) -> Iterator[Sequence[Any]]:
    data = memoryview(tensor.data)
    step = PIECE_ELEMENTS * ELEMENT_SIZE_BYTES[tensor.datatype]
    for at in range(0, len(data), step):
        yield numbers(tensor.datatype, data[at : at + step])
