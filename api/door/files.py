"""How many connections the system lets this process have: each is an open file."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

#: Files beside connections of callers: servers, libraries, logs.
_OTHER_FILES = 256


def room_for_files(wanted: int) -> int:
    """How many connections the system's limit of open files leaves, at most `wanted`; the soft limit is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        if raised < needed:
            fields = {"open_files": raised, "needed": needed}
            logger.warning(
                "the limit of open files leaves fewer connections than were asked for", extra={"fields": fields}
            )
        return max(1, raised - _OTHER_FILES)
    return wanted
