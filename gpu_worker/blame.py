"""Whose an error is: one request's, one version's, or the process's. This is the one place where that is decided.

an ItemError                             code said so: the request's          it fails
a ModelError                             code said so: the version's          whatever asks for it fails
a MachineError                           the device is lost, or something     the process ends, unless whoever met it
                                         is away that waiting may mend        waits
a cancellation, an exit                  nobody's                             the process ends
anything else, with one request in hand  unforeseen, but the request's        it fails; at 20 in a row without a success
                                                                              the process ends
anything else, with several in hand      nobody's yet                         each is tried alone
anything else, with none in hand         a bug of what polls, records,        the process ends, with nothing committed
                                         commits or waits

A process that ends is started again and does again what was not committed, so an error of one request must not end it:
it would end the next one too, and so on. But were each request failed for what is wrong with the process, everybody
would be refused in silence; hence the bound. Code that has requests in hand stands in `Blame.judging`, and nothing else
catches what it did not foresee.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpu_worker.endings import Failure
from gpu_worker.errors import MachineError, WorkerError

log = logging.getLogger(__name__)

#: So many unforeseen errors, one request each, without one request served between them are not the requests' fault.
MOST_IN_A_ROW = 20
UNFORESEEN = "internal"
_NO_FAULTS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
_LONGEST_WORDS = 300


class Unserviceable(RuntimeError):
    """Request after request failed in ways that nobody foresaw: the process is at fault, not they."""


class Blame:
    """The judgement, and the count that bounds it. One for all parts of a process; `counts` holds `unforeseen`."""

    def __init__(self, *, most_in_a_row: int = MOST_IN_A_ROW) -> None:
        self._most_in_a_row = most_in_a_row
        self._in_a_row = 0
        self.counts: Counter[str] = Counter()

    @contextmanager
    def judging(self, doing: str, fail: Callable[[Failure], None], *, requests: int = 1) -> Iterator[None]:
        """Around what is done with so many requests. When it raises, `fail` is called with why the request fails; of
        several it is no more than the reason to try each of them alone.

        `doing` says what is done, as in "running it". Lets pass what is the process's; raises Unserviceable for one
        too many in a row. A panic of native code is no Exception, and a request's all the same.
        """
        try:
            yield
        except (MachineError, Unserviceable, *_NO_FAULTS):
            raise
        except WorkerError as error:
            fail(Failure(code=error.code, message=str(error)))
        except BaseException as error:  # noqa: BLE001  this is the boundary
            fail(self._unforeseen(error, doing, requests))

    def _unforeseen(self, error: BaseException, doing: str, requests: int) -> Failure:
        words = f"{type(error).__name__}: {first_line(error)}"
        fields = {"doing": doing, "requests": requests, "reason": words}
        log.error("unforeseen failure", extra={"fields": fields}, exc_info=error)
        self.counts["unforeseen"] += 1
        self._in_a_row += requests == 1
        if self._in_a_row >= self._most_in_a_row:
            raise Unserviceable(
                f"{self._in_a_row} requests in a row failed unforeseen, the last while {doing}: {words}"
            ) from error
        return Failure(code=UNFORESEEN, message=f"the worker failed while {doing}: {words}")

    def served(self) -> None:
        """A request was answered: the process works."""
        self._in_a_row = 0


def first_line(error: BaseException) -> str:
    """The beginning of what an error says of itself."""
    lines = str(error).strip().splitlines()
    return lines[0][:_LONGEST_WORDS] if lines else "no message"
