"""Waiting for conditions: the only place where tests pass time, always bounded and never asserted on."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")

_PAUSE_S = 0.02


class ConditionTimeout(AssertionError):
    """The condition did not come true in time; the message holds what was seen last."""


def wait_until(condition: Callable[[], T], *, timeout_s: float = 30.0, what: str = "") -> T:
    """The first true value of `condition()`. Exceptions count as not yet; the last one is shown on timeout."""
    ends = time.monotonic() + timeout_s
    last: object = None
    while True:
        try:
            value = condition()
            if value:
                return value
            last = value
        except AssertionError as error:
            last = error
        except (OSError, RuntimeError, LookupError, ValueError) as error:
            last = error
        if time.monotonic() > ends:
            raise ConditionTimeout(f"{what or condition} not within {timeout_s:g} s; last: {last!r}")
        time.sleep(_PAUSE_S)


@overload
async def eventually(condition: Callable[[], Awaitable[T]], *, timeout_s: float = ..., what: str = ...) -> T: ...


@overload
async def eventually(condition: Callable[[], T], *, timeout_s: float = ..., what: str = ...) -> T: ...


async def eventually(condition: Callable[[], Any], *, timeout_s: float = 30.0, what: str = "") -> Any:
    """The same for coroutines: `condition` may be a function or return an awaitable."""
    ends = time.monotonic() + timeout_s
    last: object = None
    while True:
        try:
            found = condition()
            value = await found if inspect.isawaitable(found) else found
            if value:
                return value
            last = value
        except (AssertionError, OSError, RuntimeError, LookupError, ValueError) as error:
            last = error
        if time.monotonic() > ends:
            raise ConditionTimeout(f"{what or condition} not within {timeout_s:g} s; last: {last!r}")
        await asyncio.sleep(_PAUSE_S)
