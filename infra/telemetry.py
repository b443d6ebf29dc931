"""Logs: one line per event, a sentence and its fields, to standard error.

Fields are passed as `extra={"fields": {...}}`, never formatted into the sentence, so that they can be searched.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any


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


def configure_logging(level: str | None = None) -> None:
    """Log to standard error from `level` on (INFERLOG_LOG_LEVEL, else INFO)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel((level or os.environ.get("INFERLOG_LOG_LEVEL") or "INFO").upper())
    for noisy in ("aiokafka", "botocore", "boto3", "urllib3", "s3transfer"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
