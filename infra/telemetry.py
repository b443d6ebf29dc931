"""Logs: one line per event, a sentence and its fields, to standard error.

Fields are passed as `extra={"fields": {...}}`, never formatted into the sentence, so that they can be searched.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_LIBRARIES = ("aiohttp", "aiokafka", "botocore", "boto3", "urllib3", "s3transfer")
_AGAIN_AFTER_S = 5.0
_MAX_TEXTS = 1000


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        tail = "".join(f" {k}={_plain(v)}" for k, v in fields.items())
        line = f"{self.formatTime(record)} {record.levelname:<7} {record.name}: {record.getMessage()}{tail}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _plain(value: Any) -> str:
    text = str(value)
    return json.dumps(text) if " " in text or not text else text


class Repetitions(logging.Filter):
    """Lets a library's line through once in 5 s, with the number of times it was left out before; ours always.

    While a server is away its client says so several times a second, in the same words.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._said: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        if record.name.partition(".")[0] not in _LIBRARIES:
            return True
        line, now_s = (record.name, record.levelno, record.getMessage()), self._clock()
        said_s, left_out = self._said.get(line, (float("-inf"), 0))
        if now_s - said_s < _AGAIN_AFTER_S:
            self._said[line] = (said_s, left_out + 1)
            return False
        if len(self._said) >= _MAX_TEXTS:
            self._said.clear()
        self._said[line] = (now_s, 0)
        if left_out:
            record.fields = {**getattr(record, "fields", {}), "left_out": left_out}
        return True


def configure_logging(level: str | None = None) -> None:
    """Log to standard error from `level` on (INFERLOG_LOG_LEVEL, else INFO)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    handler.addFilter(Repetitions())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel((level or os.environ.get("INFERLOG_LOG_LEVEL") or "INFO").upper())
    for noisy in _LIBRARIES:
        logging.getLogger(noisy).setLevel(logging.WARNING)
