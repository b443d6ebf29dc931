"""JSON text that may come from anybody: a value that every part of this program can go on with, or a reason in words.

Beyond what is no JSON it refuses what Python's reader takes and other readers, or our own writer, do not.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

#: Lists and objects inside one another. Libraries walk them by recursion; the published schemas are about 12 deep.
MAX_NESTING = 64


class NoDocument(ValueError):
    """Text that is not taken for a JSON document; the message says what is wrong with it."""


def parsed(text: str) -> Any:
    """What the text says. Raises NoDocument for anything but JSON (RFC 8259) of at most MAX_NESTING levels, and for
    an object with the same key twice, a number that no double holds and half a surrogate pair."""
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
    except RecursionError:
        raise NoDocument(f"lists and objects are inside one another more than {MAX_NESTING} deep") from None
    except NoDocument:
        raise
    except ValueError as error:
        raise NoDocument(f"it is not JSON: {error}") from None
    if deeper_than(found, MAX_NESTING):
        raise NoDocument(f"lists and objects are inside one another more than {MAX_NESTING} deep")
    if "\\u" in text or not text.isascii():
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise NoDocument(f"text of it is half a surrogate pair, which no UTF-8 can say: {error}") from None
    return found


def deeper_than(value: Any, most: int) -> bool:
    """Whether lists and objects are inside one another more than `most` times. Looks at one level after the other."""
    level = [value]
    for _ in range(most + 1):
        level = [v for v in level if isinstance(v, (dict, list))]
        if not level:
            return False
        level = [one for v in level for one in (v.values() if isinstance(v, dict) else v)]
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise NoDocument(f"an object has the key {twice[:80]!r} twice")
    return found


def _float(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise NoDocument(f"no double holds the number {text[:40]}")
    return found


def _constant(text: str) -> NoReturn:
    raise NoDocument(f"{text} is no JSON")
