"""`python -m api.checker`: looks at the schemas of strangers for `api.turns`, a question and its answer per line.

It dies of whatever takes more than a second of the processor or half a GiB of memory; its parent answers for it then.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson

from api.errors import Unprocessable
from api.registry_catalogue import Candidate
from schemas.compatibility import compatibility_messages

PROCESSOR_S = 1.0
MEMORY_BYTES = 512 * 1024 * 1024
_LONGEST_MESSAGE, _MOST_MESSAGES = 1000, 100
_LOWER_PRIORITY = 10


def objections(text: str, known: Sequence[tuple[int, str]]) -> list[str]:
    """What stands against a schema beside these versions and their texts. Raises Unprocessable when it is no schema."""
    new = Candidate.parse(text).definition
    found = [(number, said) for number, old in known for said in compatibility_messages(new, orjson.loads(old))]
    return [f"version {number}: {said}"[:_LONGEST_MESSAGE] for number, said in found[:_MOST_MESSAGES]]


def answer(line: bytes) -> dict[str, Any]:
    """One question's answer; what is wrong with the schema in it is told as `error`."""
    question = orjson.loads(line)
    try:
        if "known" in question:
            known = [(one["version"], one["text"]) for one in question["known"]]
            return {"objections": objections(question["schema"], known)}
        seen = Candidate.parse(question["schema"])
        return {"fingerprint": seen.fingerprint, "digest": seen.digest}
    except Unprocessable as error:
        return {"error": error.message}


def main() -> None:
    """Answer until standard input ends, which it does with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent, on the same terminal, says when it is over
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # nobody waits for the answer any more
    os.nice(_LOWER_PRIORITY)
    with suppress(ValueError, OSError):  # not every system bounds that
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)  # nobody handles its signal, which ends the process
        said = orjson.dumps(answer(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(said + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
