"""Many processes for the price of one start: forked once everything is imported, before any event loop is there."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def forked(number: int, run: Callable[[int], None]) -> int:
    """Run it in so many processes at once, each told which one it is. Returns how many of them failed."""
    children = [_fork(run, which) for which in range(number)]
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def _fork(run: Callable[[int], None], which: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        run(which)
        status = 0
    except BaseException:  # noqa: BLE001 (whatever it is, the child must not go on as its parent)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
