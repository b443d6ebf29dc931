"""How a command says that a server is away: one line, the same from all of them, with where to look next."""

from __future__ import annotations


def unanswered(server: str, why: object, *, but: str = "") -> str:
    """The line. `why` is the error or what is known of it; `but` is what else it may mean, or what comes of it."""
    words = str(why) or type(why).__name__
    return f"{server} does not answer{but}: {words} (see  inferlog status)"
