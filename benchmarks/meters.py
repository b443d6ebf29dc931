"""CPU and memory of each part, read from the operating system: a part is a process with all its children."""

from __future__ import annotations

from collections.abc import Mapping

import psutil


def _family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """User and system time used so far by each part, finished children included."""
    found = {}
    for name, pid in pids.items():
        total = 0.0
        for process in _family(pid):
            times = process.cpu_times()
            total += times.user + times.system
        own = psutil.Process(pid).cpu_times()
        found[name] = total + own.children_user + own.children_system
    return found


def memory_mb(pids: Mapping[str, int]) -> dict[str, float]:
    """Proportional set size of each part, so that pages shared between processes count once."""
    found = {}
    for name, pid in pids.items():
        found[name] = round(sum(p.memory_full_info().pss for p in _family(pid)) / 1e6, 1)
    return found
