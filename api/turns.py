"""Schemas that callers without a key bring are looked at in a process of their own, one at a time, with rests between.

Libraries of others walk them, in pure Python: beside the event loop they would hold it up, and one that never comes to
an end, or that ends its process, would take the gateway along. Here it ends the child, and the next call gets another.
"""

from __future__ import annotations

import asyncio
import logging
import select
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import orjson

from api.errors import Unavailable, Unprocessable
from api.registry_catalogue import INVALID_SCHEMA, Candidate, Entry

logger = logging.getLogger(__name__)

MAX_WAITING = 16
#: How long one waits for its turn, and for its answer once it has it. The child itself ends after its own bound of
#: processor time, which is less; this is for one that does not get the processor.
TURN_WITHIN_S, ANSWER_WITHIN_S = 10.0, 15.0
_REST_PER_WORK = 4.0
_LONGEST_LINE_BYTES = 1024 * 1024
_PROGRAM = (sys.executable, "-m", "api.checker")


class Turns:
    """One child that takes turns; it is started when it is first needed. `clock` and `sleep` are in seconds."""

    def __init__(
        self,
        *,
        program: Sequence[str] = _PROGRAM,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        self._program, self._clock, self._sleep = program, clock, sleep
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._child: asyncio.subprocess.Process | None = None
        self._rested_s = float("-inf")
        self._at_work: set[asyncio.Future[bytes]] = set()

    async def objections(self, text: str, known: Sequence[Entry]) -> list[str]:
        """What stands against a schema beside these. Raises Unprocessable when the text is no schema, Unavailable."""
        said = await self._ask({"schema": text, "known": [{"version": e.version, "text": e.text} for e in known]})
        found: list[str] = said["objections"]
        return found

    async def candidate(self, text: str) -> Candidate:
        """What a schema looks like. Raises Unprocessable when the text is no schema, Unavailable."""
        said = await self._ask({"schema": text})
        return Candidate(definition=orjson.loads(text), fingerprint=said["fingerprint"], digest=said["digest"])

    async def close(self) -> None:
        """End the child; what waits is cancelled."""
        for work in list(self._at_work):
            work.cancel()
        await self._end()

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._waiting >= MAX_WAITING:
            raise Unavailable("too many callers wait for the same; come back in a moment")
        # Counted until the work is done: a caller who hangs up does not free the child.
        self._waiting += 1
        work = asyncio.ensure_future(self._in_turn(orjson.dumps(question) + b"\n"))
        self._at_work.add(work)
        work.add_done_callback(self._done)
        answer: dict[str, Any] = orjson.loads(await asyncio.shield(work))
        if "error" in answer:
            raise Unprocessable(answer["error"], code=INVALID_SCHEMA)
        return answer

    def _done(self, work: asyncio.Future[bytes]) -> None:
        self._waiting -= 1
        self._at_work.discard(work)
        if not work.cancelled():
            work.exception()  # a caller who hung up does not fetch it

    async def _in_turn(self, question: bytes) -> bytes:
        try:
            await asyncio.wait_for(self._turn.acquire(), TURN_WITHIN_S)
        except asyncio.TimeoutError:
            raise Unavailable("too many callers wait for the same; come back in a moment") from None
        try:
            await self._sleep(max(0.0, self._rested_s - self._clock()))
            began_s = self._clock()
            try:
                return await self._answer(question)
            finally:
                ended_s = self._clock()
                self._rested_s = ended_s + _REST_PER_WORK * (ended_s - began_s)
        finally:
            self._turn.release()

    async def _answer(self, question: bytes) -> bytes:
        # Both pipes are only ever used by the one whose turn it is.
        try:
            child = await self._running()
            if child.stdin is None or child.stdout is None:
                raise OSError("expected a child with pipes")
            child.stdin.write(question)
            answer = await asyncio.wait_for(child.stdout.readline(), ANSWER_WITHIN_S)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            await self._end()
            logger.warning("the process that looks at schemas did not answer", exc_info=True)
            raise Unavailable("schemas cannot be looked at now; come back in a moment") from error
        except asyncio.CancelledError:
            await self._end()
            raise
        if not answer.endswith(b"\n"):
            status = await child.wait()
            await self._end()
            logger.warning("a schema ended the process that looked at it", extra={"fields": {"status": status}})
            raise Unprocessable("schema: expected one that can be looked at in a second", code=INVALID_SCHEMA)
        return answer

    async def _running(self) -> asyncio.subprocess.Process:
        if self._child is not None and _is_gone(self._child):
            await self._end()  # before it was asked: the schema that comes now had no part in it
        if self._child is None:
            pipe = asyncio.subprocess.PIPE
            self._child = await asyncio.create_subprocess_exec(
                *self._program, stdin=pipe, stdout=pipe, limit=_LONGEST_LINE_BYTES
            )
        return self._child

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()


def _is_gone(child: asyncio.subprocess.Process) -> bool:
    """Whether nobody reads its questions any more. The system is asked, which knows it before the event loop does."""
    if child.returncode is not None or child.stdin is None or child.stdin.is_closing():
        return True
    pipe = child.stdin.get_extra_info("pipe") or child.stdin.get_extra_info("socket")  # asyncio's and uvloop's name
    poll = select.poll()
    poll.register(pipe.fileno(), 0)  # that the other end is closed is told without being asked for
    return bool(poll.poll(0))
