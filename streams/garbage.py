"""Python's collector of cycles, told how this process works: a batch makes tens of thousands of objects, and no cycles.

By default it looks through all that was made lately at every 700th object, and every so often through everything that
the process holds: a third of the ledger's time, for nothing, since records go when their batch does.
"""

from __future__ import annotations

import gc
from typing import Final

#: As many new objects as a large batch makes, before the young ones are looked through.
_YOUNG_OBJECTS: Final = 100_000
_TIMES: Final = 10


def collect_seldom() -> None:
    """From now on: what is there stays, unseen by the collector; what comes is looked through every 100,000 objects.

    For the end of a start-up. Cycles that are made later still go, after some batches.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _TIMES, _TIMES)
